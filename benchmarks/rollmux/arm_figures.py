"""Figures of every arm: dollars beside Solo-D's, both readings of an SLO, moves, CPU."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rollmux.pieces import ArmOfSeed, ArmRun, Pieces
from benchmarks.rollmux.variants import VARIANTS
from scheduler.sim.rollmux.arms import SLO_COUNTS_QUEUEING, WINDOW_GOAL
from scheduler.sim.rollmux.baselines import UNSHARED, Unshared


def arm_on_seeds(chosen: Sequence[ArmOfSeed], pieces: Pieces) -> dict[str, Any]:
    """Figures of one arm; `chosen` differ in their seeds only."""
    found = [pieces.arm(one) for one in chosen]
    alone = [UNSHARED["solo_d"](one.drawn(), one.world).dollars for one in chosen]
    return {"seeds": [one.seed for one in chosen]} | arm_figures(found, alone)


def arm_figures(found: Sequence[ArmRun], solo_d_dollars: Sequence[float]) -> dict[str, Any]:
    arms = [one.arm for one in found]
    jobs = sum(one.jobs for one in arms)
    ratios = [alone / one.dollars for alone, one in zip(solo_d_dollars, arms, strict=True)]
    kept, windows_kept = sum(one.kept for one in arms), sum(one.windows_kept for one in arms)
    return {
        "dollars": [one.dollars for one in arms],
        "solo_d_over_it": spread(ratios),
        "jobs": jobs,
        "slo_counts_queueing": SLO_COUNTS_QUEUEING,
        "slo_of_life": {
            "kept": kept,
            "ratio": kept / jobs,
            "kept_profiled": sum(one.kept_profiled for one in arms),
            "kept_falsely": sum(one.kept_falsely for one in arms),
        },
        "slo_of_worst_20_iterations": {
            "kept": windows_kept,
            "ratio": windows_kept / jobs,
            "largest_over_slo": max(one.worst_window for one in arms),
            "goal_over_slo": WINDOW_GOAL,
            "jobs_above_goal": sum(one.windows_above_goal for one in arms),
        },
        "moves_per_job": sum(one.moves for one in arms) / jobs,
        "failures": sum(one.failures for one in arms),
        "restarts_per_job": sum(one.restarts for one in arms) / jobs,
        "events": sum(one.events for one in arms),
        "cpu_s": spread([one.cpu_s for one in found]),
    }


def unshared_figures(
    found: Sequence[Unshared], solo_d_dollars: Sequence[float], *, jobs: int
) -> dict[str, Any]:
    """Figures of an arm without shared nodes; it has no events but its phases."""
    ratios = [alone / one.dollars for alone, one in zip(solo_d_dollars, found, strict=True)]
    kept = sum(one.attained for one in found)
    return {
        "dollars": [one.dollars for one in found],
        "solo_d_over_it": spread(ratios),
        "jobs": jobs,
        "slo_counts_queueing": SLO_COUNTS_QUEUEING,
        "slo_of_life": {"kept": kept, "ratio": kept / jobs},
    }


def chosen_arms(
    chosen: Mapping[str, Sequence[ArmOfSeed]], pieces: Pieces
) -> dict[str, dict[str, Any]]:
    """Figures of the arms that were asked for, shared or not, each on its seeds."""
    pieces.run_ahead([one for name, each in chosen.items() if name not in UNSHARED for one in each])
    figures = {}
    for name, each in chosen.items():
        if name not in UNSHARED:
            figures[name] = arm_on_seeds(each, pieces)
            continue
        drawn = [one.drawn() for one in each]
        worlds = [VARIANTS[one.variant].world for one in each]
        found, alone = (
            [UNSHARED[arm](jobs, world) for jobs, world in zip(drawn, worlds, strict=True)]
            for arm in (name, "solo_d")
        )
        figures[name] = {"seeds": [one.seed for one in each]} | unshared_figures(
            found, [one.dollars for one in alone], jobs=sum(map(len, drawn))
        )
    return figures


def dollars_over(measure: str, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Dollars of every other arm over one arm's."""
    return {
        name: spread(
            [
                other / one
                for other, one in zip(found["dollars"], arms[measure]["dollars"], strict=True)
            ]
        )
        for name, found in arms.items()
        if name != measure
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": statistics.mean(values),
        "min": min(values),
        "max": max(values),
        "by_seed": list(values),
    }
