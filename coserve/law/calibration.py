"""Calibration of predicted step times: observed over predicted.

Each step is compared with the model in force when it ran, never with one that has learned from it.
For a model of the P90, a tenth of the steps take longer than predicted and the P90 of the ratio is
1; above 1 production is slower than the slack law believes, below it harvesting leaves time unused.
Reads no clock.
"""

from collections import deque

import numpy as np

from harvester.contracts.page import Calibration

_WINDOW = 512


class CalibrationWindow:
    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_WINDOW)

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
