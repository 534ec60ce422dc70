"""How long a guest step of so many tokens takes, learned from the guest's own steps.

    T = base_s + decode_s * decodes + prefill_s * prefill_tokens
        + context_s * context_tokens / 1024,  times an upper-quantile factor

`context_tokens` is the KV that running requests hold: what a step's attention reads. Fitted online
by relative errors, so that other hardware and another model are followed without a reset: some
steps of a second (the first of each shape, a stopped machine) weigh no more than as many of 5 ms,
and the prediction is right again a few steps later. The factor is the quantile of the latest 64
steps over their means, so that a machine that became slower shows within eight of them.

Only steps that production left alone are learned from: the time of a step beside production is
reported (`beside`), and is no part of the law, which counts how much of the accelerator a step
takes and not how long it lasts.
Learning runs once per step and must cost microseconds: once the law is known it is fitted for
many steps at a time, while the quantile follows every step. Touches no clock; observations come
with their duration.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from harvester.contracts.page import Calibration

CONTEXT_UNIT_TOKENS = 1024
_SHORTEST_STEP_S = 1e-4
_QUANTILE_STEPS = 64
# The prior's weight in steps: a single slow first step decides nothing yet.
_PRIOR_STEPS = 20
_LEAST_S = 1e-9
_OVER_GAIN = 0.01
_CALIBRATION_WINDOW = 512
_FITTED_EACH = 50
_FITTED_TOGETHER, _FITTED_S = 128, 0.5
"""Most steps of one fit after the first `_FITTED_EACH`, and the time in s that they take in all: a
step empties the caches, and a fit out of memory takes 0.1 to 0.2 ms."""
# An observation 200 ago weighs 1/e.
_FORGETTING = 1.0 - 1.0 / 200.0
_LEAST_INFORMATION = 1e-3
"""Information added with every observation, in every direction, as a share of the observation's."""


