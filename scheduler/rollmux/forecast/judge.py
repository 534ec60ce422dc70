"""Whether jobs may share a group: learned durations with their doubt, and a chance constraint on
every job's SLO."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.beliefs.slo import quantile_of
from scheduler.rollmux.beliefs.tail import TailShape
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.forecast.forecast import Occupant, Roster
from scheduler.rollmux.forecast.scenarios import (
    Horizon,
    ShortRun,
    keeps_all,
    slowdowns,
    upper_bound,
)
from scheduler.rollmux.forecast.stages import Rules

OUR_RULES = Rules(migrate=True, warm_s=5.0, migrate_s=3.0)
OUR_HORIZON = Horizon()
OUR_SHORT_RUN = ShortRun()


@dataclass(frozen=True, slots=True)
class Judge:
    rules: Rules = OUR_RULES
    horizon: Horizon = OUR_HORIZON
    short_run: ShortRun = OUR_SHORT_RUN
    risk: float = 0.25
    """Accepted probability that a job's slow-down over the forecast exceeds its SLO."""

    @property
    def quantile(self) -> float:
        return quantile_of(self.risk)

    def with_warm_start(self, seconds: float) -> "Judge":
        """The same judge with warm starts of that length, in s."""
        return replace(self, rules=self.rules._replace(warm_s=seconds))

    def belief(self, facts: JobFacts) -> Belief:
        return facts.belief()

    def tail(self, facts: JobFacts) -> TailShape:
        return facts.tail

    def slo(self, facts: JobFacts, *, now: float, delay_s: float = 0.0) -> float:
        """Largest slow-down that co-located jobs may cause; never more than the job's SLO."""
        return min(facts.account.slo, facts.slo_ahead(now, delay_s=delay_s))

    def takes_more(self, occupants: Sequence[Occupant]) -> bool:  # noqa: ARG002 - of baselines
        """Whether an existing group is considered for another job at all."""
        return True

    def admits(self, roster: Roster) -> bool:
        """Whether every job keeps its SLO."""
        short_run, horizon = self.short_run, self.horizon
        return keeps_all(roster.jobs, roster.beliefs, short_run, horizon, self.quantile, self.rules)

    def bounds(self, roster: Roster) -> Records:
        """The slow-down of each job that has to stay within its SLO."""
        found = slowdowns(roster.jobs, roster.beliefs, self.horizon, self.rules)
        return np.asarray(upper_bound(found, self.quantile))
