"""A mix of jobs under every arm: dollars and kept promises, arm by arm, over the seeds."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rollmux.arm_figures import (
    arm_figures,
    arm_on_seeds,
    dollars_over,
    unshared_figures,
)
from benchmarks.rollmux.mixes import Mix
from benchmarks.rollmux.pieces import ArmOfSeed, Pieces, run_piece
from harvester.contracts.errors import ConfigError
from scheduler.sim.rollmux.arms import ARMS, run_arm
from scheduler.sim.rollmux.baselines import UNSHARED
from scheduler.sim.rollmux.ledger import write_events
from scheduler.sim.rollmux.workload import PAPER_WORLD, Drift, SimulatedJob

CALIBRATION = 1.32
CALIBRATION_MARGIN = 0.03
SHARED = ("ours", "random", "greedy", "rollmux_paper")


def mix_figures(
    seeds: Sequence[int],
    pieces: Pieces,
    *,
    mix: Mix = Mix.W1,
    drift: Drift = Drift.NONE,
    events: Path | None = None,
) -> dict[str, Any]:
    chosen = {
        name: [ArmOfSeed(name=name, seed=seed, mix=mix, drift=drift) for seed in seeds]
        for name in SHARED
    }
    pieces.run_ahead([chosen[name][at] for at in range(len(seeds)) for name in SHARED])
    arms = {name: arm_on_seeds(each, pieces) for name, each in chosen.items()}
    drawn = [one.drawn() for one in chosen["ours"]]
    alone = {name: [arm(jobs, PAPER_WORLD) for jobs in drawn] for name, arm in UNSHARED.items()}
    solo_d_dollars = [one.dollars for one in alone["solo_d"]]
    offered = sum(map(len, drawn))
    arms |= {
        name: unshared_figures(found, solo_d_dollars, jobs=offered) for name, found in alone.items()
    }
    calibration = statistics.mean(arms["verl"]["solo_d_over_it"]["by_seed"])
    if mix is not Mix.W3:
        _check_calibration(calibration)
    if events is not None:
        run = run_arm(ARMS["ours"], drawn[0], seed=seeds[0], record=True)
        write_events(run.ledger, events)
    return {
        "calibration_solo_d_over_verl": calibration,
        "cost_ratio": dollars_over("ours", arms),
        "cost_ratio_to_paper_arm": dollars_over("rollmux_paper", arms),
        "refused": offered - arms["ours"]["jobs"],
        "arms": arms,
    }


def single_workload(jobs: list[SimulatedJob], *, seed: int, events: Path | None) -> dict[str, Any]:
    """All arms on one workload that was given."""
    alone = {name: arm(jobs, PAPER_WORLD) for name, arm in UNSHARED.items()}
    solo_d_dollars = [alone["solo_d"].dollars]
    arms = {
        name: arm_figures([run_piece(name, jobs, seed=seed)], solo_d_dollars) for name in SHARED
    }
    arms |= {
        name: unshared_figures([found], solo_d_dollars, jobs=len(jobs))
        for name, found in alone.items()
    }
    if events is not None:
        write_events(run_arm(ARMS["ours"], jobs, seed=seed, record=True).ledger, events)
    return {
        "simulated": True,
        "cost_ratio": dollars_over("ours", arms),
        "refused": len(jobs) - arms["ours"]["jobs"],
        "arms": arms,
    }


def _check_calibration(found: float) -> None:
    if abs(found - CALIBRATION) > CALIBRATION_MARGIN:
        raise ConfigError(
            f"Solo-D costs {found:.3f} times veRL, not {CALIBRATION}: the prices are not W1's"
        )