class CalibrationWindow:
    """Calibration of predicted step times: observed over predicted.

    Each step is compared with the model in force when it ran, never with a model that has learned
    from it. For a model of the P90, a tenth of the steps take longer than predicted and the P90 of
    the ratio is 1; above 1 production is slower than the slack law believes, below it harvesting
    leaves time unused.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_CALIBRATION_WINDOW)

    def observe(self, *, predicted_s: float, step_s: float) -> None:
        """Record a step. Ignores predictions of 0 s."""
        if predicted_s > 0.0:
            self._ratios.append(step_s / predicted_s)

    def summary(self) -> Calibration:
        if not self._ratios:
            return Calibration()
        ratios = np.asarray(self._ratios)
        p50, p90, p99 = np.quantile(ratios, (0.5, 0.9, 0.99))
        return Calibration(
            steps=len(ratios),
            over_ratio=float((ratios > 1.0).mean()),
            p50_ratio=float(p50),
            p90_ratio=float(p90),
            p99_ratio=float(p99),
        )


class LeastSquares:
    """Coefficients of a linear law with the least squares of relative errors, from one observation
    or a few at a time.

    Recursive least squares with forgetting and a floor under the information (Kreisselmeier, 1990):
    changes are followed without a reset, and a direction without observations for hours keeps some
    information, without which the fit would diverge there. No coefficient falls below its minimum:
    the others are the best beside it.
    """

    def __init__(self, *, least: Sequence[float]) -> None:
        self._least = np.asarray(least)
        self._at_least = np.array(list(product((True, False), repeat=len(least))))
        self._floor = _LEAST_INFORMATION * np.eye(len(least))
        self._information = np.zeros_like(self._floor)

    def updated(
        self,
        coefficients: Sequence[float],
        points: Sequence[Sequence[float]],
        values: Sequence[float],
    ) -> list[float]:
        """The coefficients after some observations, oldest first; every value is positive."""
        x, y, count = np.asarray(points), np.asarray(values), len(points)
        residuals = y - x @ np.asarray(coefficients)
        weights = _FORGETTING ** np.arange(count - 1, -1, -1.0) / (y * y)
        weighted = x * weights[:, None]
        self._information = _FORGETTING**count * self._information + x.T @ weighted
        self._information += weights.sum() * self._floor
        information = self._information
        found = np.asarray(coefficients) + np.linalg.solve(information, weighted.T @ residuals)
        if (found < self._least).any():
            return self._bounded(found)
        unbounded: list[float] = found.tolist()
        return unbounded

    def _bounded(self, best: np.ndarray) -> list[float]:
        """The coefficients at or above their minima with the least squares; `best` without minima.

        Solves with every subset of the coefficients held at its minimum, and takes the best.
        Holding one coefficient after the other may end at values that no observation supports."""
        systems = np.where(self._at_least[:, :, None], np.eye(len(best)), self._information)
        sides = np.where(self._at_least, self._least, self._information @ best)
        solved = np.linalg.solve(systems, sides[:, :, None])[:, :, 0]
        solved = np.where(self._at_least, self._least, solved)
        feasible = solved[(solved >= self._least).all(axis=1)]
        aside = feasible - best
        squares = ((aside @ self._information) * aside).sum(axis=1)
        bounded: list[float] = feasible[squares.argmin()].tolist()
        return bounded


@dataclass(slots=True)
class StepTimeModel:
    """Online fit; `predict_s` is the `quantile` of step times, not their mean."""

    quantile: float = 0.9
    base_s: float = 0.02
    decode_s: float = 0.001
    prefill_s: float = 0.0005
    context_s: float = 0.0
    """Seconds per 1024 tokens of context."""
    factor: float = 1.5
    """Ratio of the target quantile to the fitted mean."""
    samples: int = 0
    over_ratio: float = 0.1
    """Share of late steps that took longer than predicted: 1 - `quantile` if it is calibrated."""
    alone: CalibrationWindow = field(default_factory=CalibrationWindow)
    beside: CalibrationWindow = field(default_factory=CalibrationWindow)
    """Calibration of steps that production overlapped, over their predicted time alone."""
    _fit: LeastSquares = field(
        default_factory=lambda: LeastSquares(least=(0.0, _LEAST_S, _LEAST_S, 0.0)), repr=False
    )
    _points: list[tuple[float, ...]] = field(default_factory=list, repr=False)
    """Steps that are not fitted yet, with their times."""
    _values: list[float] = field(default_factory=list, repr=False)
    _together_s: float = field(default=0.0, repr=False)
    """Sum of `_values`."""
    _ratios: deque[float] = field(init=False, repr=False)
    """The latest step times over their means."""
    _ordered: list[float] = field(init=False, repr=False)
    """`_ratios` in ascending order."""

    def __post_init__(self) -> None:
        self._ratios = deque([self.factor] * _PRIOR_STEPS)
        self._ordered = list(self._ratios)

    def predict_s(self, *, decodes: int, prefill_tokens: int, context_tokens: int) -> float:
        mean = self.base_s + self.decode_s * decodes + self.prefill_s * prefill_tokens
        mean += self.context_s * (context_tokens / CONTEXT_UNIT_TOKENS)
        return self.factor * mean

    def tokens_within_s(
        self, budget_s: float, *, decodes: int, context_tokens: int, cap: int
    ) -> int:
        """Largest token count of a step that fits into `budget_s`, 0 to `cap`.

        A scheduler runs its decodes first (one token each) and fills up with prefill. The whole
        context counts, because the decodes that will run are not known.
        """
        left_s = budget_s / self.factor - self.base_s
        left_s -= self.context_s * (context_tokens / CONTEXT_UNIT_TOKENS)
        if not left_s > 0.0:
            return 0
        decodes_s = self.decode_s * decodes
        if left_s < decodes_s:
            tokens = left_s / self.decode_s
        else:
            tokens = decodes + (left_s - decodes_s) / self.prefill_s
        return cap if tokens >= cap else int(tokens)

    def observe(
        self, *, decodes: int, prefill_tokens: int, context_tokens: int, step_s: float
    ) -> None:
        """Fold in one step that production did not disturb."""
        predicted_s = self.predict_s(
            decodes=decodes, prefill_tokens=prefill_tokens, context_tokens=context_tokens
        )
        mean_s = predicted_s / self.factor
        self.over_ratio += _OVER_GAIN * ((step_s > predicted_s) - self.over_ratio)
        step_s = max(step_s, _SHORTEST_STEP_S)
        self._points.append((1.0, decodes, prefill_tokens, context_tokens / CONTEXT_UNIT_TOKENS))
        self._values.append(step_s)
        self._together_s += step_s
        together = 1 if self.samples < _FITTED_EACH else _FITTED_TOGETHER
        if len(self._points) >= together or self._together_s >= _FITTED_S:
            self._fit_together()
        ratio = step_s / max(mean_s, _SHORTEST_STEP_S)
        self._ratios.append(ratio)
        insort(self._ordered, ratio)
        if len(self._ratios) > _QUANTILE_STEPS:
            del self._ordered[bisect_left(self._ordered, self._ratios.popleft())]
        # The rank makes the factor cover the next step as often as the quantile says.
        rank = math.ceil(self.quantile * (len(self._ratios) + 1))
        self.factor = max(1.0, self._ordered[min(rank, len(self._ratios)) - 1])
        self.samples += 1

    def _fit_together(self) -> None:
        before = self.base_s, self.decode_s, self.prefill_s, self.context_s
        after = self._fit.updated(before, self._points, self._values)
        self.base_s, self.decode_s, self.prefill_s, self.context_s = after
        self._points.clear()
        self._values.clear()
        self._together_s = 0.0
