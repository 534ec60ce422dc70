"""Robustness of SLOs and savings against the papers' assumptions: ours in every variant."""

from collections.abc import Sequence
from typing import Any

from benchmarks.rollmux.arm_figures import arm_on_seeds
from benchmarks.rollmux.pieces import ArmOfSeed, Pieces
from scheduler.sim.rollmux.variants import VARIANTS


def world_figures(seeds: Sequence[int], pieces: Pieces) -> dict[str, Any]:
    wanted = {
        variant: [ArmOfSeed(name="ours", seed=seed, variant=variant) for seed in seeds]
        for variant in VARIANTS
    }
    pieces.run_ahead([one for each in wanted.values() for one in each])
    return {variant: arm_on_seeds(each, pieces) for variant, each in wanted.items()}
