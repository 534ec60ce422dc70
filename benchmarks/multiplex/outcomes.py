"""The arms' results, round by round, and comparisons within one round. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.multiplex.arms import MultiplexArm, Run
from examples.grpo.events import StepDone


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    steps: tuple[StepDone, ...]
    load_s: float
    """Time from the start of its process to a trainer that could begin, in s."""
    starts: tuple[dict[str, Any], ...] = ()
    """Starts of its phases, if it had permits."""
    tails: Mapping[str, float] = field(default_factory=dict)
    """Outcomes of its rollouts' tails, if it leased."""

    @property
    def rollouts_s(self) -> float:
        return sum(step.rollout_s for step in self.steps)

    @property
    def trainings_s(self) -> float:
        return sum(map(training_s, self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDone:
    makespan_s: float
    """Time from the first job's first step to the last job's last, in s; in sequence, the sum."""
    jobs: Mapping[str, JobDone] = field(default_factory=dict)

    @property
    def rollouts_s(self) -> float:
        return sum(job.rollouts_s for job in self.jobs.values())

    @property
    def trainings_s(self) -> float:
        return sum(job.trainings_s for job in self.jobs.values())


Done = Mapping[Run, ArmDone]
Round = Mapping[MultiplexArm, ArmDone]


def training_s(step: StepDone) -> float:
    """Update, publish and switch; of a job that waits for no permit."""
    return step.step_s - step.rollout_s


def rounds_of(done: Done) -> tuple[Round, ...]:
    rounds: dict[int, dict[MultiplexArm, ArmDone]] = {}
    for run, each in done.items():
        if run.arm is not None:
            rounds.setdefault(run.round, {})[run.arm] = each
    return tuple(rounds.values())


def of_arm(done: Done, arm: MultiplexArm) -> tuple[ArmDone, ...]:
    return tuple(each for run, each in done.items() if run.arm is arm)


def over(of: Round, *, arm: MultiplexArm, ours: MultiplexArm) -> float | None:
    """One arm's makespan over another's of the same round; None where either was not run."""
    return of[arm].makespan_s / of[ours].makespan_s if {arm, ours} <= of.keys() else None


def each_round(
    rounds: Sequence[Round], figure: Callable[[Round], float | None]
) -> tuple[float, ...]:
    found = (figure(of) for of in rounds)
    return tuple(value for value in found if value is not None)


def named_median(name: str, values: Sequence[float]) -> dict[str, float]:
    """Nothing where there are no values."""
    return {name: median(values)} if values else {}


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(each) for name, each in values.items() if each}


def spread(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Least and most."""
    return {name: [min(each), max(each)] for name, each in values.items() if each}
