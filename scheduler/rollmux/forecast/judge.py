"""Whether a set of jobs may share a group: the rules of the two planners.

`WorstCase` is RollMux: durations at the token limit, a few meta-iterations of them with tails that
move, groups at or over their cycle left alone. `Distributional` is ours: learned durations with
their doubt, a chance constraint on every job's SLO. Both forecast first come, first served, the
order of the runtime.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from scheduler.rollmux.beliefs.durations import Belief, worst_case
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.beliefs.slo import ChanceConstraint
from scheduler.rollmux.beliefs.tail import TailShape
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.forecast.forecast import (
    Glance,
    Horizon,
    Occupant,
    Roster,
    keeps_all,
    slowdowns,
)
from scheduler.rollmux.forecast.load import group_load
from scheduler.rollmux.forecast.scenarios import ROUNDING, upper_bound
from scheduler.rollmux.forecast.stages import Rules

PAPER_PLAN = Rules(migrate=True, warm_s=0.0, migrate_s=3.0)
"""Rules that Algorithm 1 simulates, without the price of switching."""
PAPER_RULES = Rules(migrate=True, warm_s=5.0, migrate_s=3.0)
"""Rules of RollMux's runtime."""
OUR_RULES = Rules(migrate=True, warm_s=5.0, migrate_s=3.0)
PAPER_TAIL = TailShape(bulk_ratio=0.5, share=0.25)
"""The last 20 % of the responses take half of the rollout, on 2 of 8 accelerators."""
PAPER_HORIZON = Horizon(scenarios=1, warm_up=3.0, cycles=6.0)
OUR_HORIZON = Horizon()


class Judge(Protocol):
    def with_warm_start(self, seconds: float) -> "Judge":
        """The same judge with warm starts of that length, in s."""
        ...

    def belief(self, facts: JobFacts) -> Belief: ...

    def tail(self, facts: JobFacts) -> TailShape: ...

    def slo(self, facts: JobFacts, *, now: float) -> float:
        """Slow-down that the others in a group must leave the job; never more than its SLO."""
        ...

    def takes_more(self, occupants: Sequence[Occupant]) -> bool:
        """Whether an existing group is considered for another job at all."""
        ...

    def admits(self, roster: Roster) -> bool:
        """Whether every job keeps its SLO."""
        ...

    def bounds(self, roster: Roster) -> Records:
        """The slow-down of each job that has to stay within its SLO."""
        ...


@dataclass(frozen=True, slots=True)
class WorstCase:
    rules: Rules = PAPER_PLAN
    horizon: Horizon = PAPER_HORIZON

    def with_warm_start(self, seconds: float) -> "WorstCase":  # noqa: ARG002 - the protocol's
        """Algorithm 1 counts no price of switching."""
        return self

    planned_tail: TailShape = PAPER_TAIL

    def belief(self, facts: JobFacts) -> Belief:
        return worst_case(facts.job)

    def tail(self, facts: JobFacts) -> TailShape:  # noqa: ARG002 - the protocol's
        return self.planned_tail

    def slo(self, facts: JobFacts, *, now: float) -> float:  # noqa: ARG002 - the protocol's
        return facts.account.slo

    def takes_more(self, occupants: Sequence[Occupant]) -> bool:
        return not group_load(occupants, tails_move=self.rules.migrate).saturated

    def admits(self, roster: Roster) -> bool:
        return bool((self.bounds(roster) <= roster.slos + ROUNDING).all())

    def bounds(self, roster: Roster) -> Records:
        return np.asarray(slowdowns(roster, rules=self.rules, horizon=self.horizon)[0])


@dataclass(frozen=True, slots=True)
class Distributional:
    rules: Rules = OUR_RULES
    horizon: Horizon = OUR_HORIZON
    glance: Glance = field(default_factory=Glance)
    constraint: ChanceConstraint = field(default_factory=ChanceConstraint)

    def with_warm_start(self, seconds: float) -> "Distributional":
        return replace(self, rules=self.rules._replace(warm_s=seconds))

    def belief(self, facts: JobFacts) -> Belief:
        return facts.belief()

    def tail(self, facts: JobFacts) -> TailShape:
        return facts.tail

    def slo(self, facts: JobFacts, *, now: float) -> float:
        return min(facts.account.slo, facts.slo_ahead(now))

    def takes_more(self, occupants: Sequence[Occupant]) -> bool:  # noqa: ARG002
        return True

    def admits(self, roster: Roster) -> bool:
        return keeps_all(
            roster,
            rules=self.rules,
            horizon=self.horizon,
            glance=self.glance,
            quantile=self.constraint.quantile,
        )

    def bounds(self, roster: Roster) -> Records:
        found = slowdowns(roster, rules=self.rules, horizon=self.horizon)
        return np.asarray(upper_bound(found, self.constraint.quantile))
