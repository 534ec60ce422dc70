"""How long a guest step of so many tokens takes, learned from the guest's own steps.

    T = base_s + decode_s * decodes + prefill_s * prefill_tokens,  times an upper-quantile factor

Fitted by recursive least squares with forgetting, so that other hardware, another model or longer
contexts are followed without a reset. Plain floats: the fit runs once per step and must cost
microseconds. Touches no clock; observations come with their duration.
"""

from dataclasses import dataclass, field

# Weight of a step 200 steps ago is 1/e: a few seconds of a small model, a minute of a large one.
_FORGETTING = 1.0 - 1.0 / 200.0
_INITIAL_VARIANCE = 1e3
# Bound on the covariance, so that idle directions (no prefill for hours) do not blow up.
_MAX_VARIANCE = 1e6


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
    _covariance: list[float] = field(
        default_factory=lambda: [_INITIAL_VARIANCE, 0, 0, _INITIAL_VARIANCE, 0, _INITIAL_VARIANCE]
    )

    def predict_s(self, *, decodes: int, prefill_tokens: int) -> float:
        mean = self.base_s + self.decode_s * decodes + self.prefill_s * prefill_tokens
        return self.factor * mean

    def tokens_within_s(self, budget_s: float, *, decodes: int, cap: int) -> int:
        """Largest token count of a step that fits into `budget_s`, 0 to `cap`.

        A scheduler runs its decodes first (one token each) and fills up with prefill.
        """
        left_s = budget_s / self.factor - self.base_s
        if left_s <= 0.0:
            return 0
        if left_s < self.decode_s * decodes:
            return min(cap, int(left_s / self.decode_s))
        if self.prefill_s <= 0.0:
            return cap
        return min(cap, decodes + int((left_s - self.decode_s * decodes) / self.prefill_s))

    def observe(self, *, decodes: int, prefill_tokens: int, step_s: float) -> None:
        """Fold in one step that production did not disturb."""
        x0, x1, x2 = 1.0, float(decodes), float(prefill_tokens)
        p = self._covariance
        k0 = p[0] * x0 + p[1] * x1 + p[2] * x2
        k1 = p[1] * x0 + p[3] * x1 + p[4] * x2
        k2 = p[2] * x0 + p[4] * x1 + p[5] * x2
        scale = _FORGETTING + x0 * k0 + x1 * k1 + x2 * k2
        mean = self.base_s * x0 + self.decode_s * x1 + self.prefill_s * x2
        gain = (step_s - mean) / scale
        self.base_s = max(0.0, self.base_s + gain * k0)
        self.decode_s = max(1e-9, self.decode_s + gain * k1)
        self.prefill_s = max(1e-9, self.prefill_s + gain * k2)
        inverse = 1.0 / scale
        self._covariance = [
            min(_MAX_VARIANCE, value / _FORGETTING)
            for value in (
                p[0] - k0 * k0 * inverse,
                p[1] - k0 * k1 * inverse,
                p[2] - k0 * k2 * inverse,
                p[3] - k1 * k1 * inverse,
                p[4] - k1 * k2 * inverse,
                p[5] - k2 * k2 * inverse,
            )
        ]
        self._follow_quantile(mean, step_s)
        self.samples += 1

    def _follow_quantile(self, mean_s: float, step_s: float) -> None:
        # Stochastic quantile descent: up by q when the step took longer, down by 1 - q otherwise.
        if mean_s <= 0.0:
            return
        rate = 0.05 if self.samples < 50 else 0.01
        over = step_s / mean_s > self.factor
        self.factor += rate * (self.quantile if over else self.quantile - 1.0)
        self.factor = min(4.0, max(1.0, self.factor))
