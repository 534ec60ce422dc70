"""Time of one arrival's decision with many jobs active, with the other parts' planner settings."""

import gc
import statistics
from typing import Any

import numpy as np

from benchmarks.rollmux.arms import our_planner
from harvester.contracts.clock import MonotonicClock
from scheduler.model import PhaseKind
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.sim.rollmux.workload import ROLLOUT_ACCELERATORS, SimulatedJob, w1

ACTIVE = (200, 2_000, 20_000)
PROBES = 200


def decision_times(*, quick: bool) -> dict[str, Any]:
    p99: dict[str, float] = {}
    all_2000_ms = 0.0
    _, planner = _arrived(20)  # compiles; every planner below starts with cold caches
    for active in ACTIVE[:2] if quick else ACTIVE:
        spent_ms, planner = _arrived(active)
        if active == 2_000:
            all_2000_ms = sum(spent_ms)
        p99[f"active_{active}"] = _probe(planner, active)
    return {"decision_ms_p99": p99, "all_2000_arrivals_ms": all_2000_ms}


def _arrived(active: int) -> tuple[list[float], GroupPlanner]:
    """Every job arrived one after another, each known well by the time of the next."""
    planner = our_planner()
    clock, spent_ms = MonotonicClock(), []
    for at, one in enumerate(w1(active, jobs=active)):
        began_s = clock.now()
        planner.place_job(one.job, now=float(at))
        spent_ms.append((clock.now() - began_s) * 1e3)
        _learn(planner, one)
    return spent_ms, planner


def _learn(planner: GroupPlanner, one: SimulatedJob) -> None:
    accelerators = ROLLOUT_ACCELERATORS * one.job.phases[0].nodes
    planner.facts[one.job.job].learn_tail(one.curve, accelerators=accelerators)
    for rollout_s, training_s in one.lengths_s[np.arange(8) % one.iterations].tolist():
        for kind, solo_s in ((PhaseKind.ROLLOUT, rollout_s), (PhaseKind.TRAINING, training_s)):
            planner.observe_phase(one.job.job, kind, solo_s, now=0.0)


def _probe(planner: GroupPlanner, active: int) -> float:
    """P99 in milliseconds of one more arrival, each alone on top of the active jobs."""
    clock, spent_ms = MonotonicClock(), []
    gc.collect()
    for one in w1(active + 1, jobs=PROBES):
        job = _renamed(one)
        began_s = clock.now()
        planner.place_job(job, now=float(active))
        spent_ms.append((clock.now() - began_s) * 1e3)
    return statistics.quantiles(spent_ms, n=100)[98]


def _renamed(one: SimulatedJob) -> Any:
    from msgspec.structs import replace

    return replace(one.job, job=f"probe-{one.job.job}")
