"""The guest's output in the time that production left, and the attribution of the rest.

    residual share = speed beside / (speed alone * (1 - production's core share))
                   = time share * pace

The time share is what the rule granted: the guest's processor time over production's remainder
when alone. The pace is the guest's output per core second, over that of the guest alone:
contention, cold caches, and a machine that was faster in one slice than in the other. Pure.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.coserve.arms import ALONE, Arm
from benchmarks.coserve.rounds import Slice

_RESAMPLES = 1000
_PERCENTS = (2.5, 97.5)

Weights = NDArray[np.float64]
"""Number of times that each round counts, by draw and round."""


def residual_figures(slices: Sequence[Slice], arm: Arm, *, seed: int) -> dict[str, Any]:
    """Figures, each None if the guest did nothing alone; the 95 % interval resamples rounds."""
    rounds = len({each.round for each in slices})
    once = np.ones((1, rounds))
    share, time_share = (float(of(slices, arm, once)[0]) for of in (_share, _time_share))
    return {
        "residual_share": _finite(share),
        "residual_interval": _interval(slices, arm, rounds, seed),
        "time_share": _finite(time_share),
        "pace_ratio": _finite(share / time_share) if time_share else None,
    }


def _share(slices: Sequence[Slice], arm: Arm, weights: Weights) -> NDArray[np.float64]:
    return _of_the_rest(slices, arm, weights, lambda each: each.guest_tokens)


def _time_share(slices: Sequence[Slice], arm: Arm, weights: Weights) -> NDArray[np.float64]:
    return _of_the_rest(slices, arm, weights, lambda each: each.guest_core_s)


def _of_the_rest(
    slices: Sequence[Slice], arm: Arm, weights: Weights, of: Callable[[Slice], float]
) -> NDArray[np.float64]:
    """Guest's rate of `of` beside production, over its rate alone times the core share left."""
    beside = _rate(slices, (arm,), weights, of)
    alone = _rate(slices, (Arm.ROLLOUTS,), weights, of)
    used = _rate(slices, ALONE, weights, lambda each: each.production_core_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(beside / (alone * (1.0 - used)))


def _rate(
    slices: Sequence[Slice], arms: Sequence[Arm], weights: Weights, of: Callable[[Slice], float]
) -> NDArray[np.float64]:
    places = {each: place for place, each in enumerate(sorted({s.round for s in slices}))}
    amount, seconds = np.zeros(len(places)), np.zeros(len(places))
    for each in slices:
        if each.arm in arms:
            amount[places[each.round]] += of(each)
            seconds[places[each.round]] += each.seconds
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((weights @ amount) / (weights @ seconds))


def _interval(
    slices: Sequence[Slice], arm: Arm, rounds: int, seed: int
) -> tuple[float, float] | None:
    if rounds < 2:
        return None
    drawn = np.random.default_rng(seed).multinomial(
        rounds, np.full(rounds, 1.0 / rounds), size=_RESAMPLES
    )
    shares = _share(slices, arm, drawn.astype(float))
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        return None
    low, high = np.percentile(shares, _PERCENTS)
    return float(low), float(high)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
