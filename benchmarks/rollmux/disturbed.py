"""Cost of drift, failures and broken assumptions of the papers: ours against hourly regrouping,
against stopping jobs, and in every variant of the world."""

from collections.abc import Sequence
from typing import Any

from benchmarks.rollmux.arm_figures import arm_on_seeds, dollars_over
from benchmarks.rollmux.pieces import ArmOfSeed, Pieces
from benchmarks.rollmux.variants import VARIANTS
from scheduler.sim.rollmux.workload import Drift

DRIFTS = (Drift.INCREASING, Drift.DECREASING, Drift.MIXED)
DRIFTING = ("ours", "hourly")
FAILING = ("ours", "ours_resubmit", "rollmux_paper")
"""Ours replaces a failed node in its group; the others stop its jobs and let them arrive anew."""


def drift_figures(seeds: Sequence[int], pieces: Pieces) -> dict[str, Any]:
    chosen = {
        drift: {
            name: [ArmOfSeed(name=name, seed=seed, drift=drift) for seed in seeds]
            for name in DRIFTING
        }
        for drift in DRIFTS
    }
    pieces.run_ahead([one for arms in chosen.values() for each in arms.values() for one in each])
    return {drift.value: _compared(arms, "hourly", pieces) for drift, arms in chosen.items()}


def failure_figures(seeds: Sequence[int], pieces: Pieces, *, mtbf_h: float) -> dict[str, Any]:
    chosen = {
        name: [ArmOfSeed(name=name, seed=seed, mtbf_h=mtbf_h) for seed in seeds] for name in FAILING
    }
    pieces.run_ahead([one for each in chosen.values() for one in each])
    return {"node_mtbf_h": mtbf_h} | _compared(chosen, "ours", pieces)


def _compared(chosen: dict[str, list[ArmOfSeed]], measure: str, pieces: Pieces) -> dict[str, Any]:
    """Each arm's figures, and its dollars over those of one of them."""
    arms = {name: arm_on_seeds(each, pieces) for name, each in chosen.items()}
    return {"arms": arms, f"cost_ratio_to_{measure}": dollars_over(measure, arms)}


def world_figures(seeds: Sequence[int], pieces: Pieces) -> dict[str, Any]:
    chosen = {
        variant: [ArmOfSeed(name="ours", seed=seed, variant=variant) for seed in seeds]
        for variant in VARIANTS
    }
    pieces.run_ahead([one for each in chosen.values() for one in each])
    return {variant: arm_on_seeds(each, pieces) for variant, each in chosen.items()}
