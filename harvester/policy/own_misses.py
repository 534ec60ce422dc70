"""Production's own misses: their rate, and the highest rate that withheld slices leave believable.

Slices are withheld at random, more of them while the guest is new or under suspicion. A slice
counts by the inverse of its chance; otherwise minutes with few withheld slices would be missing
from production's own rate. Load swings last longer than a slice, so that all withheld slices may
miss a swing. The spread of the per-minute miss rates, granted and withheld requests together,
estimates this sampling error; it is uncertain with few minutes, or few withheld slices among those
with late requests. Lasting harm raises all minutes alike and adds no spread. Reads no clock.
"""

import math
from collections.abc import Sequence

_BELIEVABLE = 2.5
"""Standard errors."""
_LEAST_MINUTES = 3
"""Minutes with requests, without which their spread is unknown."""


def late_rate(granted: Sequence[float], late: Sequence[float], shares: Sequence[float]) -> float:
    """The share of late granted requests, had all slices been granted; 0 without requests."""
    every = [1.0 / (1.0 - share) for share in shares]
    requests = _weighed(granted, every)
    return _weighed(late, every) / requests if requests else 0.0


def believable_rate(
    granted: Sequence[float],
    granted_late: Sequence[float],
    withheld: Sequence[float],
    withheld_late: Sequence[float],
    slices: Sequence[float],
    *,
    shares: Sequence[float],
) -> float:
    """The highest share of late requests, 0 to 1, that production is believed to have by itself,
    had all slices been withheld. 0 without withheld requests: nothing speaks for production.

    Counts of each minute, withheld ones as `Served` weighs them, with its slices and their chance
    to be withheld; a minute that does not know its chance (0) has plain counts.
    """
    if not any(withheld):
        return 0.0
    odds = [share / (1.0 - share) or 1.0 for share in shares]
    alone = [one * each for one, each in zip(withheld, odds, strict=True)]
    alone_late = [one * each for one, each in zip(withheld_late, odds, strict=True)]
    counts = [one + other for one, other in zip(granted, alone, strict=True)]
    late = [one + other for one, other in zip(granted_late, alone_late, strict=True)]
    minutes = sum(map(bool, counts))
    if minutes < _LEAST_MINUTES or not any(granted):
        return 1.0
    # A minute whose slices are not known counts as one, withheld as often as all requests.
    slices, overall = [each or 1.0 for each in slices], sum(alone) / sum(counts)
    shares = [each or overall for each in shares]
    error = _sampling_error(counts, late, slices, shares)
    late_slices = _late_slices(alone, counts, late, slices, shares)
    believable = student(_BELIEVABLE, max(1.0, min(minutes, late_slices) - 1.0))
    every = [1.0 / share for share in shares]
    requests = _weighed(alone, every)
    effective = requests * requests / _weighed(alone, [each * each for each in every])
    rate = min(1.0, _weighed(alone_late, every) / requests)
    return min(1.0, _upper(rate, effective) + believable * error)


def _weighed(counts: Sequence[float], weights: Sequence[float]) -> float:
    return sum([count * weight for count, weight in zip(counts, weights, strict=True)])


def _sampling_error(
    counts: Sequence[float], late: Sequence[float], slices: Sequence[float], shares: Sequence[float]
) -> float:
    """Standard error of the difference between the rates of slices drawn at random, by each
    minute's share, and of the others, each slice weighed by the inverse of its chance (ratio
    estimates; Cochran, "Sampling Techniques", 1977, chapters 6 and 9A)."""
    total, minutes = sum(counts), sum(map(bool, counts))
    mean = sum(late) / total
    squares = sum(
        [
            (one - mean * count) ** 2 / (number * share * (1.0 - share))
            for one, count, number, share in zip(late, counts, slices, shares, strict=True)
        ]
    )
    return math.sqrt(squares * minutes / (minutes - 1)) / total


def _late_slices(
    alone: Sequence[float],
    counts: Sequence[float],
    late: Sequence[float],
    slices: Sequence[float],
    shares: Sequence[float],
) -> float:
    """Effective number of withheld slices in which requests were late (Kish, "Survey Sampling",
    1965), each weighed by its late requests and the inverse of its chance. `alone`: withheld
    requests."""
    if not any(late):
        return math.inf
    weighed = squares = 0.0
    for withheld, count, one, number, share in zip(
        alone, counts, late, slices, shares, strict=True
    ):
        if withheld:
            weight = one / share
            weighed += withheld / count * weight
            squares += withheld / count * weight * weight / number
    return weighed * weighed / squares if squares else 0.0


def student(z: float, degrees: float) -> float:
    """Quantile of Student's t where the normal's is `z`: few minutes tell little of their own
    spread (Abramowitz and Stegun, 26.7.5, two terms)."""
    first = (z**3 + z) / (4 * degrees)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _upper(rate: float, requests: float) -> float:
    """Upper bound of a rate, by the effective number of its requests (Wilson, "Probable inference",
    1927; Kish)."""
    z2 = _BELIEVABLE * _BELIEVABLE
    half = _BELIEVABLE * math.sqrt(rate * (1 - rate) / requests + z2 / (4 * requests * requests))
    return (rate + z2 / (2 * requests) + half) / (1 + z2 / requests)
