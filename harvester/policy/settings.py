"""The settings of the node policies, with the reason for each default.

Plain frozen dataclasses: a configuration file, a journal's first line and a test make the same
object. Meaningless values are refused here, values that harm production by `policy.bounds`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Literal

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


def _check_numbers(settings: "_Settings", *, above_0: tuple[str, ...] = ()) -> None:
    """No number may be infinite, NaN, negative, or too long for the journal."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(value, int | float):
            positive = each.name in above_0
            holds = 0 <= value < 2**63 and math.isfinite(value) and not (positive and value == 0)
            least = "above 0" if positive else "at least 0"
            _check(holds, f"{each.name} must be a finite number, {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSettings:
    """Speed at which a share of a resource is taken away and given back."""

    shrink_ratio: float = 0.5
    """A breach multiplies the level by this ratio."""
    shrink_interval_s: float = 1.0
    """Least time between two shrinks: the guest obeys within a step, samples arrive later."""
    floor_ratio: float = 0.125
    grow_ratio: float = 0.1
    """Share of the maximum that comes back per grow interval."""
    grow_interval_s: float = 1.0
    quiet_s: float = 5.0
    """Time without a breach before anything grows."""

    def __post_init__(self) -> None:
        _check_numbers(self, above_0=("grow_interval_s",))
        _check(0 < self.shrink_ratio < 1, "shrink_ratio must lie between 0 and 1")
        _check(0 < self.floor_ratio <= 1, "floor_ratio must be above 0 and at most 1")
        _check(0 < self.grow_ratio <= 1, "grow_ratio must be above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissSettings:
    """Limit above which SLO misses beside a stepping guest count as a breach, not as noise."""

    window_s: float = 10.0
    limit_ratio: float = 0.05
    """Largest share of recent samples that may miss without a breach."""
    minimum_misses: float = 3.0

    def __post_init__(self) -> None:
        _check_numbers(self, above_0=("window_s",))
        _check(0 < self.limit_ratio < 1, "limit_ratio must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    """The share of production's error budget that harvesting may spend."""

    enforced: bool = True
    """False counts and exports without stopping harvesting."""
    slo_target_ratio: float = 0.99
    """Share of requests that production promises inside the SLO."""
    share_ratio: float = 0.1
    minimum_requests: int = 100
    """Fewer requests than this in a burn window give no verdict: one slow request is no trend."""
    minimum_misses: int = 10
    hold_s: float = 600.0
    """Shortest duration of a stop."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check(0 < self.slo_target_ratio < 1, "slo_target_ratio must lie between 0 and 1")
        _check(0 <= self.share_ratio <= 1, "share_ratio must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """Randomised slices of time without a grant, against which harvesting's harm is measured."""

    share_ratio: float = 0.05
    """Share of slices withheld; 0 measures nothing. It is a half while there is a suspicion."""
    proving_share_ratio: float = 0.25
    """Share while little is known: harm that is there from the start is found in minutes."""
    proving_s: float = 1800.0
    slice_s: float = 2.0
    """Slices are multiples of it, at least ten times production's P99 time to first token."""
    seed: int = 0
    minimum_slices: int = 20
    """Slices with samples that each kind needs before there is an impact."""
    limit_ratio: float = 0.1
    """Latencies may be longer by this share of the latency alone."""
    error_ratio: float = 0.2
    """Chance that harvesting stops within 28 days although no latency is longer than that."""
    confidence_ratio: float = 0.95
    """Coverage of the impact's interval."""
    hold_s: float = 3600.0

    def __post_init__(self) -> None:
        _check_numbers(self, above_0=("slice_s",))
        _check(0 <= self.share_ratio < 1, "share_ratio must be at least 0 and below 1")
        _check(0.5 <= self.confidence_ratio < 1, "confidence_ratio must be 0.5 to below 1")
        _check(0 <= self.proving_share_ratio < 1, "proving_share_ratio must be 0 to below 1")
        _check(self.minimum_slices >= 2, "minimum_slices must be at least 2")
        _check(0 < self.error_ratio < 1, "error_ratio must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Initial step times of production, as `rosemux profile` prints them. All 0 is no profile."""

    shapes: tuple[str, ...] = ()
    """Shapes of the engines that it was learned on; others ignore it. Empty matches any."""
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
        _, *times = astuple(self)
        return tuple(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSettings:
    """The node's control law for one slot."""

    mode: Mode = Mode.HARVEST
    """The more careful of this mode and the node's holds."""
    beat_s: float = 0.1
    grant_ttl_s: float = 0.5
    """Five beats: one late beat closes no gate, a dead agent closes it within half a second."""
    abort_grace_s: float = 10.0
    ttft_slo_s: float = 0.25
    itl_slo_s: float = 0.05
    epsilon: float = 0.05
    """Production's events may take (1 + epsilon) of their time alone; 1e6 leaves only the SLO.
    `docs/slo.md` has the promise, with and without isolation."""
    law: Law = Law.SLACK
    """`rose` and `saturation` are other projects' rules, for comparison with RoseMux's."""
    ungated: bool = False
    """Grant without any law, to measure the value of a law. Never in production."""
    step_tokens_max: int = 2048
    kv_budget_tokens: int = 0
    """0 keeps the guest engine's own size."""
    phantom_prompt_tokens: int = 0
    """Length of every prompt that might arrive; 0 draws it from production's own prompts."""
    blocking_ratio: float | Literal["auto"] = AUTO
    """Share of a running guest step that can delay production. `auto` takes the share that the
    guest's isolation promises while it is seen to hold, else 1; a number is an operator's
    measurement."""
    preemption_s: float | Literal["auto"] = AUTO
    """Cost to production of a running guest step beside that share, however short the step is.
    `auto`: 0.1 ms in an idle group, else 0.5 ms; on a GPU `benchmarks.gpu_slot` measures it."""
    model_samples_min: int = 64
    """Steps behind production's model before it is used."""
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    """Used until the model is learned, so that a slot can open at once."""
    hung_steps: float = 8.0
    """An engine with requests in flight and no step for this many predicted steps is hung ..."""
    hung_min_s: float = 2.0
    """... but never less than this, because a predicted step may be a millisecond."""
    cooldown_s: float = 2.0
    """Quiet time after a breach before the slot opens again."""
    production_lost_s: float = 5.0
    guest_away_s: float = 2.0
    """Silence after which a guest is away; one in the idle class may miss some beats."""
    guest_lost_s: float = 5.0
    """Seconds as away after which the guest's lease ends."""
    quarantine_losses: int = 3
    """Guests lost under a lease, or crashes of production beside a stepping guest, within the
    window, that quarantine the slot."""
    quarantine_window_s: float = 600.0
    """Make it longer than `quarantine_losses` starts of production, which bound its crash rate."""
    evictions_per_hour_max: int = 0
    """Guest requests aborted for production within an hour, above which the slot is held; 0 never
    holds."""
    kv_high_ratio: float = 0.9
    """Production's KV use at which the guest's KV budget is halved, if they share memory."""
    memory_high_ratio: float = 0.9
    """Use of the shared control group's limit at which the guest's KV budget is halved."""
    kv_deadline_s: float = 2.0
    """Seconds for which a guest may exceed its KV budget before it is ended. Longer than any guest
    step, and than a change of its weights."""
    kv_retained_ratio: float = 0.25
    """Largest share of the guest's KV kept for trajectories that await a tool; 0 keeps none. More
    saves prefills and leaves less for running turns."""
    sleep_after_s: float = 60.0
    """Seconds without a lease after which the guest releases all its KV; 0 never."""
    step_level: LevelSettings = field(default_factory=LevelSettings)
    kv_level: LevelSettings = field(default_factory=lambda: LevelSettings(quiet_s=30.0))
    misses: MissSettings = field(default_factory=MissSettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    proof: ProofSettings = field(default_factory=ProofSettings)

    def __post_init__(self) -> None:
        _check_numbers(
            self,
            above_0=(
                *("beat_s", "ttft_slo_s", "itl_slo_s"),
                *("step_tokens_max", "kv_deadline_s", "quarantine_losses"),
            ),
        )
        _check(
            self.grant_ttl_s >= 2 * self.beat_s,
            "grant_ttl_s must be at least two beats (beat_s), else one late beat closes the gate",
        )
        _check(0 <= self.epsilon <= 1e6, "epsilon must lie between 0 and 1e6")
        _check(
            self.blocking_ratio == AUTO or 0 < self.blocking_ratio <= 1,
            "blocking_ratio must be auto, or above 0 and at most 1",
        )
        _check(0 < self.memory_high_ratio <= 1, "memory_high_ratio must lie between 0 and 1")
        _check(0 <= self.kv_retained_ratio <= 1, "kv_retained_ratio must lie between 0 and 1")


_Settings = (
    SlotSettings | LevelSettings | MissSettings | BudgetSettings | ProofSettings | ProfileSettings
)


def flat_fields(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field by its dotted path, for comparing configurations."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flat_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
