"""How long a guest step of so many tokens takes, learned from the guest's own steps.

    T = base_s + decode_s * decodes + prefill_s * prefill_tokens
        + context_s * context_tokens / 1024,  times an upper-quantile factor

`context_tokens` is the KV that running requests hold: what a step's attention reads. Fitted online,
so that other hardware and another model are followed without a reset. Only steps that production
left alone are learned from: the time of a step beside production is reported (`beside`), and is no
part of the law, which counts how much of the accelerator a step takes and not how long it lasts.
The fit runs once per step and must cost microseconds. Touches no clock; observations come with
their duration.
"""

from dataclasses import dataclass, field

from coserve.law.calibration import CalibrationWindow
from coserve.law.least_squares import LeastSquares

CONTEXT_UNIT_TOKENS = 1024
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
    context_s: float = 0.0
    """Seconds per 1024 tokens of context."""
    factor: float = 1.5
    """Ratio of the wanted quantile to the fitted mean."""
    samples: int = 0
    over_ratio: float = 0.1
    """Share of late steps that took longer than predicted: 1 - `quantile` if it is calibrated."""
    alone: CalibrationWindow = field(default_factory=CalibrationWindow)
    beside: CalibrationWindow = field(default_factory=CalibrationWindow)
    """Calibration of steps that production overlapped, over their predicted time alone."""
    _fit: LeastSquares = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._fit = LeastSquares(self._coefficients, least=(0.0, _LEAST_S, _LEAST_S, 0.0))

    def predict_s(self, *, decodes: int, prefill_tokens: int, context_tokens: int) -> float:
        mean = self.base_s + self.decode_s * decodes + self.prefill_s * prefill_tokens
        mean += self.context_s * (context_tokens / CONTEXT_UNIT_TOKENS)
        return self.factor * mean

    def tokens_within_s(
        self, budget_s: float, *, decodes: int, context_tokens: int, cap: int
    ) -> int:
        """Largest token count of a step that fits into `budget_s`, 0 to `cap`.

        A scheduler runs its decodes first (one token each) and fills up with prefill. Fewer decodes
        than there are read less context, which is not counted on: whose they are is not known.
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
        fit = self._fit
        # Coefficients set from outside take effect.
        fit.coefficients[:] = self._coefficients
        x = (1.0, float(decodes), float(prefill_tokens), context_tokens / CONTEXT_UNIT_TOKENS)
        mean = fit.predict(x)
        self.over_ratio += _CALIBRATION_GAIN * ((step_s > self.factor * mean) - self.over_ratio)
        step_s = min(step_s, _OUTLIER_RATIO * self.factor * max(mean, _SHORTEST_STEP_S))
        fit.observe(x, step_s - mean)
        self.base_s, self.decode_s, self.prefill_s, self.context_s = fit.coefficients
        self._follow_quantile(mean, step_s)
        self.samples += 1

    @property
    def _coefficients(self) -> tuple[float, float, float, float]:
        return self.base_s, self.decode_s, self.prefill_s, self.context_s

    def _follow_quantile(self, mean_s: float, step_s: float) -> None:
        # Stochastic quantile descent: up by q when the step took longer, down by 1 - q otherwise.
        if mean_s <= 0.0:
            return
        rate = 0.05 if self.samples < 50 else 0.01
        over = step_s / mean_s > self.factor
        self.factor += rate * (self.quantile if over else self.quantile - 1.0)
        self.factor = min(4.0, max(1.0, self.factor))
