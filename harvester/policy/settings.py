"""The settings of the node policies: what an operator may choose, with the reason for each default.

They are plain frozen dataclasses, so that a configuration file, a journal's first line and a test
all make the same object. What means nothing is refused here; what harms production is refused by
the ranges of `harvester.policy.bounds`. Nothing here reads a file or an environment variable.
"""

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final, Literal

from harvester.contracts.page.records import Law

AUTO: Final = "auto"


class Mode(StrEnum):
    OFF = "off"
    OBSERVE = "observe"
    """Decide and journal as if harvesting, but grant and lease nothing."""
    HARVEST = "harvest"


def more_careful(one: Mode, other: Mode) -> Mode:
    order = (Mode.OFF, Mode.OBSERVE, Mode.HARVEST)
    return min(one, other, key=order.index)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_numbers(settings: "_Settings") -> None:
    """No number may be infinite, negative, none at all, or too long for the journal."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(value, int | float):
            holds = 0 <= value < 2**63 and math.isfinite(value)
            _check(holds, f"{each.name} must be a finite number, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSettings:
    """How fast a share of a resource is taken away and given back."""

    shrink_ratio: float = 0.5
    """A breach leaves this share of the present level."""
    shrink_interval_s: float = 1.0
    """At most one shrink per interval: the guest obeys within a step, samples arrive later."""
    floor_ratio: float = 0.125
    grow_ratio: float = 0.1
    """Share of the maximum that comes back per grow interval."""
    grow_interval_s: float = 1.0
    quiet_s: float = 5.0
    """Time without a breach before anything grows."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check(0 < self.shrink_ratio < 1, "shrink_ratio must lie between 0 and 1")
        _check(0 < self.floor_ratio <= 1, "floor_ratio must be above 0 and at most 1")
        _check(0 < self.grow_ratio <= 1, "grow_ratio must be above 0 and at most 1")
        _check(self.grow_interval_s > 0, "grow_interval_s must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissSettings:
    """When SLO misses beside a stepping guest are more than production's own noise."""

    window_s: float = 10.0
    limit_ratio: float = 0.05
    """Share of recent samples that may miss; above it is a breach."""
    minimum_misses: float = 3.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check(self.window_s > 0, "window_s must be above 0")
        _check(0 < self.limit_ratio < 1, "limit_ratio must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    """The share of production's error budget that harvesting may spend."""

    enforced: bool = True
    """False only counts and exports."""
    slo_target_ratio: float = 0.99
    """Share of requests that production promises inside the SLO."""
    share_ratio: float = 0.1
    minimum_requests: int = 100
    """Fewer requests than this in a burn window say nothing: one slow request is no trend."""
    minimum_misses: int = 10
    hold_s: float = 600.0
    """A stop lasts at least this long."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check(0 < self.slo_target_ratio < 1, "slo_target_ratio must lie between 0 and 1")
        _check(0 <= self.share_ratio <= 1, "share_ratio must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """Randomised slices of time without a grant, against which harvesting's impact is measured."""

    share_ratio: float = 0.05
    """0 measures nothing."""
    slice_s: float = 2.0
    seed: int = 0
    window_slices: int = 20_000
    """Slices remembered; about 11 h of 2 s slices."""
    minimum_slices: int = 20
    """Slices of each kind with samples before there is a verdict."""
    limit_ratio: float = 0.1
    """Harvesting stops when the impact's lower bound exceeds this share of the latency alone."""
    confidence_ratio: float = 0.95
    hold_s: float = 3600.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check(0 <= self.share_ratio < 1, "share_ratio must be at least 0 and below 1")
        _check(self.slice_s > 0, "slice_s must be above 0")
        _check(0.5 <= self.confidence_ratio < 1, "confidence_ratio must be 0.5 to below 1")
        _check(
            2 <= self.minimum_slices <= self.window_slices,
            "minimum_slices must be 2 to window_slices",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Production's step times to start from, as `rosemux profile` prints them. All 0 is none."""

    shapes: tuple[str, ...] = ()
    """Of the engines that they were learned on; another one learns from nothing. Empty is any."""
    prefill_base_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_base_s: float = 0.0
    decode_s_per_request: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check(all(0 <= value < 1e3 for value in self._times), "profile: times must be 0 to 1000 s")

    @property
    def given(self) -> bool:
        return any(self._times)

    @property
    def _times(self) -> tuple[float, ...]:
        return (
            self.prefill_base_s,
            self.prefill_s_per_token,
            self.decode_base_s,
            self.decode_s_per_request,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSettings:
    """The node's control law for one slot."""

    mode: Mode = Mode.HARVEST
    """The more careful of this and the node's mode holds."""
    beat_s: float = 0.1
    grant_ttl_s: float = 0.5
    """Five beats: one late beat closes nothing, a dead agent closes within half a second."""
    abort_grace_s: float = 10.0
    ttft_slo_s: float = 0.25
    itl_slo_s: float = 0.05
    epsilon: float = 0.05
    """Production's events may take (1 + epsilon) of their time alone; 1e6 leaves only the SLO."""
    law: Law = Law.SLACK
    """`rose` and `saturation` are other projects' rules, to be measured beside ours."""
    ungated: bool = False
    """Grant without any law, to measure what a law is worth. Never in production."""
    step_tokens_max: int = 2048
    kv_budget_tokens: int = 0
    """0 leaves the guest engine's own size."""
    phantom_prompt_tokens: int = 0
    """Prompt of the request that might arrive now; 0 takes the largest p99 of the pulses."""
    blocking_ratio: float | Literal["auto"] = AUTO
    """Share of a running guest step that can delay production. By default what the guest's
    isolation promises while it is seen to hold, else 1; a number is what an operator measured."""
    preemption_s: float = 5e-4
    """What production pays for a running guest step beside that share, however short the step is.
    Measured on CPUs (well under a millisecond); on a GPU by `benchmarks.gpu_slot`."""
    model_samples_min: int = 64
    """Steps behind production's model before it is believed."""
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    """Stands in for that model until then, so that a slot need not learn first."""
    hung_steps: float = 8.0
    """Requests in flight and no step for so many predicted steps is a hung engine ..."""
    hung_min_s: float = 2.0
    """... but never less than this, because a predicted step may be a millisecond."""
    cooldown_s: float = 2.0
    """Quiet time after danger before the slot opens again."""
    production_lost_s: float = 5.0
    guest_away_s: float = 2.0
    """A guest in the idle class may be starved of its page's beat; so long it counts as there."""
    guest_lost_s: float = 5.0
    """Away for this long besides, its lease ends."""
    quarantine_losses: int = 3
    """Guests lost under a lease within the window before the slot is quarantined."""
    quarantine_window_s: float = 600.0
    kv_high_ratio: float = 0.9
    """Production's KV use at which the guest's KV budget is halved."""
    memory_high_ratio: float = 0.9
    """Use of the shared control group's limit at which the guest's KV budget is halved."""
    kv_deadline_s: float = 2.0
    """A guest that holds more than its budget for this long is ended. Longer than any step of it,
    and than a change of its weights."""
    kv_retained_ratio: float = 0.25
    """Most of the guest's KV that it keeps from other turns for trajectories that are away at their
    tools; 0 keeps none. More saves prefills and leaves less for turns that run."""
    sleep_after_s: float = 60.0
    """Without a lease for this long the guest gives all its KV back; 0 never."""
    step_level: LevelSettings = field(default_factory=LevelSettings)
    kv_level: LevelSettings = field(default_factory=lambda: LevelSettings(quiet_s=30.0))
    misses: MissSettings = field(default_factory=MissSettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    proof: ProofSettings = field(default_factory=ProofSettings)

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check(self.beat_s > 0, "beat_s must be above 0")
        _check(
            self.grant_ttl_s >= 2 * self.beat_s,
            "grant_ttl_s must be at least two beats (beat_s), else one late beat closes the gate",
        )
        _check(
            self.ttft_slo_s > 0 and self.itl_slo_s > 0, "ttft_slo_s and itl_slo_s must be above 0 s"
        )
        _check(0 <= self.epsilon <= 1e6, "epsilon must lie between 0 and 1e6")
        _check(self.step_tokens_max > 0, "step_tokens_max must be above 0")
        _check(self.kv_budget_tokens >= 0, "kv_budget_tokens may not be negative")
        _check(
            self.blocking_ratio == AUTO or 0 < self.blocking_ratio <= 1,
            "blocking_ratio must be auto, or above 0 and at most 1",
        )
        _check(0 < self.memory_high_ratio <= 1, "memory_high_ratio must lie between 0 and 1")
        _check(self.kv_deadline_s > 0, "kv_deadline_s must be above 0")
        _check(0 <= self.kv_retained_ratio <= 1, "kv_retained_ratio must lie between 0 and 1")
        _check(self.sleep_after_s >= 0, "sleep_after_s may not be negative")
        _check(self.quarantine_losses > 0, "quarantine_losses must be above 0")


_Settings = (
    SlotSettings | LevelSettings | MissSettings | BudgetSettings | ProofSettings | ProfileSettings
)
