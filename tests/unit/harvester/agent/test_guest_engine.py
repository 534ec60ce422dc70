"""A guest that an operator started: its end, and what it leaves behind."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from harvester.agent import guest_engine
from harvester.agent.guest_engine import MISPLACED, GuestEngine, run_with_restarts
from harvester.agent.guest_placement import misplacement
from harvester.agent.mps_watch import MpsWatch
from harvester.agent.sense import SlotSensor
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import Epoch
from harvester.contracts.page import Guest, PageDirectory, PageName, Pulse
from harvester.contracts.process import ProcessId
from harvester.platform.kv_segment import KvSegment
from harvester.policy.sample import KillSwitch, LeaseView
from tests.mps_daemon import MpsDaemon

PRODUCTION_PID = 7
# An engine with a worker. Each writes its process id; the worker outlives its engine, if it may.
ENGINE = """
import os, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
(folder / "new").write_text(f"{os.getpid()} {worker.pid}")
(folder / "new").rename(folder / "pids")
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""
# An engine that ignores SIGTERM.
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENGINE

# An engine whose worker ignores SIGTERM in a session of its own, and has a worker in a group of its
# own. The engine is killed, as by the kernel when memory runs out.
SCATTERED = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
CORE = '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
print(subprocess.Popen(sleeper, process_group=0).pid, flush=True)
time.sleep(300)
'''
core = subprocess.Popen(
    [sys.executable, "-c", CORE], start_new_session=True, stdout=subprocess.PIPE, text=True
)
worker = int(core.stdout.readline())
(folder / "new").write_text(f"{os.getpid()} {core.pid} {worker}")
(folder / "new").rename(folder / "pids")
time.sleep(float(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED = f"""
import asyncio, sys
from harvester.agent.guest_engine import MISPLACED, GuestEngine, run_with_restarts
from harvester.agent.guest_placement import misplacement
asyncio.run(GuestEngine([sys.executable, "-c", {DEAF!r}, sys.argv[1], "300"], {{}}).run())
"""


def engine(
    folder: Path, seconds: float = 300.0, *, text: str = ENGINE, **more: object
) -> GuestEngine:
    arguments = [sys.executable, "-c", text, str(folder), str(seconds)]
    return GuestEngine(arguments, {}, **more)  # type: ignore[arg-type]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - other processes
        await asyncio.sleep(0.01)


async def started(folder: Path) -> list[int]:
    await until((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def daemon(tmp_path: Path) -> MpsDaemon:
    (tmp_path / "pipes").mkdir()
    return MpsDaemon(tmp_path / "pipes")


@pytest.fixture
def watch(daemon: MpsDaemon) -> MpsWatch:
    return MpsWatch(daemon.control, look_s=60.0)


async def test_its_end_is_the_engine_s_and_no_worker_is_left(tmp_path: Path) -> None:
    assert await engine(tmp_path, 0.0).run() == 3
    pids = await started(tmp_path)
    assert [pid for pid in pids if runs(pid)] == []


async def test_a_stop_request_ends_it_well_with_all_its_processes(tmp_path: Path) -> None:
    guest = engine(tmp_path)
    running = asyncio.create_task(guest.run())
    pids = await started(tmp_path)
    assert all(os.getpgid(pid) == pids[0] != os.getpgid(0) for pid in pids)
    assert os.getsid(pids[0]) == os.getsid(0), "the idle class counts within one session"
    guest.ask_to_stop()
    assert await running == 0
    assert [pid for pid in pids if runs(pid)] == []


async def test_an_engine_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    guest = engine(tmp_path, text=DEAF, stop_s=0.2)
    running = asyncio.create_task(guest.run())
    pids = await started(tmp_path)
    guest.ask_to_stop()
    assert await running == 0
    assert [pid for pid in pids if runs(pid)] == []


async def test_a_killed_engine_leaves_no_process_of_any_session(tmp_path: Path) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "300")
    try:
        assert await engine(tmp_path, 0.0, text=SCATTERED).run() == 128 + signal.SIGKILL
        pids = await started(tmp_path)
        assert [pid for pid in pids if psutil.pid_exists(pid)] == [], "a zombie holds its name"
        assert runs(other.pid), "a child of this process that is none of the engine's"
    finally:
        other.kill()
        await other.wait()


async def test_it_ends_no_sooner_than_its_last_process_unless_it_is_asked_to(
    tmp_path: Path,
    daemon: MpsDaemon,
    watch: MpsWatch,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guest_engine, "_POLLS", 5)
    guest = engine(tmp_path, 0.0, mps=watch)
    daemon.stop()
    running = asyncio.create_task(guest.run())
    main, worker = await started(tmp_path)
    await until(lambda: f"no other one starts beside them: {worker}" in caplog.text)
    await asyncio.sleep(1.5)
    assert (runs(main), runs(worker), running.done()) == (False, True, False)
    guest.ask_to_stop()
    assert await running == 0
    os.kill(worker, signal.SIGKILL)


async def test_killed_itself_it_leaves_no_engine(tmp_path: Path) -> None:
    operator = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(tmp_path))
    main, worker = await started(tmp_path)
    try:
        operator.kill()
        await operator.wait()
        await until(lambda: not runs(main))
    finally:
        os.kill(worker, signal.SIGKILL)  # vLLM's own end with their engine.


async def test_its_shared_segment_goes_with_it(tmp_path: Path) -> None:
    segment = KvSegment("guest_kv", directory=tmp_path)
    segment.path.write_bytes(bytes(24))
    await engine(tmp_path, 0.0, segment=segment).run()
    assert not segment.path.exists(), "of a dead guest it would count as memory in use"


async def test_under_mps_the_daemon_ends_its_work_before_anybody_signals_it(
    tmp_path: Path, daemon: MpsDaemon, watch: MpsWatch
) -> None:
    guest = engine(tmp_path, mps=watch)
    running = asyncio.create_task(guest.run())
    pids = await started(tmp_path)
    daemon.serve({70: [PRODUCTION_PID, *pids]})
    guest.ask_to_stop()
    assert await running == 0
    assert [pid for pid in pids if runs(pid)] == []
    ended = [command for command in daemon.commands() if "terminate" in command]
    assert sorted(ended[:2]) == sorted(f"terminate_client 70 {pid}" for pid in pids)


async def test_under_mps_a_working_guest_is_not_signalled_before_a_second_request(
    tmp_path: Path,
    daemon: MpsDaemon,
    watch: MpsWatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guest = engine(tmp_path, mps=watch)
    running = asyncio.create_task(guest.run())
    pids = await started(tmp_path)
    daemon.serve({70: [PRODUCTION_PID, *pids]}, refuses=True)
    guest.ask_to_stop()
    await until(lambda: "the guest lives on" in caplog.text)
    assert all(runs(pid) for pid in pids)
    daemon.serve({70: [PRODUCTION_PID]})
    guest.ask_to_stop()
    assert await running == 0
    assert [pid for pid in pids if runs(pid)] == []


async def test_a_missing_program_is_named() -> None:
    with pytest.raises(ConfigError, match="/nonexistent/vllm"):
        await GuestEngine(["/nonexistent/vllm"], {}).run()


@pytest.fixture
def pages(tmp_path: Path) -> PageDirectory:
    """A page directory with the record of an engine."""
    pages = PageDirectory.create(tmp_path / "pages")
    page = pages.guest_writer()
    record = Guest(kv_tokens=7, processes=(ProcessId(pid=41, start_ticks=9),))
    page.write(record, now_ns=monotonic_ns(), ttl_ns=500_000_000)
    return pages


async def test_a_stopping_guest_s_page_states_it_until_its_end_although_it_writes_on(
    tmp_path: Path, pages: PageDirectory
) -> None:
    said, living = said_on(pages), pages.guest_writer()
    living.write(said, now_ns=monotonic_ns(), ttl_ns=500_000_000)
    guest = engine(tmp_path, text=DEAF, pages=pages, stop_s=1.0)
    running = asyncio.create_task(guest.run())
    await started(tmp_path)
    assert not said_on(pages).leaving
    guest.ask_to_stop()
    await until(lambda: said_on(pages).leaving)
    living.write(said, now_ns=monotonic_ns(), ttl_ns=500_000_000)
    assert said_on(pages).leaving
    assert (said_on(pages).kv_tokens, len(said_on(pages).processes)) == (7, 1)
    living.close()
    assert await running == 0
    assert not (pages.path / PageName.LEAVING).exists()


async def test_a_guest_that_comes_after_one_that_left_speaks_for_itself(
    pages: PageDirectory,
) -> None:
    said = said_on(pages)
    pages.leaving_writer().write(Guest(leaving=True), now_ns=monotonic_ns(), ttl_ns=10**11)
    pages.guest_writer().write(said, now_ns=monotonic_ns(), ttl_ns=10**11)
    sample = SlotSensor(pages, pulses=()).sample(
        lease=LeaseView(epoch=Epoch(1)), kill_switch=KillSwitch.NONE
    )
    assert sample.guest.record is not None
    assert not sample.guest.record.leaving


async def test_the_page_of_one_that_was_stopped_goes_with_it(
    tmp_path: Path, pages: PageDirectory
) -> None:
    guest = engine(tmp_path, pages=pages)
    running = asyncio.create_task(guest.run())
    await started(tmp_path)
    guest.ask_to_stop()
    assert await running == 0
    assert not (pages.path / PageName.GUEST).exists()


async def test_one_that_crashes_says_nothing(tmp_path: Path, pages: PageDirectory) -> None:
    assert await engine(tmp_path, 0.0, pages=pages).run() == 3
    assert not said_on(pages).leaving


async def test_one_that_is_stopped_before_it_spoke_leaves_no_page(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path / "pages")
    guest = engine(tmp_path, pages=pages)
    running = asyncio.create_task(guest.run())
    await started(tmp_path)
    guest.ask_to_stop()
    assert await running == 0
    assert not (pages.path / PageName.GUEST).exists()


def said_on(pages: PageDirectory) -> Guest:
    """The guest record that the agent believes, however old."""
    leaving = pages.leaving_reader().read().record
    record = leaving or pages.guest_reader().read_left().record
    assert record is not None
    return record


async def test_it_ends_to_start_anew_once_production_runs_on_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another pod in production's place, as the page says: a restart takes its GPUs."""
    monkeypatch.setattr(guest_engine, "_PLACE_LOOK_S", 0.01)
    pages = PageDirectory.create(tmp_path / "pages")
    writer = pages.pulse_writer("production", 0)

    def serves(*gpus: str) -> None:
        writer.write(Pulse(gpus=gpus), now_ns=monotonic_ns(), ttl_ns=10**11)

    serves("GPU-1")
    placed = partial(misplacement, ["GPU-1"], pages)
    running = asyncio.create_task(
        run_with_restarts(lambda: engine(tmp_path, misplacement=placed), clock=MonotonicClock())
    )
    pids = await started(tmp_path)
    await asyncio.sleep(0.1)
    serves()
    await asyncio.sleep(0.1)
    assert all(map(runs, pids)), "production that states none contradicts nothing"
    serves("GPU-2")
    assert await asyncio.wait_for(running, 60) == MISPLACED
    assert [pid for pid in pids if runs(pid)] == []
    assert "production runs on GPU-2" in caplog.text


async def test_it_is_misplaced_only_if_three_looks_in_a_row_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_engine, "_PLACE_LOOK_S", 0.01)
    left = iter(["elsewhere", "elsewhere", "", "elsewhere", "elsewhere"])
    running = asyncio.create_task(engine(tmp_path, misplacement=lambda: next(left, "")).run())
    pids = await started(tmp_path)
    await asyncio.sleep(0.2)
    assert next(left, None) is None
    assert all(map(runs, pids))
    left = iter(["elsewhere"] * 3)
    assert await asyncio.wait_for(running, 60) == MISPLACED


async def test_a_look_that_fails_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guest_engine, "_PLACE_LOOK_S", 0.01)
    found: list[OSError | str] = [OSError("no file left"), *["elsewhere"] * 3]
    looks = iter(found)

    def look() -> str:
        seen = next(looks)
        if isinstance(seen, OSError):
            raise seen
        return seen

    run = engine(tmp_path, misplacement=look).run()
    assert await asyncio.wait_for(run, 60) == MISPLACED
    assert "no file left" in caplog.text


def test_a_silent_pulse_leaves_open_where_production_runs(tmp_path: Path) -> None:
    """One engine of two stalls for a moment, or restarts."""
    pages = PageDirectory.create(tmp_path / "pages")
    gpus = ["GPU-1", "GPU-2"]
    a = pages.pulse_writer("a", 0)
    a.write(Pulse(gpus=("GPU-1",)), now_ns=monotonic_ns(), ttl_ns=10**11)
    assert "would be on GPU-2" in misplacement(gpus, pages)
    assert misplacement(gpus, pages, ["pulse.a.0", "pulse.b.0"]) == ""
    b = pages.pulse_writer("b", 0)
    b.write(Pulse(gpus=("GPU-2",)), now_ns=monotonic_ns() - 10**10, ttl_ns=5 * 10**8)
    assert misplacement(gpus, pages) == ""
    b.write(Pulse(gpus=("GPU-2",)), now_ns=monotonic_ns(), ttl_ns=10**11)
    assert misplacement(gpus, pages) == ""
    b.write(Pulse(gpus=("GPU-3",)), now_ns=monotonic_ns(), ttl_ns=10**11)
    assert "would be on GPU-2" in misplacement(gpus, pages, ["pulse.b.0"])
