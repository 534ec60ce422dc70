"""The promise to a job: its slow-down stays within its SLO, except with a stated risk.

A forecast says what slow-down each scenario gives; the constraint holds when the mean plus a normal
quantile of their spread does not exceed the SLO. The risk is one forecast's, not that of the job's
life: a running job's credit is watched, and orders and moves answer before it is spent.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist


@dataclass(frozen=True, slots=True, kw_only=True)
class ChanceConstraint:
    risk: float = 0.25
    """Accepted probability that a job's slow-down over the forecast exceeds its SLO."""

    @property
    def quantile(self) -> float:
        """Standard deviations above the mean that stay within the SLO."""
        return _quantile(1.0 - self.risk)


@cache
def _quantile(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


@dataclass(slots=True)
class SloAccount:
    """What a job was promised and what it got, from its arrival on."""

    slo: float
    began_s: float
    solo_s: float
    """Time that the finished phases, and a cold start, would have taken alone."""

    def credit_s(self, now: float) -> float:
        """Delay that the job can still absorb, if it ended now."""
        return self.slo * self.solo_s - (now - self.began_s)
