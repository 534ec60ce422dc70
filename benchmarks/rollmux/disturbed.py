"""What drift and failures cost: ours against hourly regrouping, and against stopping jobs."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.rollmux.pieces import ArmOfSeed, Pieces, job_count, kept
from scheduler.sim.rollmux.workload import Drift

FAILING = ("ours", "ours_resubmit", "rollmux_paper")
"""Ours replaces a failed node in its group; the others stop its jobs and let them arrive anew."""


def drift_figures(seeds: Sequence[int], pieces: Pieces) -> dict[str, Any]:
    attainment, cost, cost_max = {}, {}, {}
    drifts = (Drift.INCREASING, Drift.DECREASING, Drift.MIXED)
    pieces.run_ahead(
        [
            ArmOfSeed(name=name, seed=seed, drift=drift)
            for drift in drifts
            for seed in seeds
            for name in ("ours", "hourly")
        ]
    )
    for drift in drifts:
        ours = [pieces.arm(ArmOfSeed(name="ours", seed=seed, drift=drift)).arm for seed in seeds]
        hourly = [
            pieces.arm(ArmOfSeed(name="hourly", seed=seed, drift=drift)).arm for seed in seeds
        ]
        ratios = [one.dollars / other.dollars for one, other in zip(ours, hourly, strict=True)]
        attainment[drift.value] = kept(ours)
        cost[drift.value], cost_max[drift.value] = statistics.mean(ratios), max(ratios)
    return {
        "drift_seeds": len(seeds),
        "slo_attainment_drift": attainment,
        "drift_cost_ratio_vs_hourly": cost,
        "drift_cost_ratio_vs_hourly_max": cost_max,
    }


def failure_figures(seeds: Sequence[int], pieces: Pieces, *, mtbf_h: float) -> dict[str, Any]:
    wanted = {
        name: [ArmOfSeed(name=name, seed=seed, mtbf_h=mtbf_h) for seed in seeds] for name in FAILING
    }
    pieces.run_ahead([one for each in wanted.values() for one in each])
    arms = {name: [pieces.arm(one).arm for one in each] for name, each in wanted.items()}
    return {
        "seeds": len(seeds),
        "node_mtbf_h": mtbf_h,
        "failures": {name: sum(one.failures for one in found) for name, found in arms.items()},
        "restarts_per_job": {
            name: sum(one.restarts for one in found) / job_count(found)
            for name, found in arms.items()
        },
        "moves_per_job": {
            name: sum(one.moves for one in found) / job_count(found) for name, found in arms.items()
        },
        "slo_attainment": {name: kept(found) for name, found in arms.items()},
        "cost_ratio": {
            name: statistics.mean(
                one.dollars / ours.dollars for one, ours in zip(found, arms["ours"], strict=True)
            )
            for name, found in arms.items()
        },
    }
