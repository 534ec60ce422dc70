"""Forecasts that ours is compared with: a recent mean, and quantiles of outcomes less this mean.

Each gets what makes a fair opponent: the exact quantiles of its own last 1,000 residuals, clipped
to what is possible, at the same times as ours, and of outcomes that have passed.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from harvester.contracts.wire.leases import IdleForecast
from harvester.policy.idle_forecast import HORIZONS_S
from harvester.policy.residuals import QUANTILES

_RESIDUALS = 1000
_LEAST_OUTCOMES = 10
_PER_HORIZON = 5


class MeanForecaster:
    def __init__(self, mean: Callable[[float], "RecentMean"]) -> None:
        """`mean` makes the mean of a horizon."""
        self._parts = [_HorizonMean(horizon_s, mean(horizon_s)) for horizon_s in HORIZONS_S]

    def observe(
        self,
        busy_s: float | None,
        *,
        now: float,
        wall_s: float,  # noqa: ARG002
    ) -> None:
        if busy_s is not None:
            for part in self._parts:
                part.observe(1.0 - busy_s, now=now)

    def forecasts(self, *, wall_s: float) -> tuple[IdleForecast, ...]:  # noqa: ARG002
        return tuple(one for part in self._parts if (one := part.forecast()) is not None)


class RecentMean:
    """An exponentially weighted mean of the last seconds."""

    def __init__(self, memory_s: float) -> None:
        self._kept = math.exp(-1.0 / memory_s)
        self._total = self._weight = 0.0

    def add(self, idle: float) -> None:
        self._total = self._kept * self._total + (1 - self._kept) * idle
        self._weight = self._kept * self._weight + (1 - self._kept)

    @property
    def value(self) -> float:
        return self._total / self._weight


class LastWindow(RecentMean):
    """The mean of the window of the horizon's length that has just passed: the last value."""

    def __init__(self, horizon_s: float) -> None:
        self._seen: deque[float] = deque(maxlen=round(horizon_s))

    def add(self, idle: float) -> None:
        self._seen.append(idle)

    @property
    def value(self) -> float:
        return sum(self._seen) / len(self._seen)


class _HorizonMean:
    def __init__(self, horizon_s: float, mean: RecentMean) -> None:
        self._horizon_s = horizon_s
        self._mean = mean
        self._idle_s = 0.0
        self._begun_s: float | None = None
        self._waiting: deque[tuple[float, float, float]] = deque()
        self._sorted: list[float] = []
        self._latest: deque[float] = deque()

    def observe(self, idle: float, *, now: float) -> None:
        self._mean.add(idle)
        self._idle_s += idle
        if self._begun_s is None:
            self._begun_s = now - 1.0
        while self._waiting and now - self._waiting[0][0] >= self._horizon_s:
            _, before_s, mean = self._waiting.popleft()
            self._learn((self._idle_s - before_s) / self._horizon_s - mean)
        due_s = self._begun_s + self._horizon_s
        if self._waiting:
            due_s = self._waiting[-1][0] + self._horizon_s / _PER_HORIZON
        if now >= due_s:
            self._waiting.append((now, self._idle_s, self._mean.value))

    def forecast(self) -> IdleForecast | None:
        count = len(self._sorted)
        if count < _LEAST_OUTCOMES:
            return None
        low, median, high = (
            min(1.0, max(0.0, self._mean.value + self._sorted[min(count - 1, int(place * count))]))
            for place in QUANTILES
        )
        return IdleForecast(
            horizon_s=self._horizon_s, low_ratio=low, median_ratio=median, high_ratio=high
        )

    def _learn(self, residual: float) -> None:
        insort(self._sorted, residual)
        self._latest.append(residual)
        if len(self._latest) > _RESIDUALS:
            self._sorted.pop(bisect_left(self._sorted, self._latest.popleft()))
