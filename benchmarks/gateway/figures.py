"""Latency that a router adds, from the times of client and engine; intervals over rounds.

A request's time outside the engine is its time from its schedule to its last byte, less the time
that the engine had it. The load's own share of that is in the direct arm too, and comes off it:
quantile less quantile, in one round. Rounds are the unit, as neighbours in a window share its
queues. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.gateway.load import Exchange
from benchmarks.testbed.round_ratios import mean_interval

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
            if exchange.number not in times or not (exchange.first_ns and exchange.last_ns):
                continue  # It has not begun or not ended, which its check says.
            had_ns, first_ns, last_ns = times[exchange.number]
            before_ns = had_ns - exchange.scheduled_ns
            first.append(before_ns + exchange.first_ns - first_ns)
            whole.append(before_ns + exchange.last_ns - last_ns)
        return cls(np.array(first, dtype=float) * _MS, np.array(whole, dtype=float) * _MS)


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over rounds, and where it lies with 95 % confidence if rounds are independent."""

    mean: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float] | NDArray[np.float64]) -> "Interval":
        """The interval is Student's t's. Raises ValueError with fewer than two rounds."""
        found = mean_interval(values)
        if found is None:
            raise ValueError(f"an interval needs two rounds, not {len(values)}")
        return cls(float(np.mean(values)), *found)

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def added(
    router: Sequence[NDArray[np.float64]],
    direct: Sequence[NDArray[np.float64]],
    *,
    percent: float,
) -> Interval:
    """The percentile of each round less the direct arm's in the same round."""
    pairs = zip(router, direct, strict=True)
    found = [float(np.percentile(a, percent) - np.percentile(b, percent)) for a, b in pairs]
    return Interval.over(found)


def mean_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Geometric mean of the rounds' ratios."""
    logs = Interval.over(np.log(np.divide(above, below)))
    return Interval(*(float(np.exp(value)) for value in (logs.mean, logs.low, logs.high)))
