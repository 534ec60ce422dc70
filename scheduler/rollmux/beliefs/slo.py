"""The promise to a job: its slow-down stays within its SLO, except with a stated risk.

A forecast says what slow-down each scenario gives; the constraint holds when the mean plus a normal
quantile of their spread does not exceed the SLO. The risk is one forecast's, not that of the job's
life: asked again it errs again the same way, for as long as the group stays as it is. So what a
forecast has to keep over the time ahead follows the job's credit, up and down: who has more than
its reserve may spend it, who has less is owed the rest, and what was forecast wrongly is found out
while the credit still pays for an answer. What a forecast of a few iterations cannot show, a turn
that others run over by a little or a switch that comes too late, has to be paid for by credit that
is there or soon will be; who has none of it lives on nodes of its own.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Final

SPEND_OVER_S: Final = 6 * 3600.0
"""Over which a job may spend what it has beyond its reserve."""
RECOVER_OVER_S: Final = 1.5 * 3600.0
"""Over which it is owed what it lacks: well before the reserve is gone, nobody may disturb it."""
RESERVE_ITERATIONS: Final = 1.5
"""Credit kept, in iterations: what a move costs beside the iteration that it waits for."""
RESERVE_OF_EARNED: Final = 0.5
"""Most of it, of what the job would have alone: a young job cannot have kept anything yet."""
SURPRISE_ITERATIONS: Final = 0.5
"""What company may cost a job unforeseen between two reviews, in iterations: it comes at any moment
of the job's cycle, and first come, first served nobody spares the job the first wait for it."""
REGAIN_ITERATIONS: Final = 3.0
"""Alone for so long, about the time between two reviews, a job has to regain what that cost. A job
that drifts is not expected to: a forecast that errs for what moves errs again the same way."""
NOBODY_BESIDE: Final = 0.0
"""Slow-down ahead of a job that may share no node: no company leaves it that much."""


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
    """What a job was promised and what it got since `began_s`."""

    slo: float
    began_s: float
    """Its placement, or its submission where an SLO counts queueing."""
    solo_s: float
    """Time that the finished phases, and a cold start, would have taken alone."""

    def credit_s(self, now: float) -> float:
        """Delay that the job can still absorb, if it ended now."""
        return self.slo * self.solo_s - (now - self.began_s)

    def needs_own_nodes(
        self, now: float, *, iteration_s: float, under_way_s: float, drifts: bool
    ) -> bool:
        """Whether a surprise would cost more than the job has and would soon regain alone.

        `under_way_s` of the time that passed may be work that has not ended, and is no delay.
        """
        settled_s = self.credit_s(now) + under_way_s
        regained = 0.0 if drifts else (self.slo - 1.0) * REGAIN_ITERATIONS
        return settled_s < (SURPRISE_ITERATIONS - regained) * iteration_s

    def slo_ahead(
        self, now: float, *, iteration_s: float, under_way_s: float = 0.0, drifts: bool = False
    ) -> float:
        """Slow-down over the time ahead that brings the credit to its reserve; at least 1.

        NOBODY_BESIDE where that is on nodes of its own only.
        """
        if self.needs_own_nodes(
            now, iteration_s=iteration_s, under_way_s=under_way_s, drifts=drifts
        ):
            return NOBODY_BESIDE
        earned_s = (self.slo - 1.0) * self.solo_s
        reserve_s = min(RESERVE_ITERATIONS * iteration_s, RESERVE_OF_EARNED * earned_s)
        spare_s = self.credit_s(now) - reserve_s
        over_s = SPEND_OVER_S if spare_s > 0.0 else RECOVER_OVER_S
        return max(1.0, self.slo + spare_s / over_s)
