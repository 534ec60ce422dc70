"""How long production waits for a core that a guest holds:
`python -m benchmarks.preemption --json PATH`.

A thread of the usual class sleeps for random times on one core, as production's engine does between
requests, and takes the time from the end of its sleep to its first instruction. On the same core a
process works without end, in an idle group, in the idle class, or like any other process. The
kernel's timer and a core's wake-up are in every figure: what the guest adds is the difference to
`awake`, an empty loop in an idle group.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.preemption.held_core import KINDS
from benchmarks.testbed.interleaving import interleaved
from benchmarks.testbed.reporting import report
from coserve.guest import isolation
from coserve.guest.isolation import IDLE_CLASS, IDLE_GROUP, NO_ISOLATION, Isolation
from harvester.contracts.errors import Unsupported

Arm = tuple[str, Isolation | None]
"""Work of the guest, and its isolation; None without a guest."""

_WAKE_UPS = 400
"""Wake-ups of one arm and round: a second or less."""
_SLEEP_S = 0.5e-3, 3e-3
_WARM_S = 0.3
_ARMS: tuple[Arm, ...] = (
    ("alone", None),
    *[(kind, IDLE_GROUP) for kind in KINDS],
    *[(kind, IDLE_CLASS) for kind in KINDS if kind != "awake"],
    ("steps", NO_ISOLATION),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.preemption", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--core", type=int, default=0)
    given = parser.parse_args()
    report("preemption", lambda: measured(given.rounds, given.core), given.json, engines=False)


def measured(rounds: int, core: int) -> dict[str, Any]:
    """Late wake-ups in µs of each arm, over all rounds."""
    arms, refused = possible()
    late_us: dict[str, list[float]] = {named(arm): [] for arm in arms}
    for arm, number in interleaved(arms, rounds):
        with held(arm, core):
            late_us[named(arm)] += wake_ups_us(core, seed=number)
    isolation.clear()
    return {
        "core": core,
        "kernel": os.uname().release,
        "wake_ups": rounds * _WAKE_UPS,
        "refused": refused,
        "late_us": {name: summary(each) for name, each in late_us.items()},
    }


def possible() -> tuple[list[Arm], dict[str, str]]:
    """Arms that this machine permits, and why it refuses the others."""
    arms, refused = list[Arm](), dict[str, str]()
    for arm in _ARMS:
        try:
            with held(arm, 0):
                arms.append(arm)
        except Unsupported as error:
            refused[named(arm)] = str(error)
    return arms, refused


def named(arm: Arm) -> str:
    kind, guest = arm
    return kind if guest is None else f"{kind}, {guest.backend}"


@contextmanager
def held(arm: Arm, core: int) -> Iterator[None]:
    """The arm's guest at work. Raises Unsupported if its isolation is not to be had."""
    kind, guest = arm
    if guest is None:
        yield
        return
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.preemption.held_core", kind],
        env=os.environ | one_thread,
        stdout=subprocess.PIPE,
    ) as child:
        try:
            os.sched_setaffinity(child.pid, {core})
            assert child.stdout is not None
            child.stdout.readline()
            isolation.apply_to_process(guest, child.pid, guest=child.pid)
            yield
        finally:
            child.kill()


def wake_ups_us(core: int, *, seed: int) -> list[float]:
    """How late this thread runs after its sleeps, on the core."""
    before, rng, late_us = os.sched_getaffinity(0), random.Random(seed), list[float]()
    os.sched_setaffinity(0, {core})
    try:
        time.sleep(_WARM_S)
        for _ in range(_WAKE_UPS):
            sleep_s = rng.uniform(*_SLEEP_S)
            due_s = time.perf_counter() + sleep_s
            time.sleep(sleep_s)
            late_us.append((time.perf_counter() - due_s) * 1e6)
    finally:
        os.sched_setaffinity(0, before)
    return late_us


def summary(late_us: list[float]) -> dict[str, float]:
    p50, p90, p99, p999 = np.quantile(late_us, (0.5, 0.9, 0.99, 0.999))
    return {
        "mean": round(float(np.mean(late_us)), 1),
        "p50": round(float(p50), 1),
        "p90": round(float(p90), 1),
        "p99": round(float(p99), 1),
        "p999": round(float(p999), 1),
        "max": round(max(late_us), 1),
    }


if __name__ == "__main__":
    main()
