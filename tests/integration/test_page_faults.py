"""Damage to the files of a slot ends no process: a full file system, pages cut short, deleted and
replaced under load. Each side is a process of its own; its exit status shows a signal."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory, PageFault

TIMEOUT_S = 60

PRODUCTION = """
import json, sys, time
import msgspec
from pathlib import Path
from coserve.pulse.engine_cores import EngineStep
from coserve.vllm.environment import Role, SlotEnvironment
from coserve.vllm.pulse_reporter import PulseReporter
STEP = EngineStep(running=0, kv_usage_ratio=0.5, prompt_tokens=10, generation_tokens=1,
                  ttft_s=(0.0,), inter_token_s=(), finished_prompt_tokens=())
reporter = PulseReporter(SlotEnvironment(Role.PRODUCTION, "production", Path(sys.argv[1])))
reporter.attach_middleware()
print("up", flush=True)
requests = 0
while not Path(sys.argv[2]).exists():
    key = reporter.arrive(body_bytes=500)
    reporter.step(lambda: msgspec.structs.replace(STEP, wall_s=time.time()))
    reporter.finish(key)
    requests += 1
    time.sleep(0.001)
while not Path(sys.argv[2]).with_name("stopped").exists():
    time.sleep(0.01)
mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if sys.argv[1] in line]
print(json.dumps({"requests": requests, "mapped": mapped, "silent": reporter._silent}))
"""

GUEST = """
import json, sys, time
from pathlib import Path
from coserve.guest.guest_slot import GuestSlot
from harvester.contracts.bell import sleep_until_rung
slot = GuestSlot(Path(sys.argv[1]), token_limit=512)
print("up", flush=True)
closed = 0
def look():
    global closed
    closed += not slot.decide(for_step=True).open
    slot.launched(decodes=1, prefill_tokens=0)
    slot.finished()
    slot.publish()
    sleep_until_rung(slot.written(), timeout_s=0.002)
while not Path(sys.argv[2]).exists():
    look()
until = time.monotonic() + 60
while not slot.decide().open and time.monotonic() < until:
    look()
print(json.dumps({"closed": closed, "opens": slot.decide().open, "why": slot.decide().reason}))
"""

AGENT = """
import json, sys, time
from pathlib import Path
from harvester.agent.sense import SlotSensor
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.ids import Epoch
from harvester.contracts.page import Grant, GrantMode, PageDirectory, ProductionModel
from harvester.policy.sample import KillSwitch, LeaseView
pages = PageDirectory(Path(sys.argv[1]))
sensor = SlotSensor(pages, pulses=("pulse.production.0",))
page = pages.grant_page()
page.make()
grant = Grant(epoch=1, mode=GrantMode.OPEN, pulses=("pulse.production.0",), ttft_slo_s=9.0,
              itl_slo_s=9.0, epsilon=9.0, production=ProductionModel(prefill_base_s=0.1))
lease = LeaseView(epoch=Epoch(1))
print("up", flush=True)
faults, stop = set(), Path(sys.argv[2])
while not stop.with_name("stopped").exists():
    sample = sensor.sample(lease=lease, kill_switch=KillSwitch.NONE)
    faults.update(str(pulse.fault) for pulse in sample.pulses)
    page.keep()
    page.write(grant, now_ns=monotonic_ns(), ttl_ns=500_000_000)
    time.sleep(0.002)
print(json.dumps({"faults": sorted(faults)}))
"""

CUT = """
import json, sys
from pathlib import Path
import os
from harvester.contracts.bell import ring, sleep_until_rung
from harvester.contracts.page import PageDirectory, Pulse
pages = PageDirectory(Path(sys.argv[1]))
writer = pages.pulse_writer("production", 0)
writer.write(Pulse(), now_ns=1, ttl_ns=10**18)
reader = pages.pulse_reader("pulse.production.0")
reader.read(now_ns=2)
word = reader.peek()
os.truncate(writer.path, 0)
sleep_until_rung((word,), timeout_s=0.2)
ring(word.address)
ring(writer._bell.address)
fault = reader.read(now_ns=2).fault
try:
    import ctypes
    print(json.dumps({"fault": fault, "again": reader.peek() is None}), flush=True)
    if sys.argv[2] == "touch":
        ctypes.string_at(word.address, 1)
finally:
    pass
