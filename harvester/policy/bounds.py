"""The range of each setting in which production stays protected, with the reason for its ends.

Settings beyond are experiments: they mean something, and harm or blind what guards production. An
operator asks for them by one name, `unsafe_experiments`. What means nothing at all (negative, not
finite, contradictory) is refused by the settings themselves. Reads and logs nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from harvester.contracts.page.records import Law
from harvester.policy.settings import (
    BudgetSettings,
    LevelSettings,
    MissSettings,
    ProfileSettings,
    ProofSettings,
    SlotSettings,
)


@dataclass(frozen=True, slots=True)
class Range:
    least: float
    most: float
    unit: str
    why: str
    or_zero: bool = False
    """0 is outside the range and means something else, which is harmless."""

    def fault(self, value: Any) -> str:
        if self.least <= value <= self.most or (self.or_zero and value == 0):
            return ""
        zero = ", or 0" if self.or_zero else ""
        return f"{value:g} is not {self.least:g} to {self.most:g} {self.unit}{zero}: {self.why}"


@dataclass(frozen=True, slots=True)
class Only:
    value: Any
    why: str

    def fault(self, value: Any) -> str:
        return "" if value == self.value else f"{value} is an experiment: {self.why}"


_DAY_S = 86_400.0

BOUNDS: dict[type, dict[str, Range | Only]] = {
    SlotSettings: {
        "beat_s": Range(0.01, 1.0, "s", "a breach is seen one beat late"),
        "grant_ttl_s": Range(
            0.02, 5.0, "s", "when the agent dies the gate stays open for as long as this"
        ),
        "abort_grace_s": Range(
            0.0, 600.0, "s", "requests without a grant hold memory for as long as this"
        ),
        "ttft_slo_s": Range(0.001, 600.0, "s", "beyond it no request is ever late"),
        "itl_slo_s": Range(0.0005, 60.0, "s", "beyond it no token is ever late"),
        "epsilon": Range(0.0, 1.0, "of an event's time", "production's events take so much longer"),
        "law": Only(Law.SLACK, "another project's rule does not keep production's time"),
        "ungated": Only(False, "no law looks at production"),
        "step_tokens_max": Range(
            1, 131_072, "tokens", "production waits for a step that has begun"
        ),
        "kv_budget_tokens": Range(0, 10**12, "tokens", "no engine has more"),
        "phantom_prompt_tokens": Range(0, 10**8, "tokens", "no model reads more"),
        "blocking_ratio": Range(
            0.01, 1.0, "of a step", "every backend delays production by a part of a guest's step"
        ),
        "preemption_s": Range(1e-5, 0.1, "s", "no switch between processes costs production less"),
        "model_samples_min": Range(
            16, 1_000_000, "steps", "step times of too few steps are guesses"
        ),
        "hung_steps": Range(2.0, 1000.0, "steps", "a hung engine is seen so late, or always"),
        "hung_min_s": Range(0.1, 60.0, "s", "a hung engine is seen so late, or always"),
        "cooldown_s": Range(
            0.05, 3600.0, "s", "a slot that reopens at once opens and closes with every breach"
        ),
        "production_lost_s": Range(0.5, 600.0, "s", "leases outlive production by as long"),
        "guest_away_s": Range(0.5, 60.0, "s", "a dead guest counts as there for as long"),
        "guest_lost_s": Range(0.5, 600.0, "s", "a lease outlives its guest by as long"),
        "quarantine_losses": Range(1, 100, "guests", "more crashes beside production go unseen"),
        "quarantine_window_s": Range(
            10.0, 30 * _DAY_S, "s", "crashes are forgotten before the next one"
        ),
        "kv_high_ratio": Range(
            0.05, 0.98, "of production's KV", "it is full before the guest gives any back"
        ),
        "memory_high_ratio": Range(
            0.05, 0.98, "of the limit", "it is reached before the guest gives any back"
        ),
        "kv_deadline_s": Range(
            0.1, 60.0, "s", "production waits for as long for memory that the guest owes"
        ),
        "kv_retained_ratio": Range(0.0, 1.0, "of the guest's KV", "it has no more"),
        "sleep_after_s": Range(0.0, 30 * _DAY_S, "s", "write 0 for never"),
    },
    LevelSettings: {
        "shrink_ratio": Range(0.01, 0.9, "of the level", "a breach takes hardly anything away"),
        "shrink_interval_s": Range(0.0, 60.0, "s", "a breach goes on for as long"),
        "floor_ratio": Range(0.001, 0.5, "of the level", "a breach never takes more away"),
        "grow_ratio": Range(0.001, 0.5, "of the maximum", "what was taken comes back at once"),
        "grow_interval_s": Range(0.1, 3600.0, "s", "what was taken comes back at once"),
        "quiet_s": Range(0.5, 3600.0, "s", "what was taken comes back within the same breach"),
    },
    MissSettings: {
        "window_s": Range(1.0, 600.0, "s", "misses are forgotten, or counted too long"),
        "limit_ratio": Range(0.001, 0.5, "of the samples", "more misses than hits are no breach"),
        "minimum_misses": Range(0.0, 1000.0, "misses", "so many misses are no breach"),
    },
    BudgetSettings: {
        "enforced": Only(True, "production's error budget is counted and not kept"),
        "slo_target_ratio": Range(0.5, 0.999999, "of requests", "a promise that is none"),
        "share_ratio": Range(0.0, 0.5, "of the error budget", "most of it is production's"),
        "minimum_requests": Range(0, 1_000_000, "requests", "nothing is judged before"),
        "minimum_misses": Range(0, 100_000, "misses", "nothing is judged before"),
        "hold_s": Range(10.0, 30 * _DAY_S, "s", "harvesting goes on before anyone has looked"),
    },
    ProofSettings: {
        "share_ratio": Range(0.005, 0.5, "of time", "without it harm is never measured"),
        "slice_s": Range(0.1, 600.0, "s", "slices hold no samples, or all of an hour"),
        "seed": Range(0, 2**63 - 1, "", "a seed is a whole number"),
        "window_slices": Range(100, 1_000_000, "slices", "too few to judge, or too many to keep"),
        "minimum_slices": Range(2, 1000, "slices", "no verdict before"),
        "limit_ratio": Range(0.001, 1.0, "of the latency alone", "harvesting doubles it unstopped"),
        "confidence_ratio": Range(0.5, 0.999, "", "no evidence is ever enough"),
        "hold_s": Range(10.0, 30 * _DAY_S, "s", "harvesting goes on before anyone has looked"),
    },
    ProfileSettings: {
        name: Range(0.0, 1000.0, "s", "no step takes longer")
        for name in (
            "prefill_base_s",
            "prefill_s_per_token",
            "decode_base_s",
            "decode_s_per_request",
        )
    },
}


def beyond(settings: SlotSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each setting outside its range: its path, and the range with its reason."""
    yield from _beyond(settings, ())


def _beyond(settings: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    bounds = BOUNDS[type(settings)]
    for field in fields(settings):
        value = getattr(settings, field.name)
        where = (*path, field.name)
        if is_dataclass(value):
            yield from _beyond(value, where)
        elif (bound := bounds.get(field.name)) is not None and not (
            isinstance(bound, Range) and isinstance(value, str)
        ):
            fault = bound.fault(value)
            if fault:
                yield where, fault
