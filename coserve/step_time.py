"""How long a guest step of so many tokens takes, learned from the guest's own steps.

    T = base_s + decode_s * decodes + prefill_s * prefill_tokens,  times an upper-quantile factor

Fitted by recursive least squares with forgetting and a floor under what is known (Kreisselmeier,
1990), so that other hardware, another model or longer contexts are followed without a reset. Plain
floats: the fit runs once per step and must cost microseconds. Touches no clock; observations come
with their duration.
"""

from dataclasses import dataclass

# A like step 200 steps ago weighs 1/e: a few seconds of a small model, a minute of a large one.
_FORGETTING = 1.0 - 1.0 / 200.0
# Added with every step, so that a direction that no step has for hours (no prefill, one batch size)
# is never quite unknown: without it the fit runs away there.
_LEAST_INFORMATION = 1e-3
# One step can be slow for reasons that are no step's (a first call, a page fault); what it says
# beyond this many predictions is left out, and steps that stay slow still say it again.
_OUTLIER_RATIO = 4.0
_SHORTEST_STEP_S = 1e-4
_LEAST_S = 1e-9
_CALIBRATION_GAIN = 0.01


@dataclass(slots=True)
class StepTimeModel:
    """Online fit; `predict_s` is the `quantile` of step times, not their mean."""

    quantile: float = 0.9
    base_s: float = 0.02
    decode_s: float = 0.001
    prefill_s: float = 0.0005
    factor: float = 1.5
    """Ratio of the wanted quantile to the fitted mean."""
    samples: int = 0
    over_ratio: float = 0.1
    """Share of late steps that took longer than predicted: 1 - `quantile` if it is calibrated."""
    _information: tuple[float, float, float, float, float, float] = (0.0,) * 6
    """Upper triangle, by rows: what the steps of late told about base, decode and prefill."""

    def predict_s(self, *, decodes: int, prefill_tokens: int) -> float:
        mean = self.base_s + self.decode_s * decodes + self.prefill_s * prefill_tokens
        return self.factor * mean

    def tokens_within_s(self, budget_s: float, *, decodes: int, cap: int) -> int:
        """Largest token count of a step that fits into `budget_s`, 0 to `cap`.

        A scheduler runs its decodes first (one token each) and fills up with prefill.
        """
        left_s = budget_s / self.factor - self.base_s
        if not left_s > 0.0:
            return 0
        decodes_s = self.decode_s * decodes
        if left_s < decodes_s:
            tokens = left_s / self.decode_s
        else:
            tokens = decodes + (left_s - decodes_s) / self.prefill_s
        return cap if tokens >= cap else int(tokens)

    def observe(self, *, decodes: int, prefill_tokens: int, step_s: float) -> None:
        """Fold in one step that production did not disturb."""
        x1, x2 = float(decodes), float(prefill_tokens)
        mean = self.base_s + self.decode_s * x1 + self.prefill_s * x2
        self.over_ratio += _CALIBRATION_GAIN * ((step_s > self.factor * mean) - self.over_ratio)
        step_s = min(step_s, _OUTLIER_RATIO * self.factor * max(mean, _SHORTEST_STEP_S))
        a, b, c, d, e, f = self._information
        a = _FORGETTING * a + _LEAST_INFORMATION + 1.0
        b = _FORGETTING * b + x1
        c = _FORGETTING * c + x2
        d = _FORGETTING * d + _LEAST_INFORMATION + x1 * x1
        e = _FORGETTING * e + x1 * x2
        f = _FORGETTING * f + _LEAST_INFORMATION + x2 * x2
        self._information = (a, b, c, d, e, f)
        # The inverse by its cofactors: cheaper than a solver, and exact enough for three unknowns.
        to_base = (d * f - e * e, c * e - b * f, b * e - c * d)
        to_decode = (to_base[1], a * f - c * c, b * c - a * e)
        to_prefill = (to_base[2], to_decode[2], a * d - b * b)
        gain = (step_s - mean) / (a * to_base[0] + b * to_base[1] + c * to_base[2])
        self._shift(gain, to_base)
        self._shift(gain * x1, to_decode)
        self._shift(gain * x2, to_prefill)
        # Raised along the inverse, so that the others make up for it: raising one coefficient
        # alone would leave a fit that is off for every step.
        self._shift(max(0.0, -self.base_s) / to_base[0], to_base)
        self._shift(max(0.0, _LEAST_S - self.decode_s) / to_decode[1], to_decode)
        self._shift(max(0.0, _LEAST_S - self.prefill_s) / to_prefill[2], to_prefill)
        self.base_s = max(0.0, self.base_s)
        self.decode_s = max(_LEAST_S, self.decode_s)
        self.prefill_s = max(_LEAST_S, self.prefill_s)
        self._follow_quantile(mean, step_s)
        self.samples += 1

    def _shift(self, by: float, direction: tuple[float, float, float]) -> None:
        self.base_s += by * direction[0]
        self.decode_s += by * direction[1]
        self.prefill_s += by * direction[2]

    def _follow_quantile(self, mean_s: float, step_s: float) -> None:
        # Stochastic quantile descent: up by q when the step took longer, down by 1 - q otherwise.
        if mean_s <= 0.0:
            return
        rate = 0.05 if self.samples < 50 else 0.01
        over = step_s / mean_s > self.factor
        self.factor += rate * (self.quantile if over else self.quantile - 1.0)
        self.factor = min(4.0, max(1.0, self.factor))
