"""A guest that fails is started again, later each time, until it is asked to stop."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from harvester.agent import guest_engine
from harvester.agent.guest_engine import (
    MISPLACED,
    GuestEngine,
    restart_wait,
    run_with_restarts,
)
from harvester.contracts.clock import MonotonicClock

# Fails until it has been started a given number of times; each start adds a line.
FAILING = """
import sys
with open(sys.argv[1], "a") as file:
    file.write("x\\n")
sys.exit(3 if len(open(sys.argv[1]).readlines()) < int(sys.argv[2]) else 0)
"""

# Fails twice, and leaves a core behind that heeds no SIGTERM in a session of its own; adds a word
# for each start: whether an earlier core is still there.
LEAVING = """
import os, subprocess, sys
from pathlib import Path

def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

file, pids = Path(sys.argv[1]), Path(sys.argv[1] + ".pids")
before = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
core = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", core], start_new_session=True)
pids.write_text(" ".join(map(str, [*before, child.pid])))
with file.open("a") as out:
    out.write("beside\\n" if any(map(lives, before)) else "alone\\n")
os._exit(3 if len(before) < 2 else 0)
"""


def starts(file: Path) -> int:
    return len(file.read_text().splitlines())


def failing(file: Path, times: int) -> GuestEngine:
    return GuestEngine([sys.executable, "-c", FAILING, str(file), str(times)], {})


def test_waits_double_to_ten_minutes_and_begin_anew_after_a_long_life() -> None:
    failures, waits = 0, []
    for life_s in (*[1.0] * 8, 599.0, 600.0, 1.0):
        wait_s, failures = restart_wait(life_s, failures)
        waits.append(wait_s)
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600, 10, 20]


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_engine, "_FIRST_WAIT_S", 0.01)


def test_a_guest_that_fails_is_started_until_one_ends_well(no_wait: None, tmp_path: Path) -> None:
    file = tmp_path / "starts"
    run = run_with_restarts(lambda: failing(file, 3), clock=MonotonicClock())
    assert asyncio.run(run) == 0
    assert starts(file) == 3


def test_an_engine_s_own_status_is_no_sign_that_it_is_misplaced(
    no_wait: None, tmp_path: Path
) -> None:
    file = tmp_path / "starts"
    program = (
        "import sys\nopen(sys.argv[1], 'a').write('x\\n')\n"
        f"sys.exit({MISPLACED} if len(open(sys.argv[1]).readlines()) < 2 else 0)"
    )
    run = run_with_restarts(
        lambda: GuestEngine([sys.executable, "-c", program, str(file)], {}),
        clock=MonotonicClock(),
    )
    assert asyncio.run(run) == 0
    assert starts(file) == 2


def test_none_starts_beside_a_process_of_the_one_before(no_wait: None, tmp_path: Path) -> None:
    file = tmp_path / "starts"
    engine = [sys.executable, "-c", LEAVING, str(file)]
    run = run_with_restarts(lambda: GuestEngine(engine, {}), clock=MonotonicClock())
    assert asyncio.run(run) == 0
    assert file.read_text().split() == ["alone"] * 3


def test_a_stop_while_it_waits_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "starts"

    async def stopped() -> int:
        running = asyncio.create_task(
            run_with_restarts(lambda: failing(file, 99), clock=MonotonicClock())
        )
        while not file.exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        # The engine has ended within this, and the wait is ten seconds.
        await asyncio.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(running, 60.0)

    assert asyncio.run(stopped()) == 0
    assert starts(file) == 1


def test_a_stop_while_the_engine_runs_starts_no_other(tmp_path: Path) -> None:
    file = tmp_path / "starts"
    program = "import sys, time\nopen(sys.argv[1], 'a').write('x\\n')\ntime.sleep(300)"

    async def stopped() -> int:
        running = asyncio.create_task(
            run_with_restarts(
                lambda: GuestEngine([sys.executable, "-c", program, str(file)], {}),
                clock=MonotonicClock(),
            )
        )
        while not file.exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(running, 60.0)

    assert asyncio.run(stopped()) == 0
    assert starts(file) == 1
