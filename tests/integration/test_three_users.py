"""Agent, production and guest as three users, and a fourth user without permissions.

Each process imports what it needs and then becomes its user, because a developer's interpreter may
lie where other users cannot read.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.page import Grant, PageOwners, PageReader, Pulse

AGENT, PRODUCTION, GUEST, STRANGER, GROUP = 64101, 64102, 64103, 64104, 64100
PULSE = "pulse.prod.0"
CONFIG = f"""\
mode: harvest
page_root: {{root}}/pages
state_dir: {{root}}/state
http: {{{{port: 0}}}}
owners: {{{{agent: [{AGENT}], production: [{PRODUCTION}], guest: [{GUEST}]}}}}
page_group: {GROUP}
unsafe_experiments: true
slots:
  - name: slot0
    engine_url: http://127.0.0.1:8001
    policy: {{{{cooldown_s: 0.3, epsilon: 9,  proof: {{{{share_ratio: 0}}}}}}}}
"""

BECOME = """
def become(user, *groups):
    import os
    os.setgroups(groups)
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.umask(0o077)
"""

AGENT_PROCESS = """
import encodings.ascii, encodings.idna, sys
import harvester.agent.agent_process
from harvester.cli import main
sys.argv = ["rosemux", "agent", "--config", sys.argv[1]]
become({agent}, {group})
main()
"""

PRODUCTION_PROCESS = """
import json, sys, time
from pathlib import Path
import msgspec
from coserve.pulse.pulse_state import PulseState
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory, ProductionModel
from harvester.contracts.page.owners import environment_owners
become({production}, {group})
pages = PageDirectory(Path(sys.argv[1]), environment_owners())
page, grants, book = pages.own_pulse("prod", 0), pages.grant_reader(), PulseState()
model = ProductionModel(prefill_base_s=0.1, decode_base_s=0.05)
samples = dict(model=model, model_samples=1000,
               ttft_s_recent=(0.03,) * 32, itl_s_recent=(0.008,) * 32)
while True:
    now_ns = monotonic_ns()
    pulse = msgspec.structs.replace(book.pulse(now_ns=now_ns), **samples)
    page.keep()
    page.write(pulse, now_ns=now_ns, ttl_ns=500_000_000)
    print(json.dumps({{"absence": page.absence, "grant": grants.read().fault}}), flush=True)
    time.sleep(0.05)
"""

GUEST_PROCESS = """
import json, sys, time
from pathlib import Path
from coserve.guest.guest_slot import GuestSlot
from harvester.contracts.page.owners import environment_owners
become({guest}, {group})
slot = GuestSlot(Path(sys.argv[1]), token_limit=512, owners=environment_owners())
while True:
    decision = slot.decide()
    slot.publish()
    print(json.dumps({{"open": decision.open, "why": decision.reason}}), flush=True)
    time.sleep(0.05)
"""

ATTEMPTS = """
import fcntl, json, os, sys
from pathlib import Path
root, slot = Path(sys.argv[1]), Path(sys.argv[1]) / "slot0"
become(int(sys.argv[2]), *map(int, sys.argv[3:]))

def locks(path):
    def attempt():
        opened = os.open(path, os.O_RDWR if path.name.endswith(".lock") else os.O_RDONLY)
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(opened)
    return attempt

def swaps(path):
    def attempt():
        os.rename(path, path.with_name("away"))
        os.rename(path.with_name("away"), path)
    return attempt

attempts = {{
    "make a page": lambda: (slot / "pulse.prod.7").touch(exist_ok=False),
    "make a slot": lambda: (root / "slot1").mkdir(),
    "throw the switch": lambda: (root / "kill").write_text("drain"),
    "swap the slot": swaps(slot),
    "lock the slot": locks(slot),
}}
for name in ("grant", "guest", "pulse.prod.0"):
    attempts[f"write {{name}}"] = (slot / name).open
    attempts[f"write {{name}}"] = lambda name=name: os.close(os.open(slot / name, os.O_RDWR))
    attempts[f"swap {{name}}"] = swaps(slot / name)
    attempts[f"lock {{name}}"] = locks(slot / f".{{name}}.lock")
    attempts[f"swap the lock of {{name}}"] = swaps(slot / f".{{name}}.lock")
done = []
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        continue
    done.append(name)
print(json.dumps(done))
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start processes as three other users"
)
_clock = MonotonicClock()


class Told:
    """A process of some user, and the last line of its output."""

    def __init__(self, script: str, *arguments: str | Path, stream: str = "stdout") -> None:
        users = {"agent": AGENT, "production": PRODUCTION, "guest": GUEST, "group": GROUP}
        owners = PageOwners(
            agent=frozenset({AGENT}),
            production=frozenset({PRODUCTION}),
            guest=frozenset({GUEST}),
        )
        pipe: dict[str, Any] = {stream: subprocess.PIPE}
        self.process = subprocess.Popen(
            [sys.executable, "-c", BECOME + script.format(**users), *map(str, arguments)],
            text=True,
            env={**os.environ, **owners.variable()},
            cwd="/",
            **pipe,
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._listen, args=(getattr(self.process, stream),))
        self._thread.start()

    def last(self) -> Any:
        return json.loads(self.lines[-1]) if self.lines else None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()

    def _listen(self, stream: Any) -> None:
        with stream:
            self.lines.extend(line for line in iter(stream.readline, ""))


