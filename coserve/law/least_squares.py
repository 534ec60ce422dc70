"""Coefficients of a linear law, from one observation at a time.

Recursive least squares with forgetting and a floor under the information (Kreisselmeier, 1990):
changes are followed without a reset, and a direction without observations for hours keeps some
information, without which the fit would diverge there. No coefficient falls below its minimum.
Plain floats: for four coefficients one observation costs some ten microseconds. Reads no clock.
"""

from collections.abc import Sequence

# An observation 200 ago weighs 1/e.
_FORGETTING = 1.0 - 1.0 / 200.0
_LEAST_INFORMATION = 1e-3
"""Information added with every observation, in every direction."""


class LeastSquares:
    def __init__(self, coefficients: Sequence[float], *, least: Sequence[float]) -> None:
        self.coefficients = list(coefficients)
        self._least = tuple(least)
        size = len(self.coefficients)
        self._places = range(size)
        self._information = [[0.0] * (place + 1) for place in self._places]
        """Information matrix of recent observations; the lower triangle, by rows."""

    def predict(self, x: Sequence[float]) -> float:
        return sum([each * value for each, value in zip(self.coefficients, x, strict=True)])

    def observe(self, x: Sequence[float], residual: float) -> None:
        """Update the fit. `residual` is the observed value less the prediction for `x`."""
        for place, row in enumerate(self._information):
            of_place = x[place]
            for other in range(place):
                row[other] = _FORGETTING * row[other] + of_place * x[other]
            row[place] = _FORGETTING * row[place] + of_place * of_place + _LEAST_INFORMATION
        factor = _factor(self._information)
        self._shift(residual, _solved(factor, x))
        for place, least in enumerate(self._least):
            if self.coefficients[place] < least:
                # Raised along the inverse, so that the other coefficients compensate: raising one
                # alone would bias the fit for every observation.
                unit = [1.0 if other == place else 0.0 for other in self._places]
                direction = _solved(factor, unit)
                self._shift((least - self.coefficients[place]) / direction[place], direction)
        # Compensation may have pushed another coefficient below its minimum.
        for place, least in enumerate(self._least):
            self.coefficients[place] = max(least, self.coefficients[place])

    def _shift(self, by: float, direction: Sequence[float]) -> None:
        for place in self._places:
            self.coefficients[place] += by * direction[place]


def _factor(matrix: list[list[float]]) -> list[list[float]]:
    """L and D of a positive definite matrix L D L', D on the diagonal."""
    factor: list[list[float]] = []
    for place, row in enumerate(matrix):
        new = row.copy()
        for other in range(place):
            before = factor[other]
            new[other] -= sum([new[k] * before[k] for k in range(other)])
        for other in range(place):
            scaled = new[other] / factor[other][other]
            new[place] -= scaled * new[other]
            new[other] = scaled
        factor.append(new)
    return factor


def _solved(factor: list[list[float]], x: Sequence[float]) -> list[float]:
    found = list(x)
    size = len(found)
    for place in range(size):
        row = factor[place]
        for other in range(place):
            found[place] -= row[other] * found[other]
    for place in range(size):
        found[place] /= factor[place][place]
    for place in range(size - 1, -1, -1):
        for other in range(place + 1, size):
            found[place] -= factor[other][place] * found[other]
    return found
