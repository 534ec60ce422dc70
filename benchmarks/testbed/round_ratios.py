"""Ratios of two arms' latencies, with intervals whose unit of resampling is the round.

Requests of one round met one machine: its speed lasts for seconds to minutes, so a round's requests
are one observation, however many they are. Each round gives one logarithm of a ratio, over the
requests that both arms replayed. The ratio is their geometric mean, its interval Student's t over
the rounds. On a simulated machine of two speeds this covers 92 to 99 % where nothing differs, a
percentile bootstrap of rounds 83 to 94 %, one of stretches of requests 36 to 90 %. Pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from benchmarks.testbed.bootstrap import LEVEL, Latencies

Statistic = Callable[[NDArray[np.float64]], float]

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "p50": lambda values: float(np.percentile(values, 50)),
        "mean": lambda values: float(values.mean()),
        "p99": lambda values: float(np.percentile(values, 99)),
    }
)


@dataclass(frozen=True, slots=True)
class RoundRatio:
    ratio: float | None = None
    """Geometric mean over the rounds; None without a round that has both figures."""
    interval: tuple[float, float] | None = None
    """95 %; None with fewer than two rounds."""

    @property
    def half_width(self) -> float | None:
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2


def over_rounds(ratios: Sequence[float]) -> RoundRatio:
    """One ratio per round. Rounds whose ratio is not a positive number count as missing."""
    logs = [math.log(each) for each in ratios if math.isfinite(each) and each > 0.0]
    if not logs:
        return RoundRatio()
    interval = student_interval(logs)
    return RoundRatio(
        math.exp(sum(logs) / len(logs)),
        None if interval is None else (math.exp(interval[0]), math.exp(interval[1])),
    )


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of one value per round; None with fewer than two."""
    count = len(values)
    if count < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(count)
    wide = float(student_t.ppf((1.0 + LEVEL) / 2, count - 1)) * error
    return mean - wide, mean + wide


def round_ratio(above: Latencies, below: Latencies, statistic: Statistic) -> RoundRatio:
    """`above`'s statistic over `below`'s, round by round; a round is the first part of a unit."""
    upper, lower = _by_round(above), _by_round(below)
    shared = sorted(upper.keys() & lower.keys())
    return over_rounds([statistic(upper[each]) / statistic(lower[each]) for each in shared])


def _by_round(latencies: Latencies) -> dict[int, NDArray[np.float64]]:
    if not latencies.units:
        return {}
    rounds = np.array([number for number, _ in latencies.units])
    return {int(each): latencies.values_s[rounds == each] for each in np.unique(rounds)}
