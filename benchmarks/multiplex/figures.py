"""The benchmark's figures from the arms' results. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot
from statistics import fmean, median
from typing import Any

from benchmarks.multiplex.arms import MultiplexArm
from benchmarks.multiplex.lease_figures import lease_figures
from benchmarks.multiplex.outcomes import (
    ArmDone,
    Done,
    JobDone,
    Round,
    each_round,
    medians,
    named_median,
    of_arm,
    over,
    rounds_of,
    spread,
    training_s,
)
from benchmarks.multiplex.serving_node import ServingFigures
from benchmarks.testbed.production_request import ProductionRequest
from examples.grpo.events import StepDone
from scheduler.model import PhaseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplexFacts:
    steps: int
    cores: int
    engine_cold_s: float


def figures(
    done: Done,
    facts: MultiplexFacts,
    served: Sequence[ServingFigures] = (),
    requests: Sequence[ProductionRequest] = (),
) -> dict[str, Any]:
    """Ratios are medians over rounds, each of two arms of one round; `spread` has the extremes.

    Figures that need an arm that was not run are left out.
    """
    rounds = rounds_of(done)
    ratios = {
        arm.value: each_round(rounds, partial(over, arm=arm, ours=MultiplexArm.MULTIPLEXED))
        for arm in (MultiplexArm.SEQUENTIAL, MultiplexArm.NAIVE)
    }
    result = {
        "makespan_ratio": medians(ratios),
        "spread": spread(ratios),
        **_starts(done, facts),
        **_rewards(rounds, MultiplexArm.MULTIPLEXED),
        **named_median("over_bound", each_round(rounds, _over_bound)),
    }
    if of_arm(done, MultiplexArm.LEASED):
        lease = lease_figures(done, served, requests)
        result["lease"] = lease | _rewards(rounds, MultiplexArm.LEASED)
    return result | {
        "arms": {arm.value: _arm(of_arm(done, arm)) for arm in MultiplexArm if of_arm(done, arm)},
        "facts": {
            "steps": facts.steps,
            "cores": facts.cores,
            "rounds": len(rounds),
            "order": [run.name for run in done],
        },
    }


def bound_s(alone: ArmDone) -> float:
    """Lower bound of the makespan: with phases as long as alone, one node is never idle."""
    jobs = alone.jobs.values()
    last_s = min(training_s(job.steps[-1]) for job in jobs)
    first_s = min(job.steps[0].rollout_s for job in jobs)
    return max(alone.rollouts_s + last_s, first_s + alone.trainings_s)


def reward_gap_se(ours: StepDone, alone: StepDone) -> float:
    """Difference of two steps' mean rewards in standard errors of that difference."""
    error = hypot(ours.reward_se, alone.reward_se)
    gap = ours.reward_mean - alone.reward_mean
    return gap / error if error else 0.0


def _over_bound(of: Round) -> float | None:
    if not {MultiplexArm.SEQUENTIAL, MultiplexArm.MULTIPLEXED} <= of.keys():
        return None
    return of[MultiplexArm.MULTIPLEXED].makespan_s / bound_s(of[MultiplexArm.SEQUENTIAL])


def _rewards(rounds: Sequence[Round], arm: MultiplexArm) -> dict[str, Any]:
    """Reward gaps against the same job alone; for each job that of the round with the largest."""
    gaps: dict[str, float] = {}
    for of in rounds:
        if not {arm, MultiplexArm.SEQUENTIAL} <= of.keys():
            continue
        for name, job in of[arm].jobs.items():
            gap = reward_gap_se(job.steps[-1], of[MultiplexArm.SEQUENTIAL].jobs[name].steps[-1])
            gaps[name] = max(gap, gaps.get(name, 0.0), key=abs)
    if not gaps:
        return {}
    return {"reward_gap_se": max(gaps.values(), key=abs), "reward_gaps_se": gaps}


def _starts(done: Done, facts: MultiplexFacts) -> dict[str, Any]:
    """Cold: of trainers that were loaded one at a time, where there are such."""
    loaded = of_arm(done, MultiplexArm.SEQUENTIAL) or of_arm(done, MultiplexArm.MULTIPLEXED)
    ours = [job for each in of_arm(done, MultiplexArm.MULTIPLEXED) for job in each.jobs.values()]
    if not ours:
        return {}
    loads_s = [job.load_s for each in loaded for job in each.jobs.values()]
    cold_s = {PhaseKind.ROLLOUT: facts.engine_cold_s, PhaseKind.TRAINING: median(loads_s)}
    warm_s = {kind: _warm_s(ours, kind) for kind in cold_s}
    return {
        "warm_start_speedup": sum(cold_s.values()) / max(sum(warm_s.values()), 1e-9),
        "start_s": {kind.value: {"cold": cold_s[kind], "warm": warm_s[kind]} for kind in cold_s},
    }


def _warm_s(jobs: Iterable[JobDone], kind: PhaseKind) -> float:
    """Seconds from a granted permit to the phase's first line, over starts that were not the
    first."""
    seen = [
        start["resume_s"]
        for job in jobs
        for start in job.starts
        if start["kind"] == kind.value and not start["cold"]
    ]
    return median(seen) if seen else float("nan")


def _arm(rounds: Sequence[ArmDone]) -> dict[str, Any]:
    """Median makespan, and the mean over rounds of all other figures."""
    return {
        "makespan_s": median(each.makespan_s for each in rounds),
        "makespans_s": [each.makespan_s for each in rounds],
        "jobs": {name: _job([each.jobs[name] for each in rounds]) for name in rounds[0].jobs},
    }


def _job(rounds: Sequence[JobDone]) -> dict[str, Any]:
    steps = [step for job in rounds for step in job.steps]
    last = [job.steps[-1] for job in rounds]
    return {
        "steps": len(rounds[0].steps),
        "rollout_s": fmean(step.rollout_s for step in steps),
        "train_s": fmean(step.train_s for step in steps),
        "step_s": fmean(step.step_s for step in steps),
        "waited_s": fmean(sum(start["waited_s"] for start in job.starts) for job in rounds),
        "reward_first": fmean(job.steps[0].reward_mean for job in rounds),
        "reward_last": fmean(step.reward_mean for step in last),
        "reward_se": fmean(step.reward_se for step in last),
        "lost": sum(step.trajectories.lost for step in steps),
        "migrated": sum(step.trajectories.migrated for step in steps),
    }
