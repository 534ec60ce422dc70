"""Latency that a router adds, from the times of client and engine; intervals over rounds.

A request's time outside the engine is its time from its schedule to its last byte, less the time
that the engine had it. The load's own share of that is in the direct arm too, and comes off it:
quantile less quantile, in one round. Rounds are the unit of resampling, as neighbours in a window
share its queues. Pure and seeded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from scipy.stats import t as student_t

from benchmarks.gateway.load import Exchange

RESAMPLES = 4000
LEVEL = 0.95
_MS = 1e-6

Times = Mapping[int, Sequence[int]]
"""When the engine had a request and sent its first and last token, in ns, by request number."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Times outside the engine in one window, in ms."""

    first_ms: NDArray[np.float64]
    whole_ms: NDArray[np.float64]

    @classmethod
    def of(cls, exchanges: Sequence[Exchange], times: Times) -> "Outside":
        first, whole = [], []
        for exchange in exchanges:
            if exchange.number not in times or not exchange.last_ns:
                continue  # It has not ended, which its check says.
            had_ns, first_ns, last_ns = times[exchange.number]
            before_ns = had_ns - exchange.scheduled_ns
            first.append(before_ns + exchange.first_ns - first_ns)
            whole.append(before_ns + exchange.last_ns - last_ns)
        return cls(np.array(first, dtype=float) * _MS, np.array(whole, dtype=float) * _MS)


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over rounds, and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def added(
    router: Sequence[NDArray[np.float64]],
    direct: Sequence[NDArray[np.float64]],
    *,
    percent: float,
    seed: int,
) -> Interval:
    """The percentile of each round less the direct arm's in the same round."""
    pairs = zip(router, direct, strict=True)
    found = [float(np.percentile(a, percent) - np.percentile(b, percent)) for a, b in pairs]
    return mean_interval(found, seed=seed)


def mean_ratio(above: Sequence[float], below: Sequence[float], *, seed: int) -> Interval:
    """Geometric mean of the rounds' ratios."""
    logs = mean_interval(np.log(np.divide(above, below)), seed=seed)
    return Interval(*(float(np.exp(value)) for value in (logs.mean, logs.low, logs.high)))


def mean_interval(values: Sequence[float] | NDArray[np.float64], *, seed: int) -> Interval:
    """Bootstrap of the mean, widened as Student's t is over the normal distribution.

    Plain percentiles of a handful of rounds are too narrow (Hesterberg 2015, section 5.3). Raises
    ValueError with fewer than three rounds.
    """
    given = np.asarray(values, dtype=float)
    count = len(given)
    if count < 3:
        raise ValueError(f"{count} rounds: an interval needs three")
    drawn = given[np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))]
    tail = (1.0 - LEVEL) / 2
    wide = student_t.ppf(tail, count - 1) / norm.ppf(tail) * np.sqrt(count / (count - 1))
    mean = float(given.mean())
    low, high = mean + wide * (np.quantile(drawn.mean(axis=1), (tail, 1.0 - tail)) - mean)
    return Interval(mean, float(low), float(high))
