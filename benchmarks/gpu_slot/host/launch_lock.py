"""The lock of launches between real processes, on the real GPU's name.

Run as `python -m benchmarks.gpu_slot.host.launch_lock DIRECTORY GPU TURNS HOLD_S` by `lock_facts`:
one contender, which answers each turn with a JSON line of its times.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_slot.spread import spread
from coserve.guest.launch_lock import LaunchLock
from harvester.contracts.clock import monotonic_ns

_TIMEOUT_S = 30.0
_CONTENDERS = 4
_KILLED_HOLDS_S = 60.0
_WAITS_S = 0.5
"""The waiter of a killed holder waits for at least this long, by the parent's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHold:
    """Nanoseconds of CLOCK_MONOTONIC."""

    asked_ns: int
    held_ns: int
    released_ns: int


def lock_facts(gpu: str, *, tiny: bool) -> dict[str, Any]:
    """Mutual exclusion and waits of contenders, and how soon a killed holder's turn is free."""
    turns, hold_s = (2, 0.01) if tiny else (4, 0.05)
    with tempfile.TemporaryDirectory(prefix="rosemux-locks-") as directory:
        contenders = [_contender(directory, gpu, turns, hold_s) for _ in range(_CONTENDERS)]
        taken = [turn for one in contenders for turn in _turns(one)]
        found = turn_figures(taken)
        found["freed_by_kill_s"] = [_freed_by_kill(directory, gpu) for _ in range(1 if tiny else 3)]
        found["file"] = [file.name for file in Path(directory).iterdir()]
    return {"contenders": _CONTENDERS, "hold_s": hold_s, **found}


def turn_figures(turns: Sequence[LockHold]) -> dict[str, Any]:
    ordered = sorted(turns, key=lambda turn: turn.held_ns)
    pairs = list(pairwise(ordered))
    return {
        "turns": len(ordered),
        "overlaps": sum(later.held_ns < earlier.released_ns for earlier, later in pairs),
        "wait_s": spread([(turn.held_ns - turn.asked_ns) * 1e-9 for turn in ordered]),
        "idle_between_turns_s": spread(
            [max(0, later.held_ns - earlier.released_ns) * 1e-9 for earlier, later in pairs]
        ),
    }


def _freed_by_kill(directory: str, gpu: str) -> float:
    """Seconds from SIGKILL of the holder until a process that waits has the turn."""
    holder = _contender(directory, gpu, 1, _KILLED_HOLDS_S)
    waiter = None
    try:
        _expect_held(holder)
        waiter = _contender(directory, gpu, 1, 0.0)
        time.sleep(_WAITS_S)
        killed_ns = monotonic_ns()
        holder.kill()
        (turn,) = _turns(waiter)
        return (turn.held_ns - killed_ns) * 1e-9
    finally:
        for process in (holder, waiter):
            if process is not None:
                process.kill()
                process.communicate()


def _contender(directory: str, gpu: str, turns: int, hold_s: float) -> "subprocess.Popen[bytes]":
    module = "benchmarks.gpu_slot.host.launch_lock"
    return subprocess.Popen(
        [sys.executable, "-m", module, directory, gpu, str(turns), str(hold_s)],
        stdout=subprocess.PIPE,
    )


def _expect_held(contender: "subprocess.Popen[bytes]") -> None:
    assert contender.stdout is not None
    if contender.stdout.readline() != b"held\n":
        raise RuntimeError("a contender got no turn")


def _turns(contender: "subprocess.Popen[bytes]") -> list[LockHold]:
    """Turns of a contender that comes to its end. Raises RuntimeError where it failed."""
    output, _ = contender.communicate(timeout=_TIMEOUT_S)
    if contender.returncode:
        raise RuntimeError(f"a contender ended with {contender.returncode}")
    return [LockHold(**json.loads(line)) for line in output.splitlines() if line != b"held"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_slot.host.launch_lock", description=__doc__
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("gpu")
    parser.add_argument("turns", type=int)
    parser.add_argument("hold_s", type=float)
    given = parser.parse_args()
    lock = LaunchLock(given.directory, [given.gpu])
    for _ in range(given.turns):
        asked_ns = monotonic_ns()
        lock.acquire(timeout_s=_TIMEOUT_S)
        held_ns = monotonic_ns()
        print("held", flush=True)
        time.sleep(given.hold_s)
        # Before the release: a later holder's time is then never counted as earlier.
        released_ns = monotonic_ns()
        lock.release()
        times = {"asked_ns": asked_ns, "held_ns": held_ns, "released_ns": released_ns}
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
