"""Ratios of two arms' latency percentiles, with intervals by a paired block bootstrap.

Both arms replay the same requests, so a resample draws stretches of neighbouring requests, the
same ones in both arms: bursts stay whole, and a heavy stretch weighs on both alike. Pure and
seeded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.production_request import ProductionRequest

STRETCH_REQUESTS = 10
"""About a second or two of production: longer than most of its queues last."""
RESAMPLES = 1000
LEVEL = 0.95
_RANKS_MAX = 2048
"""Values are drawn again by rank group, which bounds the work; below this each is its own."""

Unit = tuple[int, int]
"""A block's place among its arm's blocks, and a stretch of the window."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """One kind of latency of one arm, each with the unit it belongs to."""

    values_s: NDArray[np.float64]
    units: tuple[Unit, ...]

    def percentile_s(self, percent: float) -> float | None:
        return float(np.percentile(self.values_s, percent)) if len(self.values_s) else None


def ttft_of(requests: Sequence[ProductionRequest]) -> Latencies:
    """First-token latencies of one arm's requests that had a first token and did not fail, in s."""
    return _latencies(requests, lambda request: () if request.ttft_s is None else (request.ttft_s,))


def itl_of(requests: Sequence[ProductionRequest]) -> Latencies:
    return _latencies(requests, lambda request: request.itl_s)


def ratio_interval(
    above: Latencies, below: Latencies, *, percent: float, seed: int
) -> tuple[float, float] | None:
    """95 % interval of `above`'s percentile over `below`'s; None with fewer than two units."""
    ratios = ratio_draws(above, below, percent=percent, seed=seed)
    if not len(ratios):
        return None
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.percentile(ratios, (tail, 100.0 - tail))
    return float(low), float(high)


def ratio_draws(
    above: Latencies, below: Latencies, *, percent: float, seed: int
) -> NDArray[np.float64]:
    """`above`'s percentile over `below`'s in each resample; none with fewer than two units."""
    units = sorted({*above.units, *below.units})
    if len(units) < 2 or not len(above.values_s) or not len(below.values_s):
        return np.zeros(0)
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(len(units), np.full(len(units), 1 / len(units)), size=RESAMPLES)
    upper = _percentiles(above, units, draws, percent)
    lower = _percentiles(below, units, draws, percent)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = upper / lower
    return np.asarray(ratios[np.isfinite(ratios)])


def _percentiles(
    latencies: Latencies, units: list[Unit], draws: NDArray[np.int64], percent: float
) -> NDArray[np.float64]:
    """The percentile of every resample; NaN where a resample holds no value of this arm."""
    row_of = {unit: row for row, unit in enumerate(units)}
    rows = np.array([row_of[unit] for unit in latencies.units])
    order = np.argsort(latencies.values_s, kind="stable")
    count = len(order)
    groups = min(count, _RANKS_MAX)
    group = np.arange(count) * groups // count
    value_of_group = latencies.values_s[order][np.searchsorted(group, np.arange(groups))]
    held = np.zeros((len(units), groups))
    np.add.at(held, (rows[order], group), 1.0)
    below = np.cumsum(draws.astype(float) @ held, axis=1)
    total = below[:, -1]
    wanted = np.maximum(percent / 100.0 * total, 0.5)
    place = np.minimum((below < wanted[:, None]).sum(axis=1), groups - 1)
    return np.where(total > 0, value_of_group[place], np.nan)


def _latencies(
    requests: Sequence[ProductionRequest],
    of: Callable[[ProductionRequest], tuple[float, ...]],
) -> Latencies:
    turn = {block: place for place, block in enumerate(sorted({r.block for r in requests}))}
    values: list[float] = []
    units: list[Unit] = []
    for request in requests:
        if request.failed:
            continue
        found = of(request)
        values += found
        units += [(turn[request.block], request.trace_index // STRETCH_REQUESTS)] * len(found)
    return Latencies(np.array(values), tuple(units))
