"""Production's own step times, alone, as its pulse reports them.

Upper quantiles of the observations in a sliding window:

    T_prefill(n) = prefill_base + prefill_per_token * n    from requests that waited for no other
    T_decode(b)  = decode_base  + decode_per_request * b   from steps without a prefill in them

Fed only from times in which the grant was closed: a model that learned from steps beside a guest
would call them normal, and let the next ones be a little later still.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coserve.law.step_time import CalibrationWindow
from harvester.contracts.page import ProductionModel

_WINDOW = 512
_MIN_SAMPLES = 20


@dataclass(slots=True)
class ProductionTime:
    quantile: float = 0.9
    prefills: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """(computed prompt tokens, seconds)"""
    decodes: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """(requests in the batch, seconds)"""
    samples: int = 0
    model: ProductionModel = field(default_factory=ProductionModel)
    """The last fit; zeros until there are enough observations."""
    prefill_calibration: CalibrationWindow = field(default_factory=CalibrationWindow)
    decode_calibration: CalibrationWindow = field(default_factory=CalibrationWindow)

    @property
    def learned(self) -> int:
        """Steps behind the model; while one of its halves is unknown, that half's."""
        least = min(len(self.prefills), len(self.decodes))
        return least if least < _MIN_SAMPLES else self.samples

    def observe_prefill(self, *, tokens: int, seconds: float) -> None:
        predicted_s = self.model.prefill_s(tokens)
        self.prefill_calibration.observe(predicted_s=predicted_s, step_s=seconds)
        self.prefills.append((tokens, seconds))
        self.samples += 1

    def observe_decode(self, *, requests: int, seconds: float) -> None:
        predicted_s = self.model.decode_s(requests)
        self.decode_calibration.observe(predicted_s=predicted_s, step_s=seconds)
        self.decodes.append((requests, seconds))
        self.samples += 1

    def fit(self) -> ProductionModel:
        """Renew the model."""
        prefill_base, prefill_slope = upper_line(list(self.prefills), self.quantile)
        decode_base, decode_slope = upper_line(list(self.decodes), self.quantile)
        self.model = ProductionModel(
            prefill_base_s=prefill_base,
            prefill_s_per_token=prefill_slope,
            decode_base_s=decode_base,
            decode_s_per_request=decode_slope,
        )
        return self.model


def upper_line(points: list[tuple[int, float]], quantile: float) -> tuple[float, float]:
    """(intercept >= 0, slope >= 0) of the least-squares line with these signs, scaled so that
    `quantile` of the points lie below.

    Both are 0 when there are too few points to say anything.
    """
    if len(points) < _MIN_SAMPLES:
        return 0.0, 0.0
    xy: npt.NDArray[np.float64] = np.asarray(points, dtype=np.float64)
    x, y = xy[:, 0], xy[:, 1]
    spread = float(x.var())
    slope = 0.0
    if spread > 0.0:
        slope = max(0.0, float(((x - x.mean()) * (y - y.mean())).mean()) / spread)
    intercept = float(y.mean()) - slope * float(x.mean())
    if intercept < 0.0:
        # Attention grows faster than the prompt. Only through the origin, since the same slope
        # would call short prompts slower than any was.
        intercept, slope = 0.0, float((x * y).mean()) / float((x * x).mean())
    fitted = np.maximum(intercept + slope * x, 1e-9)
    factor = max(1.0, float(np.quantile(y / fitted, quantile)))
    return intercept * factor, slope * factor
