"""Mixes the quantiles of several experts, and holds each quantile to its frequency.

weight   loss that following the expert would have saved lately, over the squares of these savings
         (ML-Poly of Gaillard, Stoltz and van Erven, 2014: no rate to tune, and the mixture is
         in the long run as good as the best fixed one)
offset   moves up with each outcome above the quantile and down with each below, so that a
         quantile is missed as often as it says on any sequence (Gibbs and Candes, 2021)
"""

from collections.abc import Sequence

from harvester.policy.residuals import QUANTILES

_KEPT = 0.998
"""Share of an expert's record that each outcome leaves: it rests on the last 500, a quarter of an
hour for the shortest horizon and a working day for the longest. A slot's load changes its kind in
hours."""
_OFFSET_RATIO = 0.02
"""Step of the offset, as a share of the usual error. Outcomes overlap five times, so a miss is five
in a row: a tenth of the usual error each time, which chance moves by less than a fifth of it."""
_ERROR_WEIGHT = 0.02

Quantiles = Sequence[float]
Predictions = Sequence[Quantiles | None]


class ExpertMixture:
    def __init__(self, experts: int, *, trusted: int) -> None:
        """The first `trusted` experts count alike before anything is known; the others only once
        they have shown what they save."""
        self._trusted = trusted
        self._savings = [[0.0] * experts for _ in QUANTILES]
        self._squares = [[0.0] * experts for _ in QUANTILES]
        self._offsets = [0.0] * len(QUANTILES)
        self._error = 0.1

    def mix(self, predictions: Predictions) -> tuple[float, ...]:
        """`predictions`: one of each expert, None if it has none now; the trusted have one."""
        return tuple([self._mixed(place, predictions) for place in range(len(QUANTILES))])

    def calibrated(self, mixed: Quantiles) -> tuple[float, ...]:
        shifted = (one + offset for one, offset in zip(mixed, self._offsets, strict=True))
        return tuple(sorted(min(1.0, max(0.0, one)) for one in shifted))

    def observe(self, predictions: Predictions, mixed: Quantiles, outcome: float) -> None:
        """Learns from an outcome: `mixed` was made of `predictions`."""
        final = self.calibrated(mixed)
        for place, quantile in enumerate(QUANTILES):
            slope = _slope(mixed[place], outcome, quantile)
            savings, squares = self._savings[place], self._squares[place]
            for expert, own in enumerate(predictions):
                savings[expert] *= _KEPT
                squares[expert] *= _KEPT
                if own is not None and slope:
                    saved = slope * (mixed[place] - own[place])
                    savings[expert] += saved
                    squares[expert] += saved * saved
            miss = _slope(final[place], outcome, quantile)
            self._offsets[place] -= _OFFSET_RATIO * self._error * miss
        self._error += _ERROR_WEIGHT * (abs(outcome - final[len(final) // 2]) - self._error)

    def _mixed(self, place: int, predictions: Predictions) -> float:
        savings, squares = self._savings[place], self._squares[place]
        total = weights = plain = 0.0
        count = 0
        for expert, own in enumerate(predictions):
            if own is None:
                continue
            weight = max(0.0, savings[expert]) / (squares[expert] or 1.0)
            weights += weight
            total += weight * own[place]
            if expert < self._trusted:
                plain += own[place]
                count += 1
        return total / weights if weights > 0 else plain / count


def _slope(forecast: float, outcome: float, quantile: float) -> float:
    """Slope of the pinball loss at the forecast; 0 where it was met exactly."""
    if forecast == outcome:
        return 0.0
    return (1.0 if outcome < forecast else 0.0) - quantile
