"""Quantiles of residuals: how far outcomes were above an expected share.

Residuals near a share of 0 or 1 lie on one side; residuals of a share that bursts are spread wide.
Each residual is therefore kept twice, in a window of all shares and in the window of the nearest
knot, and quantiles use both. Memory is bounded; the oldest residuals go first.
"""

from array import array
from bisect import bisect_left, insort

QUANTILES = (0.1, 0.5, 0.9)
"""The central 80 %: what a plan may count on, what it expects, and what it may hope for."""

_ALL = 256
"""Outcomes are taken five times within a window's length and so overlap: 256 of them are worth
about 50 independent ones, of which 5 lie beyond each outer quantile. Fewer would make the outer
quantiles a matter of chance, more would remember a load that has changed."""
_NEAR = 64
_PIECES = 6
"""Knots lie a sixth apart: idle, busy and five kinds of mixture, each visited often enough."""
_PRIOR = 16.0
"""Weight of the residuals of all shares beside those near one, as a number of residuals: a knot
counts as much as all others once it has 16, and four times as much when it is full."""
_UNKNOWN = tuple(0.8 * (quantile - 0.5) for quantile in QUANTILES)
"""Quantiles without a residual: wide, though not the whole range."""


class ResidualWindow:
    """The latest residuals, sorted, and their quantiles."""

    def __init__(self, most: int, *, overlap: float = 1.0) -> None:
        """`overlap`: outcomes that share a time, so that they count as one."""
        self._most = most
        self._overlap = overlap
        self._sorted = array("d")
        self._latest = array("d")
        """A ring; the oldest is at `_oldest` once it is full."""
        self._oldest = 0
        self.quantiles = (0.0,) * len(QUANTILES)
        """Zeros while it is empty."""

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, residual: float) -> None:
        if len(self._latest) < self._most:
            self._latest.append(residual)
        else:
            gone = self._latest[self._oldest]
            self._latest[self._oldest] = residual
            self._oldest = (self._oldest + 1) % self._most
            self._sorted.pop(bisect_left(self._sorted, gone))
        insort(self._sorted, residual)
        self.quantiles = tuple([self._quantile(quantile) for quantile in QUANTILES])

    def _quantile(self, quantile: float) -> float:
        """Further out the fewer independent residuals there are: the next one lies beyond the
        largest of n with a chance of 1 / (n + 1) (conformal prediction)."""
        count = len(self._sorted)
        if quantile < 0.5:
            quantile = max(0.0, quantile - (1 - quantile) * self._overlap / count)
        elif quantile > 0.5:
            quantile = min(1.0, quantile + quantile * self._overlap / count)
        place = quantile * (count - 1)
        below = int(place)
        low, high = self._sorted[below], self._sorted[min(below + 1, count - 1)]
        return low + (place - below) * (high - low)


class Residuals:
    """Residuals of one expert's expectations, which lie in [0, 1]."""

    def __init__(self, *, overlap: float) -> None:
        self._all = ResidualWindow(_ALL, overlap=overlap)
        self._near = tuple(ResidualWindow(_NEAR) for _ in range(_PIECES + 1))

    def add(self, residual: float, *, expected: float) -> None:
        self._all.add(residual)
        self._near[round(expected * _PIECES)].add(residual)

    def quantiles(self, expected: float) -> tuple[float, ...]:
        """Quantiles of the outcome where `expected` is the mean, each in [0, 1]."""
        place = expected * _PIECES
        left = min(int(place), _PIECES - 1)
        lower, upper = self._near[left], self._near[left + 1]
        # A knot's share falls in a line to the next knot.
        below = (left + 1 - place) * len(lower)
        above = (place - left) * len(upper)
        total = _PRIOR + below + above
        parts = zip(
            self._all.quantiles if len(self._all) else _UNKNOWN,
            lower.quantiles,
            upper.quantiles,
            strict=True,
        )
        return tuple(
            [
                min(1.0, max(0.0, expected + (_PRIOR * prior + below * low + above * high) / total))
                for prior, low, high in parts
            ]
        )