def wait_for(holds: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    end_s = _clock.now() + seconds
    tick = threading.Event()
    while _clock.now() < end_s:
        if value := holds():
            return value
        tick.wait(0.02)
    raise AssertionError(f"not within {seconds} s")


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory open to every user, like /run; the agent's own ones as tmpfiles makes them."""
    place = Path(tempfile.mkdtemp(prefix="rosemux-users-", dir="/dev/shm"))
    place.chmod(0o755)
    for name in ("pages", "state"):
        (place / name).mkdir()
        os.chown(place / name, AGENT, AGENT)
    (place / "agent.yaml").write_text(CONFIG.format(root=place))
    (place / "agent.yaml").chmod(0o644)
    yield place
    shutil.rmtree(place)


class Scene:
    def __init__(self, root: Path) -> None:
        self.slot = root / "pages" / "slot0"
        self.agent = Told(AGENT_PROCESS, root / "agent.yaml", stream="stderr")
        self.processes = [self.agent]
        self.url = wait_for(self._url)
        self.production = self.start(PRODUCTION_PROCESS, self.slot)
        self.guest = self.start(GUEST_PROCESS, self.slot)

    def start(self, script: str, *arguments: str | Path) -> Told:
        self.processes.append(Told(script, *arguments))
        return self.processes[-1]

    def stop(self) -> None:
        for told in self.processes:
            told.stop()

    def lease(self) -> Any:
        body = {"request_id": "r1", "slot": "slot0", "tenant": "t", "job": "j", "duration_s": 60}
        request = urllib.request.Request(
            self.url + "/v1/leases", data=json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)["type"] == "granted"

    def attempts(self, user: int, *groups: int) -> set[str]:
        arguments = map(str, (self.slot.parent, user, *groups))
        told = self.start(ATTEMPTS, *arguments)
        told.process.wait(timeout=60)
        wait_for(lambda: told.lines)
        return set(told.last())

    def _url(self) -> str | None:
        said = [line for line in self.agent.lines if "listens on " in line]
        assert said or self.agent.process.poll() is None, "".join(self.agent.lines)
        return "http://" + said[0].split("listens on ")[1].split()[0] if said else None


@pytest.fixture
def scene(root: Path) -> Iterator[Scene]:
    scene = Scene(root)
    yield scene
    scene.stop()


def test_each_user_writes_its_own_page_alone_and_others_change_nothing(
    scene: Scene,
) -> None:
    wait_for(scene.lease)
    wait_for(lambda: (scene.guest.last() or {}).get("open"))
    wait_for(lambda: (scene.production.last() or {}).get("grant", "none") is None)
    owners = {name: (scene.slot / name).stat().st_uid for name in ("grant", "guest", PULSE)}
    assert owners == {"grant": AGENT, "guest": GUEST, PULSE: PRODUCTION}

    assert scene.attempts(STRANGER) == set()
    # The guest is a member of the group and may add files; it can change no other user's.
    own = {"write guest", "swap guest", "lock guest", "swap the lock of guest"}
    assert scene.attempts(GUEST, GROUP) == own | {"make a page", "lock the slot"}
    (scene.slot / "pulse.prod.7").unlink()
    wait_for(lambda: scene.guest.last()["open"])

    scene.production.stop()
    (scene.slot / PULSE).unlink()
    (scene.slot / f".{PULSE}.lock").unlink()
    forged = scene.start(PRODUCTION_PROCESS.replace("{production}", "{guest}"), scene.slot)
    wait_for(lambda: (forged.last() or {}).get("absence", "none") == "")
    pulse = PageReader(scene.slot / PULSE, Pulse, owners=frozenset({GUEST}))
    wait_for(lambda: pulse.read().record is not None)
    wait_for(lambda: not scene.guest.last()["open"])
    grants = PageReader(scene.slot / "grant", Grant, owners=frozenset({AGENT}))
    wait_for(lambda: (grant := grants.read().record) and grant.reason == f"{PULSE} foreign")
    wait_for(lambda: scene.guest.last()["why"] == "grant_closed")
    forged.stop()
    restarted = scene.start(PRODUCTION_PROCESS, scene.slot)
    wait_for(lambda: "another user" in (restarted.last() or {}).get("absence", ""))
    assert restarted.process.poll() is None, "production serves on"


@pytest.mark.parametrize(
    ("owner", "mode", "advice"), [(STRANGER, 0o755, "chown"), (0, 0o777, "chmod o-w")]
)
def test_the_agent_does_not_start_on_a_page_root_that_others_can_change(
    root: Path, owner: int, mode: int, advice: str
) -> None:
    os.chown(root / "pages", owner, owner)
    (root / "pages").chmod(mode)
    agent = Told(AGENT_PROCESS, root / "agent.yaml", stream="stderr")
    try:
        assert agent.process.wait(timeout=60) == 2
    finally:
        agent.stop()
    assert advice in "".join(agent.lines)


def test_an_agent_of_a_user_that_engines_would_not_believe_does_not_start(root: Path) -> None:
    for name in ("pages", "state"):
        os.chown(root / name, STRANGER, STRANGER)
    script = AGENT_PROCESS.replace("{agent}", str(STRANGER))
    agent = Told(script, root / "agent.yaml", stream="stderr")
    try:
        assert agent.process.wait(timeout=60) == 2
    finally:
        agent.stop()
    assert "owners.agent" in "".join(agent.lines)
