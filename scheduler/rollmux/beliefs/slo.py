"""The SLO of a job: its slow-down stays within a bound, except with a stated risk.

A forecast says what slow-down each scenario gives; the constraint holds when the mean plus a normal
quantile of their spread does not exceed the SLO. The risk is one forecast's, not that of the job's
life: repeated forecasts err the same way for as long as the group stays as it is. The bound of a
forecast therefore follows the job's credit, up and down. A job with more credit than its reserve
may spend the excess; a job with less gets a tighter bound, so that a wrong forecast leads to a move
while the job still has the credit for one. A forecast of a few iterations does not show some costs
(a phase that others overrun slightly, a switch that comes too late). Credit must cover them,
present or soon to come; a job without credit gets dedicated nodes.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Final

SPEND_OVER_S: Final = 6 * 3600.0
"""Time over which a job may spend its credit beyond the reserve, in s."""
RECOVER_OVER_S: Final = 1.5 * 3600.0
"""Time over which a job regains its missing reserve, in s: short, so that the reserve lasts."""
RESERVE_ITERATIONS: Final = 1.5
"""Credit kept in reserve, in iterations: cost of a move beside the iteration that it waits for."""
RESERVE_OF_EARNED: Final = 0.5
"""Cap on the reserve, as a share of the credit that the job would have earned alone."""
SURPRISE_ITERATIONS: Final = 0.5
"""Unforeseen cost of company between two reviews, in the job's iterations: company comes at any
moment of its cycle, and first come, first served makes the job wait once."""
REGAIN_ITERATIONS: Final = 3.0
"""Iterations alone, about the time between two reviews, in which a job has to regain a surprise's
cost. A job that drifts is not expected to: its forecast errs again the same way."""
_LEAST_S: Final = 1e-3
"""Least time alone, in s: slow-downs are over it."""
NEEDS_DEDICATED_NODES: Final = 0.0
"""The SLO of a job that needs dedicated nodes: no shared node can keep it."""


@cache
def quantile_of(risk: float) -> float:
    """Standard deviations above the mean that stay within the SLO, at an accepted risk."""
    return NormalDist().inv_cdf(1.0 - risk)


@dataclass(slots=True)
class SloProgress:
    """A job's SLO and its progress since `began_s`."""

    slo: float
    began_s: float
    """Time of the placement, or of the submission if an SLO counts queueing."""
    solo_s: float
    """Time that the finished phases, and a cold start, would have taken alone."""

    def credit_s(self, now: float) -> float:
        """Delay that the job can still absorb, if it ended now."""
        return self.slo * self.solo_s - (now - self.began_s)

    def take_back(self, seconds: float) -> None:
        """Takes back time that was counted as alone and was none."""
        self.solo_s = max(0.0, self.solo_s - max(0.0, seconds))

    def slowdown(self, passed_s: float) -> float:
        """Time passed over the time alone, which may all have been taken back."""
        return max(0.0, passed_s) / max(self.solo_s, _LEAST_S)

    def slo_ahead(
        self, now: float, *, iteration_s: float, under_way_s: float = 0.0, drifts: bool = False
    ) -> float:
        """Slow-down over the time ahead that brings the credit to its reserve; at least 1.

        NEEDS_DEDICATED_NODES if a surprise would cost more than the job's credit plus what it soon
        regains alone. `under_way_s` of the elapsed time may be work that has not ended; it counts
        as no delay.
        """
        settled_s = self.credit_s(now) + under_way_s
        regained = 0.0 if drifts else (self.slo - 1.0) * REGAIN_ITERATIONS
        if settled_s < (SURPRISE_ITERATIONS - regained) * iteration_s:
            return NEEDS_DEDICATED_NODES
        earned_s = (self.slo - 1.0) * self.solo_s
        reserve_s = min(RESERVE_ITERATIONS * iteration_s, RESERVE_OF_EARNED * earned_s)
        spare_s = self.credit_s(now) - reserve_s
        over_s = SPEND_OVER_S if spare_s > 0.0 else RECOVER_OVER_S
        return max(1.0, self.slo + spare_s / over_s)
