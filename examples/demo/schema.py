"""`result.json`: its keys, and what makes one whole.

Every figure is a number with its unit in its name, and null where it was not measured; an interval
is null where the rounds are too few for one. `problems` judges no speed: a short run on a busy
machine may be slow, but it may lose nothing.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks.testbed.serving_figures import Serving

Interval = tuple[float, float] | None


class SloMs(msgspec.Struct, frozen=True, kw_only=True):
    ttft_ms: float | None
    itl_ms: float | None


class ServingAndJob(Serving, frozen=True, kw_only=True):
    """Production while the RL job ran, and the job."""

    steps: int
    step_s_mean: float | None
    rollout_share: float | None
    """Share of a step's time."""
    rollout_tokens: int
    rollout_tokens_per_s: float | None
    """While rollouts ran."""
    reward_first: float | None
    reward_last: float | None
    reward_se: float | None
    """Standard error of `reward_last - reward_first`."""


class LatencyRatios(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's production over production alone."""

    ttft_p50: float | None
    itl_p50: float | None
    ttft_p99: float | None
    itl_p99: float | None
    slo_attainment: float | None


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """95 % intervals of the latency ratios, with the round as the unit.

    Null where the rounds do not bound one: always with a single round.
    """

    ttft_p50: Interval
    itl_p50: Interval
    ttft_p99: Interval
    itl_p99: Interval


class Ratios(LatencyRatios, frozen=True, kw_only=True):
    step_speedup: float | None
    """Fixed over harvest, of the mean step over equal step numbers."""
    rollout_speedup: float | None
    """Fixed over harvest, of rollout seconds per token over equal step numbers."""
    step_speedup_per_token: float | None = None
    """The step speedup, of seconds per rollout token."""
    rollout_tokens: float | None = None
    """Harvest over fixed, over equal step numbers."""


class OnPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute log-probability difference, trainer's recomputation against the engine's.

    Covers steps in which both kinds sampled; harvested tokens weight the dedicated engines' steps.
    """

    logprob_gap_dedicated: float | None
    logprob_gap_harvested: float | None
    stale_tokens: int | None


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    versions: int
    bytes_dense: int
    bytes_sent: int
    hash_mismatches: int | None


class TrajectoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    started: int
    completed: int
    lost: int
    duplicated: int
    migrated: int | None


class ResultCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One line of what the demo must show."""

    name: str
    ok: bool
    value: float | None
    limit: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Keys with defaults are beyond the contract."""

    trace: str
    scale: float | None
    """Trace seconds replayed per second."""
    slo: SloMs
    serving_only: Serving
    fixed: ServingAndJob
    harvest: ServingAndJob
    production_busy_share: float | None
    ideal_speedup: float | None
    ratios: Ratios
    intervals: Intervals
    onpolicy: OnPolicy
    weights: Weights
    trajectories: TrajectoryCounts
    seconds_total: float | None
    seconds_to_first_harvested_token: float | None
    fixed_ratios: LatencyRatios | None = None
    """Fixed over production alone: nothing shares production's core in either, so this is how far
    two equal arms differ on this machine."""
    fixed_intervals: Intervals | None = None
    nothing_in_flight_share: dict[str, float] = {}
    """Share of an arm's time: a guest that stepped only then could have no more of it."""
    scaling: dict[str, float] = {}
    """Changes that made the trace's requests fit, beside `scale`."""
    checks: tuple[ResultCheck, ...] = ()


_ZERO = (
    "serving_only.failed",
    "fixed.failed",
    "harvest.failed",
    "onpolicy.stale_tokens",
    "weights.hash_mismatches",
    "trajectories.lost",
    "trajectories.duplicated",
)
_ABOVE_ZERO = (
    "serving_only.requests",
    "fixed.requests",
    "harvest.requests",
    "fixed.steps",
    "harvest.steps",
    "fixed.rollout_tokens",
    "harvest.rollout_tokens",
    "weights.versions",
    "weights.bytes_sent",
    "trajectories.completed",
    "seconds_total",
    "seconds_to_first_harvested_token",
)


def problems(result: dict[str, Any]) -> list[str]:
    """Faults of a result: parts missing, malformed, not measured, lost or stale; empty if clean."""
    found: list[str] = []
    for part in msgspec.structs.fields(Result):
        if part.encode_name not in result:
            if part.required:
                found.append(f"{part.encode_name} is missing")
            continue
        try:
            msgspec.convert(result[part.encode_name], part.type)
        except msgspec.ValidationError as error:
            found.append(f"{part.encode_name}: {error}")
    if found:
        return found
    figures = dict(_figures(result))
    found += [f"{name} is null: it was not measured" for name, v in figures.items() if v is None]
    found += [
        f"{name} is {value}, which is not a number"
        for name, value in figures.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    found += [f"{name} is {figures[name]}, must be 0" for name in _ZERO if figures[name]]
    found += [
        f"{name} is {figures[name]}, must be more than 0"
        for name in _ABOVE_ZERO
        if figures[name] == 0
    ]
    return found


def _figures(result: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The contract's leaves under their dotted names, but intervals, which may be null."""
    for part in msgspec.structs.fields(Result):
        if not part.required or part.type is Intervals:
            continue
        value = result[part.encode_name]
        if isinstance(value, dict):
            for name, leaf in value.items():
                yield f"{part.encode_name}.{name}", leaf
        else:
            yield part.encode_name, value
