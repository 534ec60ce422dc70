"""The range of each setting in which production stays protected, with the reason for its limits.

Settings beyond it are experiments, which an operator asks for by `unsafe_experiments`. Meaningless
values (negative, not finite, contradictory) are refused by the settings themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
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

    def fault(self, value: Any) -> str:
        if self.least <= value <= self.most:
            return ""
        return f"{value:g} is not {self.least:g} to {self.most:g} {self.unit}: {self.why}"


@dataclass(frozen=True, slots=True)
class SingleValue:
    value: Any
    why: str

    def fault(self, value: Any) -> str:
        return "" if value == self.value else f"{value} is an experiment: {self.why}"


_DAY_S = 86_400.0

BOUNDS: dict[type, dict[str, Range | SingleValue]] = {
    SlotSettings: {
        "beat_s": Range(0.01, 1.0, "s", "a breach is seen one beat late"),
        "grant_ttl_s": Range(
            0.02, 5.0, "s", "when the agent dies the gate stays open for as long as this"
        ),
        "abort_grace_s": Range(
            0.0, 600.0, "s", "requests without a grant hold memory for as long as this"
        ),
        # No service promises its first token only after five minutes, or one token in ten seconds.
        "ttft_slo_s": Range(
            0.001, 300.0, "s", "beyond it no request is ever late (500 ms are 0.5)"
        ),
        "itl_slo_s": Range(0.0005, 10.0, "s", "beyond it no token is ever late (50 ms are 0.05)"),
        "epsilon": Range(0.0, 1.0, "of an event's time", "production's events take so much longer"),
        "law": SingleValue(Law.SLACK, "another project's rule does not keep production's time"),
        "ungated": SingleValue(False, "no law looks at production"),
        "step_tokens_max": Range(
            1, 131_072, "tokens", "production waits for a step that has begun"
        ),
        "kv_budget_tokens": Range(0, 10**12, "tokens", "no engine has more"),
        "phantom_prompt_tokens": Range(0, 10**8, "tokens", "no model reads more"),
        "blocking_ratio": Range(
            0.01, 1.0, "of a step", "no backend promises steps that delay nothing"
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
        "evictions_per_hour_max": Range(0, 1_000_000, "evictions", "write 0 for no bound"),
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
        "enforced": SingleValue(True, "the error budget would be counted but not enforced"),
        "slo_target_ratio": Range(
            0.5, 0.999999, "of requests", "outside this range the target is no usable SLO"
        ),
        "share_ratio": Range(0.0, 0.5, "of the error budget", "most of it is production's"),
        "minimum_requests": Range(0, 1_000_000, "requests", "nothing is judged before"),
        "minimum_misses": Range(0, 100_000, "misses", "nothing is judged before"),
        "hold_s": Range(10.0, 30 * _DAY_S, "s", "harvesting goes on before anyone has looked"),
    },
    ProofSettings: {
        "share_ratio": Range(0.005, 0.5, "of time", "without it harm is never measured"),
        "slice_s": Range(0.1, 600.0, "s", "slices hold no samples, or all of an hour"),
        "seed": Range(0, 2**63 - 1, "", "a seed is a whole number"),
        "proving_share_ratio": Range(0.0, 0.5, "of time", "little is left to harvest"),
        "proving_s": Range(0.0, _DAY_S, "s", "little is left to harvest"),
        "minimum_slices": Range(2, 1000, "slices", "no verdict before"),
        "limit_ratio": Range(0.001, 1.0, "of the latency alone", "harvesting doubles it unstopped"),
        "error_ratio": Range(1e-6, 0.5, "of 28 days", "no evidence is ever enough"),
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

TTFT_EDGES_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_EDGES_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""vLLM's, unless it was started with `--custom-histogram-buckets`."""

# An SLO above these bounds was probably meant in milliseconds: no service allows this long for a
# first token, or between two.
TTFT_PLAUSIBLE_S = 30.0
ITL_PLAUSIBLE_S = 2.0


def beyond(settings: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings outside their ranges: the path, and the range with its reason."""
    bounds = BOUNDS[type(settings)]
    for field in fields(settings):
        value = getattr(settings, field.name)
        where = (*path, field.name)
        if is_dataclass(value):
            yield from beyond(value, where)
        elif (bound := bounds.get(field.name)) is not None and not (
            isinstance(bound, Range) and isinstance(value, str)
        ):
            fault = bound.fault(value)
            if fault:
                yield where, fault


def slo_warnings(*, ttft_slo_s: float, itl_slo_s: float) -> Iterator[tuple[str, str]]:
    """Warnings of an SLO that dashboards cannot count, or that is probably not in seconds: each odd
    setting's name and its warning.

    RoseMux itself judges from raw samples; dashboards read production's histograms, and between two
    edges they can only interpolate.
    """
    for name, slo_s, plausible_s, edges_s in (
        ("ttft_slo_s", ttft_slo_s, TTFT_PLAUSIBLE_S, TTFT_EDGES_S),
        ("itl_slo_s", itl_slo_s, ITL_PLAUSIBLE_S, ITL_EDGES_S),
    ):
        if slo_s > plausible_s:
            yield name, f"{slo_s:g} s is long: were {slo_s:g} ms meant, {slo_s / 1000:g}?"
        elif slo_s not in edges_s:
            near = _near(slo_s, edges_s)
            yield name, f"{slo_s:g} is no edge of vLLM's histogram, dashboards interpolate {near}"
    if itl_slo_s > ttft_slo_s:
        yield "itl_slo_s", f"{itl_slo_s:g} s is longer than ttft_slo_s, {ttft_slo_s:g} s"


def _near(slo_s: float, edges_s: tuple[float, ...]) -> str:
    for below, above in pairwise(edges_s):
        if below < slo_s < above:
            return f"between {below:g} and {above:g}"
    return f"below {edges_s[0]:g}" if slo_s < edges_s[0] else f"above {edges_s[-1]:g}"
