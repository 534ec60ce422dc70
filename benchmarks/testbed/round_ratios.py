"""Ratios of two arms' figures, with intervals whose unit of resampling is the round.

Requests of one round met one machine: its speed lasts for seconds to minutes, so a round's requests
are one observation, however many they are. Every figure is of the requests of all rounds together:
P99 of one round's is nearly its longest latency, and a mean of these hides a tail.

    mean, shares   logarithm of the ratio, by the jackknife: one pseudo-value per round
    P50, P99       score test inverted: the interval holds each ratio r for which the rounds' counts
                   of `above` beyond r times `below`'s quantile differ from `below`'s own by chance
    covariates     of each round, 0 in expectation: the interval is of the intercept of a regression
                   over rounds, so that it leaves out what they explain

The covariate in use is the speed of the machine in one arm's slice over that in the other's
(machine_speed.py). Coverage on a simulated machine of two speeds is in coserve's README, for the
demo's few rounds in decision 13. Pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from benchmarks.testbed.latencies import ArmLatencies

Values = NDArray[np.float64]
Interval = tuple[float, float]

LEVEL = 0.95
ADJUSTED_ROUNDS_MIN = 10
"""Below this a slope over rounds is a guess, and covariates are left out."""
_CANDIDATES = 4000
_NEAR_RANKS = 0.25
"""Ratios are searched among all quantiles, more closely among those this near to the asked one."""


@dataclass(frozen=True, slots=True)
class Statistic:
    quantile: float | None = None
    """None: the mean."""

    def __call__(self, values: Values) -> float:
        if self.quantile is None:
            return float(values.mean())
        return float(np.quantile(values, self.quantile))


STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {"p50": Statistic(0.5), "mean": Statistic(), "p99": Statistic(0.99)}
)


@dataclass(frozen=True, slots=True)
class RoundRatio:
    ratio: float | None = None
    """None without a round that has both arms."""
    interval: Interval | None = None
    """95 %; None with fewer than two rounds, or where these do not bound it."""

    @property
    def half_width(self) -> float | None:
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2


def round_ratio(
    above: ArmLatencies, below: ArmLatencies, statistic: Statistic, covariates: Sequence[float] = ()
) -> RoundRatio:
    """`above`'s statistic over `below`'s, of the rounds that both have.

    `covariates` has one number for each round that both have, in their order, or none.
    """
    upper, lower = _by_round(above), _by_round(below)
    shared = sorted(upper.keys() & lower.keys())
    if not shared:
        return RoundRatio()
    pair = [upper[each] for each in shared], [lower[each] for each in shared]
    if statistic.quantile is not None:
        return _quantile_ratio(*pair, statistic.quantile, _columns(covariates, len(shared)))
    sums = [np.array([(each.sum(), len(each)) for each in arm]) for arm in pair]

    def mean_ratio(kept: NDArray[np.bool_]) -> float:
        over, under = (arm[kept].sum(axis=0) for arm in sums)
        return float(over[0] / over[1] / (under[0] / under[1]))

    return jackknife_ratio(len(shared), mean_ratio, _columns(covariates, len(shared)))


def jackknife_ratio(
    rounds: int,
    ratio_of: Callable[[NDArray[np.bool_]], float | None],
    covariates: Values | None = None,
) -> RoundRatio:
    """`ratio_of` is of the kept rounds; None or a number that is not positive makes no figure."""
    everything = np.ones(rounds, dtype=bool)
    logs = [_log(ratio_of(everything))]
    if rounds > 1:
        logs += [_log(ratio_of(np.arange(rounds) != out)) for out in range(rounds)]
    if not all(math.isfinite(each) for each in logs):
        return RoundRatio()
    if rounds == 1:
        return RoundRatio(math.exp(logs[0]))
    # Around the ratio of all rounds: what the jackknife finds of its bias is left out.
    without = np.array(logs[1:])
    pseudo = logs[0] - (rounds - 1) * (without - without.mean())
    middle, wide = _intercept(pseudo[:, None], _columns(covariates, rounds))
    low, high = middle[0] - wide[0], middle[0] + wide[0]
    return RoundRatio(math.exp(middle[0]), (math.exp(low), math.exp(high)))


def mean_interval(
    values: Sequence[float] | Values, covariates: Values | Sequence[float] | None = None
) -> Interval | None:
    """95 % interval of the mean of one value per round; None with fewer than two."""
    if len(values) < 2:
        return None
    middle, wide = _intercept(np.array(values)[:, None], _columns(covariates, len(values)))
    return float(middle[0] - wide[0]), float(middle[0] + wide[0])


def _quantile_ratio(
    above: Sequence[Values], below: Sequence[Values], quantile: float, covariates: Values
) -> RoundRatio:
    edge = float(np.quantile(np.concatenate(below), quantile, method="inverted_cdf"))
    candidates = _candidates(np.concatenate(above), quantile)
    if len(above) == 1 or edge <= 0.0:
        single = float(np.quantile(above[0], quantile, method="inverted_cdf"))
        return RoundRatio(single / edge if edge > 0.0 else None)
    # How many more latencies lie beyond the edge than there should be, by round.
    beyond = np.array([_beyond(values, candidates, quantile) for values in above])
    own = np.array([_beyond(values, np.array([edge]), quantile) for values in below])
    excess, wide = _intercept(beyond - own, covariates)
    accepted = np.flatnonzero(np.abs(excess) <= wide)
    place = int(np.argmin(np.abs(excess)))
    first, last = (accepted[0], accepted[-1]) if len(accepted) else (place, place)
    ratio = float(candidates[place] / edge)
    # The last candidate is beyond every number: an interval that ends there is not bounded.
    if first == 0 or last >= len(candidates) - 2:
        return RoundRatio(ratio)
    low, high = candidates[first - 1], candidates[last + 1]
    return RoundRatio(ratio, (float(low / edge), float(high / edge)))


def _candidates(values: Values, quantile: float) -> Values:
    """Distinct values, with one below and one beyond all."""
    ordered = np.sort(values)
    least, most = (
        round(np.clip(quantile + by, 0.0, 1.0) * (len(ordered) - 1))
        for by in (-_NEAR_RANKS, _NEAR_RANKS)
    )
    exact = math.ceil(quantile * len(ordered)) - 1
    every = np.linspace(0, len(ordered) - 1, _CANDIDATES // 4)
    near = np.linspace(least, most, _CANDIDATES)
    found = np.unique(ordered[np.concatenate([every, near, [exact]]).astype(int)])
    return np.concatenate([[np.nextafter(found[0], 0.0)], found, [np.inf]])


def _beyond(values: Values, edges: Values, quantile: float) -> Values:
    within = np.searchsorted(np.sort(values), edges, side="right")
    return np.asarray(len(values) * quantile - within)


def _intercept(columns: Values, covariates: Values) -> tuple[Values, Values]:
    """Mean of each column over rounds where covariates are 0, and half its 95 % interval."""
    rounds = len(columns)
    design = np.column_stack([np.ones(rounds), covariates])
    inverse = np.linalg.pinv(design)
    slopes = inverse @ columns
    freedom = rounds - design.shape[1]
    variance = ((columns - design @ slopes) ** 2).sum(axis=0) / freedom
    error = np.sqrt(variance * (inverse[0] ** 2).sum())
    return slopes[0], float(student_t.ppf((1.0 + LEVEL) / 2, freedom)) * error


def _columns(covariates: Values | Sequence[float] | None, rounds: int) -> Values:
    """One row per round; without columns where there are no covariates, or too few rounds."""
    if covariates is None or rounds < ADJUSTED_ROUNDS_MIN or len(covariates) != rounds:
        return np.zeros((rounds, 0))
    given = np.asarray(covariates, dtype=float).reshape(rounds, -1)
    return given[:, given.std(axis=0) > 0.0]


def _log(ratio: float | None) -> float:
    return math.nan if ratio is None or not ratio > 0.0 else math.log(ratio)


def _by_round(latencies: ArmLatencies) -> dict[int, Values]:
    order = np.argsort(latencies.rounds, kind="stable")
    numbers, starts = np.unique(latencies.rounds[order], return_index=True)
    parts = np.split(latencies.values_s[order], starts[1:])
    return dict(zip(numbers.tolist(), parts, strict=False))
