"""The report's series, per second of each arm: an arm's blocks lie end to end on its own axis.

Every point is a percentile or a mean of all values in its second; nothing is thinned out
otherwise, and a second without data is a gap. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.production_request import ProductionRequest
from examples.demo.records import ArmBlock, DemoArm, GrantSample, Record

Series = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArmAxis:
    """The blocks of one arm, in clock seconds, in order."""

    blocks: tuple[ArmBlock, ...]

    @property
    def length_s(self) -> float:
        return sum(block.end_s - block.start_s for block in self.blocks)

    @property
    def seams_s(self) -> tuple[float, ...]:
        """Boundaries between blocks, in seconds on the arm's axis."""
        lengths = [block.end_s - block.start_s for block in self.blocks]
        return tuple(float(at) for at in np.cumsum(lengths)[:-1])

    def at(self, moments_s: Series) -> Series:
        """Clock seconds to this axis; NaN outside of every block."""
        placed = np.full(moments_s.shape, np.nan)
        offset_s = 0.0
        for block in self.blocks:
            inside = (moments_s >= block.start_s) & (moments_s < block.end_s)
            placed[inside] = moments_s[inside] - block.start_s + offset_s
            offset_s += block.end_s - block.start_s
        return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySeries:
    """One value per second; NaN where nothing came."""

    p50_s: Series
    p99_s: Series


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSeries:
    """One value per second of the harvesting arm."""

    in_flight: Series
    """Production's requests, mean."""
    cap_tokens: Series
    """Granted per guest step, mean."""
    open_share: Series
    tokens_per_s: Series
    """Tokens per second of the guest."""


def axis_of(records: Sequence[Record], arm: DemoArm) -> ArmAxis:
    """The measured blocks of `arm`."""
    blocks = (r for r in records if isinstance(r, ArmBlock) and r.arm == arm and r.index >= 0)
    return ArmAxis(tuple(sorted(blocks, key=lambda block: block.start_s)))


def ttft_series(records: Sequence[Record], arm: DemoArm) -> LatencySeries:
    """First-token latencies, by the second in which a request was due."""
    seen = [r for r in _requests(records, arm) if r.ttft_s is not None]
    moments = np.array([r.due_s for r in seen])
    return _latency(axis_of(records, arm), moments, np.array([r.ttft_s for r in seen], dtype=float))


def itl_series(records: Sequence[Record], arm: DemoArm) -> LatencySeries:
    """Inter-token latencies, by the second in which a token came."""
    moments: list[Series] = [np.zeros(0)]
    values: list[Series] = [np.zeros(0)]
    for request in _requests(records, arm):
        if request.ttft_s is not None and request.itl_s:
            gaps = np.array(request.itl_s)
            values.append(gaps)
            moments.append(request.due_s + request.ttft_s + np.cumsum(gaps))
    return _latency(axis_of(records, arm), np.concatenate(moments), np.concatenate(values))


def grant_series(records: Sequence[Record], arm: DemoArm = DemoArm.HARVEST) -> GrantSeries:
    axis = axis_of(records, arm)
    seen = [r for r in records if isinstance(r, GrantSample) and r.arm == arm]
    seen.sort(key=lambda sample: sample.t_s)
    moments = axis.at(np.array([s.t_s for s in seen]))
    # A falling count means a restarted guest; its tokens since the last sample are unknown.
    grown = np.maximum(0.0, np.diff([s.guest_tokens_total for s in seen], prepend=np.nan))
    elapsed = np.diff([s.t_s for s in seen], prepend=np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(elapsed > 0, grown / elapsed, np.nan)
    return GrantSeries(
        in_flight=_mean(axis, moments, np.array([s.production_in_flight for s in seen], float)),
        cap_tokens=_mean(axis, moments, np.array([s.step_tokens_cap for s in seen], float)),
        open_share=_mean(axis, moments, np.array([s.gate_open for s in seen], float)),
        tokens_per_s=_mean(axis, moments, speed),
    )


def _requests(records: Sequence[Record], arm: DemoArm) -> list[ProductionRequest]:
    return [
        r
        for r in records
        if isinstance(r, ProductionRequest) and r.arm == arm and r.block >= 0 and not r.failed
    ]


def _latency(axis: ArmAxis, moments_s: Series, values_s: Series) -> LatencySeries:
    p50 = np.full(_seconds(axis), np.nan)
    p99 = p50.copy()
    for second, inside in _by_second(axis.at(moments_s), values_s):
        p50[second], p99[second] = np.percentile(inside, (50, 99))
    return LatencySeries(p50_s=p50, p99_s=p99)


def _mean(axis: ArmAxis, placed_s: Series, values: Series) -> Series:
    means = np.full(_seconds(axis), np.nan)
    for second, inside in _by_second(placed_s, values):
        means[second] = inside.mean()
    return means


def _by_second(placed_s: Series, values: Series) -> list[tuple[int, Series]]:
    known = np.isfinite(placed_s) & np.isfinite(values)
    seconds, kept = placed_s[known].astype(int), values[known]
    order = np.argsort(seconds, kind="stable")
    found, starts = np.unique(seconds[order], return_index=True)
    return list(zip(found.tolist(), np.split(kept[order], starts[1:]), strict=False))


def _seconds(axis: ArmAxis) -> int:
    return int(np.ceil(axis.length_s))
