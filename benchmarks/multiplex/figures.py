"""From what the arms did to the benchmark's figures. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from statistics import median
from typing import Any

from benchmarks.multiplex.arms import Arm
from scheduler.demo.job.events import StepDone
from scheduler.policy.model import PhaseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    steps: tuple[StepDone, ...]
    load_s: float
    """From the order to start its process to a trainer that could begin."""
    starts: tuple[dict[str, Any], ...] = ()
    """How its phases began, where it had permits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDone:
    makespan_s: float
    """From the first job's first step to the last job's last; in sequence, of both together."""
    jobs: Mapping[str, JobDone] = field(default_factory=dict)


def figures(arms: Mapping[Arm, ArmDone], *, engine_cold_s: float) -> dict[str, Any]:
    ours = arms[Arm.MULTIPLEXED]
    cold_s = {
        PhaseKind.ROLLOUT: engine_cold_s,
        PhaseKind.TRAINING: median(job.load_s for job in arms[Arm.SEQUENTIAL].jobs.values()),
    }
    gaps_se = {
        name: reward_gap_se(job.steps[-1], arms[Arm.SEQUENTIAL].jobs[name].steps[-1])
        for name, job in ours.jobs.items()
    }
    warm_s = {kind: _warm_s(ours.jobs.values(), kind) for kind in PhaseKind}
    return {
        "makespan_ratio": {
            arm.value: arms[arm].makespan_s / ours.makespan_s
            for arm in Arm
            if arm is not Arm.MULTIPLEXED
        },
        "warm_start_speedup": sum(cold_s.values()) / max(sum(warm_s.values()), 1e-9),
        "reward_gap_se": max(gaps_se.values(), key=abs),
        "reward_gaps_se": gaps_se,
        "over_bound": ours.makespan_s / bound_s(arms[Arm.SEQUENTIAL]),
        "start_s": {kind.value: {"cold": cold_s[kind], "warm": warm_s[kind]} for kind in PhaseKind},
        "arms": {arm.value: _arm(done) for arm, done in arms.items()},
    }


def bound_s(alone: ArmDone) -> float:
    """No order of these phases, each as long as alone, ends sooner: one node is never idle."""
    jobs = alone.jobs.values()
    rollouts_s = sum(step.rollout_s for job in jobs for step in job.steps)
    trainings_s = sum(step.step_s - step.rollout_s for job in jobs for step in job.steps)
    last_s = min(job.steps[-1].step_s - job.steps[-1].rollout_s for job in jobs)
    first_s = min(job.steps[0].rollout_s for job in jobs)
    return max(rollouts_s + last_s, first_s + trainings_s)


def reward_gap_se(ours: StepDone, alone: StepDone) -> float:
    """Difference of two steps' mean rewards in standard errors of that difference."""
    error = hypot(ours.reward_se, alone.reward_se)
    gap = ours.reward_mean - alone.reward_mean
    return gap / error if error else 0.0


def _warm_s(jobs: Any, kind: PhaseKind) -> float:
    """From a permit in hand to the phase's first line, of starts that were not the first."""
    seen = [
        start["resume_s"]
        for job in jobs
        for start in job.starts
        if start["kind"] == kind.value and not start["cold"]
    ]
    return median(seen) if seen else float("nan")


def _arm(done: ArmDone) -> dict[str, Any]:
    return {
        "makespan_s": done.makespan_s,
        "jobs": {
            name: {
                "steps": len(job.steps),
                "rollout_s": _mean([step.rollout_s for step in job.steps]),
                "train_s": _mean([step.train_s for step in job.steps]),
                "step_s": _mean([step.step_s for step in job.steps]),
                "waited_s": sum(start["waited_s"] for start in job.starts),
                "reward_first": job.steps[0].reward_mean,
                "reward_last": job.steps[-1].reward_mean,
                "reward_se": job.steps[-1].reward_se,
                "lost": sum(step.trajectories.lost for step in job.steps),
            }
            for name, job in done.jobs.items()
        },
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
