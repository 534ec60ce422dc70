"""The exact optimum for a few jobs: the price for who knows the truth and moves for free.

The planner's own bound over all jobs at once, until it is exact, with their true distributions and
the SLO as the only margin. Ten jobs or so.
"""

from dataclasses import dataclass, field

from scheduler.policy.groups.durations import Belief
from scheduler.policy.groups.forecast import NO_GLANCE, Horizon, Occupant, Roster, keeps_all
from scheduler.policy.groups.judge import OUR_RULES
from scheduler.policy.groups.price_floor import PriceFloor
from scheduler.policy.groups.regrouping import CheapestHosting, Guest
from scheduler.policy.groups.stages import Rules
from scheduler.policy.groups.tail import TailShape
from scheduler.policy.model import Job
from scheduler.sim.rollmux.workload import NODE_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """A job with its true distributions: the means carry no doubt."""

    job: Job
    truth: Belief
    tail: TailShape

    def as_guest(self, version: int) -> Guest:
        slowest_s = self.job.slowdown_slo * self.truth.iteration_s
        return Guest(
            version,
            self.job.host_bytes_per_node,
            self.truth.rollout_s * self.tail.node_ratio / slowest_s,
            self.truth.training_s / slowest_s,
        )


@dataclass(frozen=True, slots=True)
class Optimum:
    jobs: list[KnownJob]
    rules: Rules = OUR_RULES
    horizon: Horizon = field(default_factory=Horizon)

    def price_per_hour(self) -> float:
        guests = [known.as_guest(at) for at, known in enumerate(self.jobs)]
        roster = Roster.of(
            [
                Occupant(
                    0,
                    0,
                    known.job.slowdown_slo,
                    known.truth,
                    known.tail.bulk_ratio,
                    known.tail.share,
                )
                for known in self.jobs
            ]
        )
        price = PriceFloor(CheapestHosting(NODE_TYPES)).cheapest(
            guests, lambda hosting: self._admits(roster.hosted(*hosting))
        )
        if price is None:
            raise AssertionError("every job can be alone")
        return price

    def _admits(self, roster: Roster) -> bool:
        return keeps_all(
            roster, rules=self.rules, horizon=self.horizon, glance=NO_GLANCE, quantile=0.0
        )