"""

FULL = """
import json, os, sys, time, logging
from pathlib import Path
from coserve.vllm.environment import Role, SlotEnvironment
from coserve.vllm.pulse_reporter import BEAT_S, PulseReporter
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory, PageFault
logged = []
class Kept(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger().addHandler(Kept())
root = Path(sys.argv[1])
slot, ballast = root / "slot", root / "ballast"
slot.mkdir()
def fill():
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
def serve(reporter):
    for _ in range(20):
        reporter.finish(reporter.arrive(body_bytes=100))
def fault():
    return PageDirectory(slot).pulse_reader("pulse.production.0").read().fault
def within_beats(holds):
    for _ in range(1000):
        if holds():
            return True
        time.sleep(BEAT_S / 2)
    return False
said = {}
fill()
reporter = PulseReporter(SlotEnvironment(Role.PRODUCTION, "production", slot))
serve(reporter)
time.sleep(3 * BEAT_S)
said["while full"] = fault()
ballast.unlink()
said["once there is room"] = within_beats(lambda: fault() is None)
fill()
serve(reporter)
said["a page that is there, while full"] = fault()
os.truncate(slot / "pulse.production.0", 0)
fill()
serve(reporter)
time.sleep(3 * BEAT_S)
said["cut while full"] = fault()
ballast.unlink()
said["once there is room again"] = within_beats(lambda: fault() is None)
said["logged"] = logged
print(json.dumps(said))
"""


def started(script: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


@contextmanager
def reaped(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def trouble(pages: Path, dice: random.Random) -> None:
    """One thing that a careless or hostile hand does to one page."""
    page = pages / dice.choice(["grant", "guest", "pulse.production.0"])
    try:
        match dice.choice(["cut", "cut", "delete", "replace", "lock"]):
            case "cut":
                os.truncate(page, dice.choice([0, 1, 12, 100, 4000]))
            case "delete":
                page.unlink()
            case "replace":
                other = pages / "other"
                other.write_bytes(page.read_bytes()[: dice.choice([0, 50, 4096])])
                other.rename(page)
            case _:
                page.with_name(f".{page.name}.lock").unlink()
    except FileNotFoundError:
        pass


def test_pages_cut_deleted_and_replaced_under_load_end_no_process(tmp_path: Path) -> None:
    pages, stop = PageDirectory.create(tmp_path / "pages").path, tmp_path / "stop"
    dice = random.Random(18)
    with ExitStack() as stack:
        agent, production, guest = (
            stack.enter_context(reaped(started(script, pages, stop)))
            for script in (AGENT, PRODUCTION, GUEST)
        )
        for process in (agent, production, guest):
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for _ in range(400):
            trouble(pages, dice)
            time.sleep(0.005)
        stop.touch()
        said = {}
        for name, process in (("guest", guest), ("production", production), ("agent", agent)):
            if process is production:
                (tmp_path / "stopped").touch()
            out, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, (name, process.returncode)
            said[name] = json.loads(out)
    assert said["production"]["requests"] > 100
    assert not said["production"]["silent"]
    assert said["guest"]["closed"] > 0, "trouble closes the gate"
    assert said["guest"]["opens"], said["guest"]
    assert set(said["agent"]["faults"]) > {"None"}, "and the agent sees faults"


def test_production_maps_the_bell_of_its_own_page_and_nothing_else_of_the_slot(
    tmp_path: Path,
) -> None:
    pages, stop = PageDirectory.create(tmp_path / "pages").path, tmp_path / "stop"
    writer = PageDirectory(pages).grant_writer()
    with reaped(started(PRODUCTION, pages, stop)) as production:
        assert production.stdout is not None
        production.stdout.readline()
        stop.touch()
        (tmp_path / "stopped").touch()
        out, _ = production.communicate(timeout=TIMEOUT_S)
    writer.close()
    mapped = json.loads(out)["mapped"]
    assert [line.split("/")[-1] for line in mapped] == ["pulse.production.0"]


@pytest.mark.parametrize(("hand", "status"), [("kernel", 0), ("touch", -7)])
def test_the_kernel_may_look_at_a_page_that_was_cut_and_the_process_may_not(
    tmp_path: Path, hand: str, status: int
) -> None:
    """The second case shows that the first would see a signal: 7 is SIGBUS."""
    process = started(CUT, tmp_path, hand)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status
    assert json.loads(out) == {"fault": "torn", "again": True}


def test_production_serves_on_a_full_file_system_and_says_why_it_has_no_page(
    tmp_path: Path,
) -> None:
    place = tmp_path / "full"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=1m,mode=755 none {place}"
    probe = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"no file system of its own can be mounted here: {probe.stderr.strip()}")
    in_own_mounts = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    done = subprocess.run(
        [*in_own_mounts, sys.executable, "-c", FULL, str(place)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    said = json.loads(done.stdout)
    logged = said.pop("logged")
    assert said == {
        "while full": "torn",
        "once there is room": True,
        "a page that is there, while full": None,
        "cut while full": "torn",
        "once there is room again": True,
    }
    assert sum("No space left" in line for line in logged) == 2, "once for each time"


def test_two_engines_of_one_name_close_the_slot_until_one_is_killed(tmp_path: Path) -> None:
    pages, stop = PageDirectory.create(tmp_path / "pages"), tmp_path / "stop"
    reader = pages.pulse_reader("pulse.production.0")

    def sees(fault: PageFault | None) -> bool:
        until_ns = monotonic_ns() + TIMEOUT_S * 10**9
        while (seen := reader.read().fault is fault) is False and monotonic_ns() < until_ns:
            time.sleep(0.02)
        return seen

    with reaped(started(PRODUCTION, pages.path, stop)) as first:
        assert sees(None)
        with reaped(started(PRODUCTION, pages.path, stop)) as second:
            assert sees(PageFault.CONFLICT)
            first.kill()
            first.wait()
            assert sees(None), "the second has the page"
            with reaped(started(PRODUCTION, pages.path, stop)) as third:
                assert sees(PageFault.CONFLICT)
                third.kill()
                third.wait()
                assert sees(None), "the second is alone again"
            stop.touch()
            (tmp_path / "stopped").touch()
            out, _ = second.communicate(timeout=TIMEOUT_S)
            assert second.returncode == 0
            assert not json.loads(out.splitlines()[-1])["silent"]
