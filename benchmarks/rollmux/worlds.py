"""Whether promises and savings outlive the papers' assumptions: ours in every variant."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.rollmux.pieces import ArmOfSeed, Pieces, job_count, kept
from scheduler.sim.rollmux.baselines import solo_d
from scheduler.sim.rollmux.variants import VARIANTS


def world_figures(seeds: Sequence[int], pieces: Pieces) -> dict[str, Any]:
    wanted = {
        variant: [ArmOfSeed(name="ours", seed=seed, variant=variant) for seed in seeds]
        for variant in VARIANTS
    }
    pieces.run_ahead([one for each in wanted.values() for one in each])
    return {variant: _of_variant(each, pieces) for variant, each in wanted.items()}


def _of_variant(wanted: Sequence[ArmOfSeed], pieces: Pieces) -> dict[str, Any]:
    found = [pieces.arm(one).arm for one in wanted]
    ratios = [
        solo_d(one.drawn(), one.world).dollars / arm.dollars
        for one, arm in zip(wanted, found, strict=True)
    ]
    return {
        "seeds": len(wanted),
        "solo_d_over_ours": statistics.mean(ratios),
        "solo_d_over_ours_min": min(ratios),
        "jobs": job_count(found),
        "kept": sum(one.kept for one in found),
        "slo_attainment": kept(found),
        "worst_window_over_slo": max(one.worst_window for one in found),
        "moves_per_job": sum(one.moves for one in found) / job_count(found),
    }
