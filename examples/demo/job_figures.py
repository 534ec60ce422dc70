"""The RL job's figures in each arm, and how the two jobs compare at equal step numbers.

Speeds and rewards are of measured steps; forbidden events (a lost trajectory, a stale token) and
publishes are counted over warm-up steps (block below 0) too. Pure.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.testbed.serving_figures import ratio
from examples.demo.records import DemoArm, TrainingStep
from examples.demo.schema import OnPolicy, TrajectoryCounts, Weights

REWARD_STEPS = 3
"""Steps at each end whose rewards are averaged."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    se: float

    def standard_errors_from(self, other: "Estimate") -> float | None:
        """`self - other` in standard errors of the difference; None where neither has any."""
        return ratio(self.mean - other.mean, math.hypot(self.se, other.se))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    steps: tuple[TrainingStep, ...]
    """Measured, in order of their numbers."""

    @property
    def step_s_mean(self) -> float | None:
        return ratio(sum(s.step_s for s in self.steps), len(self.steps))

    @property
    def rollout_s(self) -> float:
        return sum(s.rollout_s for s in self.steps)

    @property
    def rollout_tokens(self) -> int:
        return sum(s.rollout_tokens for s in self.steps)

    @property
    def rollout_share(self) -> float | None:
        return ratio(self.rollout_s, sum(s.step_s for s in self.steps))

    @property
    def reward_first(self) -> Estimate | None:
        return _reward(self.steps[: self._reward_steps])

    @property
    def reward_last(self) -> Estimate | None:
        return _reward(self.steps[len(self.steps) - self._reward_steps :])

    @property
    def reward_se(self) -> float | None:
        first, last = self.reward_first, self.reward_last
        return math.hypot(first.se, last.se) if first and last else None

    @property
    def reward_gain(self) -> float | None:
        """Gain of the reward from the first to the last steps, in standard errors."""
        first, last = self.reward_first, self.reward_last
        return last.standard_errors_from(first) if first and last else None

    @property
    def _reward_steps(self) -> int:
        """Number of steps at each end, so that the first are never among the last."""
        return min(REWARD_STEPS, len(self.steps) // 2)

    def only(self, numbers: Collection[int]) -> "JobRun":
        return JobRun(steps=tuple(s for s in self.steps if s.step in numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both jobs over the step numbers that both measured."""

    fixed: JobRun
    harvest: JobRun

    @property
    def step_speedup(self) -> float | None:
        return ratio(self.fixed.step_s_mean, self.harvest.step_s_mean)

    @property
    def rollout_tokens_ratio(self) -> float | None:
        return ratio(self.harvest.rollout_tokens, self.fixed.rollout_tokens)

    @property
    def step_speedup_per_token(self) -> float | None:
        return _product(self.step_speedup, self.rollout_tokens_ratio)

    @property
    def rollout_speedup(self) -> float | None:
        return _product(
            ratio(self.fixed.rollout_s, self.harvest.rollout_s), self.rollout_tokens_ratio
        )

    @property
    def reward_distance(self) -> float | None:
        """Distance of the last steps' mean rewards, harvest from fixed, in standard errors."""
        fixed, harvest = self.fixed.reward_last, self.harvest.reward_last
        distance = harvest.standard_errors_from(fixed) if fixed and harvest else None
        return None if distance is None else abs(distance)


def job_of(steps: Sequence[TrainingStep], arm: DemoArm) -> JobRun:
    measured = (s for s in steps if s.arm == arm and s.block >= 0)
    return JobRun(steps=tuple(sorted(measured, key=lambda s: s.step)))


def compared(fixed: JobRun, harvest: JobRun) -> Comparison:
    both = {s.step for s in fixed.steps} & {s.step for s in harvest.steps}
    return Comparison(fixed=fixed.only(both), harvest=harvest.only(both))


def ideal_speedup(*, rollout_share: float | None, busy_share: float | None) -> float | None:
    """Step speedup if its rollouts also get all of production's idle time."""
    if rollout_share is None or busy_share is None:
        return None
    idle = 1.0 - busy_share
    return 1.0 / (1.0 - rollout_share + rollout_share / (1.0 + idle))


def on_policy_of(steps: Sequence[TrainingStep], *, guests: Collection[str]) -> OnPolicy:
    """Gaps of the harvesting job, where both kinds of engine sampled from the same policy.

    The gap falls as the policy learns, to a fifth over a run, and the harvested share changes from
    step to step: so the dedicated engines' gap of a step weighs as much as its harvested tokens.
    """
    harvested, expected, compared_tokens = 0.0, 0.0, 0
    for step in steps:
        if step.arm is not DemoArm.HARVEST:
            continue
        guest_sum, guest_tokens = _gap(step, guests, harvested=True)
        dedicated_sum, dedicated_tokens = _gap(step, guests, harvested=False)
        if guest_tokens and dedicated_tokens:
            harvested += guest_sum
            expected += guest_tokens * dedicated_sum / dedicated_tokens
            compared_tokens += guest_tokens
    return OnPolicy(
        logprob_gap_dedicated=ratio(expected, compared_tokens),
        logprob_gap_harvested=ratio(harvested, compared_tokens),
        stale_tokens=sum(s.stale_tokens for s in steps),
    )


def weights_of(steps: Sequence[TrainingStep], *, hash_mismatches: int | None) -> Weights:
    return Weights(
        versions=len({(s.arm, s.version) for s in steps}),
        bytes_dense=sum(s.bytes_dense for s in steps),
        bytes_sent=sum(s.bytes_sent for s in steps),
        hash_mismatches=hash_mismatches,
    )


def trajectories_of(steps: Sequence[TrainingStep], *, migrated: int | None) -> TrajectoryCounts:
    return TrajectoryCounts(
        started=sum(s.started for s in steps),
        completed=sum(s.completed for s in steps),
        lost=sum(s.lost for s in steps),
        duplicated=sum(s.duplicated for s in steps),
        migrated=migrated,
    )


def _gap(step: TrainingStep, guests: Collection[str], *, harvested: bool) -> tuple[float, int]:
    """Sum of absolute differences, and of how many tokens."""
    gaps = [gap for gap in step.gaps if (gap.engine in guests) == harvested]
    return sum(gap.sum_abs for gap in gaps), sum(gap.tokens for gap in gaps)


def _reward(steps: Sequence[TrainingStep]) -> Estimate | None:
    if not steps:
        return None
    count = len(steps)
    return Estimate(
        sum(s.reward_mean for s in steps) / count,
        math.sqrt(sum(s.reward_se**2 for s in steps)) / count,
    )


def _product(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left * right
