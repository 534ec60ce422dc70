"""The benchmark's figures: dollars and kept promises, arm by arm, over the seeds."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rollmux.pieces import ArmOfSeed, Pieces, job_count, kept
from harvester.contracts.errors import ConfigError
from scheduler.sim.rollmux.arms import run_arm, summary
from scheduler.sim.rollmux.baselines import gavel, solo_d, verl
from scheduler.sim.rollmux.mixes import Mix
from scheduler.sim.rollmux.report import write_events
from scheduler.sim.rollmux.workload import Drift, SimulatedJob
from scheduler.sim.rollmux.world import PAPER_WORLD

CALIBRATION = 1.32
CALIBRATION_MARGIN = 0.03
PACKED = ("random", "greedy", "rollmux_paper")


def quality_figures(
    seeds: Sequence[int],
    pieces: Pieces,
    *,
    mix: Mix = Mix.W1,
    drift: Drift = Drift.NONE,
    events: Path | None = None,
) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {}
    paper: dict[str, list[float]] = {"solo_d": [], "verl": []}
    calibration: list[float] = []
    arms: dict[str, list[Any]] = {name: [] for name in ("ours", *PACKED)}
    wall_s, offered = 0.0, 0

    def arm(name: str, seed: int) -> ArmOfSeed:
        return ArmOfSeed(name=name, seed=seed, mix=mix, drift=drift)

    pieces.run_ahead([arm(name, seed) for seed in seeds for name in arms])
    for seed in seeds:
        jobs = mix.drawn(seed, drift=drift)
        offered += len(jobs)
        alone = {
            "solo_d": solo_d(jobs, PAPER_WORLD).dollars,
            "verl": verl(jobs, PAPER_WORLD).dollars,
            "gavel": gavel(jobs, PAPER_WORLD).dollars,
        }
        calibration.append(alone["solo_d"] / alone["verl"])
        for name, results in arms.items():
            piece = pieces.arm(arm(name, seed))
            results.append(piece.arm)
            wall_s += piece.wall_s if name == "ours" else 0.0
        ours = arms["ours"][-1].dollars
        dollars = alone | {name: arms[name][-1].dollars for name in PACKED}
        for name, spent in dollars.items():
            ratios.setdefault(name, []).append(spent / ours)
        for name, values in paper.items():
            values.append(alone[name] / arms["rollmux_paper"][-1].dollars)
    if mix is not Mix.W3:
        _check_calibration(statistics.mean(calibration))
    if events is not None:
        jobs = mix.drawn(seeds[0], drift=drift)
        write_events(run_arm("ours", jobs, seed=seeds[0], record=True).ledger, events)
    return {
        "calibration_solo_d_over_verl": statistics.mean(calibration),
        "cost_ratio": {name: statistics.mean(values) for name, values in ratios.items()},
        "cost_ratio_min": {name: min(values) for name, values in ratios.items()},
        "paper_arm": {
            **{name: statistics.mean(values) for name, values in paper.items()},
            "slo_attainment": kept(arms["rollmux_paper"]),
            "slo_attainment_profiled": kept(arms["rollmux_paper"], "kept_profiled"),
        },
        "slo_attainment": kept(arms["ours"]),
        "slo_attainment_others": {name: kept(arms[name]) for name in ("random", "greedy")},
        "worst_window_over_slo": max(one.worst_window for one in arms["ours"]),
        "refused": offered - job_count(arms["ours"]),
        "moves_per_job": sum(one.moves for one in arms["ours"]) / job_count(arms["ours"]),
        "sim_events_per_s": sum(one.events for one in arms["ours"]) / wall_s,
    }


def single_workload(jobs: list[SimulatedJob], *, seed: int, events: Path | None) -> dict[str, Any]:
    """All arms on one workload that was given."""
    runs = {
        name: run_arm(name, jobs, seed=seed, record=name == "ours") for name in ("ours", *PACKED)
    }
    results = {name: summary(jobs, run) for name, run in runs.items()}
    if events is not None:
        write_events(runs["ours"].ledger, events)
    ours = results["ours"].dollars
    alone = {
        "solo_d": solo_d(jobs, PAPER_WORLD),
        "verl": verl(jobs, PAPER_WORLD),
        "gavel": gavel(jobs, PAPER_WORLD),
    }
    return {
        "simulated": True,
        "jobs": len(jobs),
        "dollars": {name: one.dollars for name, one in (alone | results).items()},
        "cost_ratio": {
            name: one.dollars / ours for name, one in (alone | results).items() if name != "ours"
        },
        "slo_attainment": results["ours"].kept / len(jobs),
        "slo_attainment_others": {name: results[name].kept / len(jobs) for name in PACKED},
        "refused": len(jobs) - results["ours"].jobs,
    }


def _check_calibration(found: float) -> None:
    if abs(found - CALIBRATION) > CALIBRATION_MARGIN:
        raise ConfigError(
            f"Solo-D costs {found:.3f} times veRL, not {CALIBRATION}: the prices are not W1's"
        )
