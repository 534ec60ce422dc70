"""Production's own misses, apart from the budget: their coverage is tested without any charge.

Their rate comes from slices withheld at random. Load swings last longer than a slice, so that all
withheld slices may miss a swing. The spread of the per-minute miss rates, granted and withheld
requests together, estimates this sampling error; few minutes, and few withheld slices among those
with late requests, tell little of it. Lasting harm raises all minutes alike and adds no spread.
Reads no clock.
"""

import math
from collections.abc import Sequence

_BELIEVABLE = 2.5
"""Standard errors."""
_LEAST_MINUTES = 3
"""Minutes with requests, without which their spread is unknown."""


def believable_rate(
    granted: Sequence[float],
    granted_late: Sequence[float],
    withheld: Sequence[float],
    withheld_late: Sequence[float],
    slices: Sequence[float],
) -> float:
    """The highest share of late requests, 0 to 1, that production alone is believed to have; counts
    of each minute, with its slices. 0 without withheld requests: nothing speaks for production."""
    alone = sum(withheld)
    if not alone:
        return 0.0
    counts = [one + other for one, other in zip(granted, withheld, strict=True)]
    late = [one + other for one, other in zip(granted_late, withheld_late, strict=True)]
    minutes = sum(map(bool, counts))
    if minutes < _LEAST_MINUTES or not sum(granted):
        return 1.0
    # A minute whose slices are not known counts as one.
    known = [each or 1.0 for each in slices]
    error = _sampling_error(counts, late, known, share=alone / sum(counts))
    believable = student(
        _BELIEVABLE, max(1.0, min(minutes, _late_slices(withheld, counts, late, known)) - 1.0)
    )
    return min(1.0, _upper(sum(withheld_late), alone) + believable * error)


def _sampling_error(
    counts: Sequence[float], late: Sequence[float], slices: Sequence[float], *, share: float
) -> float:
    """Standard error of the difference between the rates of a random `share` of the slices and of
    the others (ratio estimates; Cochran, "Sampling Techniques", 1977, chapter 6)."""
    total, minutes = sum(counts), sum(map(bool, counts))
    mean = sum(late) / total
    squares = sum(
        [
            (one - mean * count) ** 2 / number
            for one, count, number in zip(late, counts, slices, strict=True)
        ]
    )
    return math.sqrt(squares * minutes / (minutes - 1) / (share * (1 - share))) / total


def _late_slices(
    withheld: Sequence[float],
    counts: Sequence[float],
    late: Sequence[float],
    slices: Sequence[float],
) -> float:
    """Withheld ones among the slices in which requests were late: the share withheld, weighed by
    late requests, of the effective number of such slices (Kish, "Survey Sampling", 1965)."""
    if not any(late):
        return math.inf
    weighed = sum(
        [
            one * each / count
            for one, each, count in zip(late, withheld, counts, strict=True)
            if count
        ]
    )
    return weighed * sum(late) / sum([one * one / n for one, n in zip(late, slices, strict=True)])


def student(z: float, degrees: float) -> float:
    """Quantile of Student's t where the normal's is `z`: few minutes tell little of their own
    spread (Abramowitz and Stegun, 26.7.5, two terms)."""
    first = (z**3 + z) / (4 * degrees)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _upper(misses: float, requests: float) -> float:
    """Upper bound of a rate (Wilson, "Probable inference", 1927)."""
    rate, z2 = min(1.0, misses / requests), _BELIEVABLE * _BELIEVABLE
    half = _BELIEVABLE * math.sqrt(rate * (1 - rate) / requests + z2 / (4 * requests * requests))
    return (rate + z2 / (2 * requests) + half) / (1 + z2 / requests)
