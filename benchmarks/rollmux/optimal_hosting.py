"""The exact optimum for a few jobs: the price with known truth and free moves.

The planner's own bound over all jobs at once, until it is exact, with their true distributions and
the SLO as the only margin, kept over a long forecast. Exponential: ten jobs or so.
`PinnedPlanner` gives the jobs the hosting that was found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import JobSpec, Placement, Pool
from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.beliefs.tail import TailShape, best_shape
from scheduler.rollmux.forecast.forecast import Occupant, Roster
from scheduler.rollmux.forecast.judge import OUR_RULES, Judge
from scheduler.rollmux.forecast.scenarios import Horizon, ShortRun, keeps_all
from scheduler.rollmux.forecast.stages import Rules
from scheduler.rollmux.planner.assignments import Masks
from scheduler.rollmux.planner.cheapest_hosting import CheapestHosting, SearchedJob
from scheduler.rollmux.planner.group_table import GroupState
from scheduler.rollmux.planner.packing import Opening, OpeningKind
from scheduler.rollmux.planner.planner import GroupPlanner, PlannerConfig
from scheduler.rollmux.planner.price_floor import PriceFloor
from scheduler.rollmux.planner.verdicts import Hosting
from scheduler.sim.rollmux.workload import NODE_TYPES, PHASE_CV, ROLLOUT_ACCELERATORS, SimulatedJob

NO_SHORT_RUN: Final = ShortRun(warm_up=0.0, cycles=0.0, margin=float("inf"))
LONG_RUN: Final = Horizon(scenarios=2, cycles=100.0)
"""Eight cycles, the planner's horizon, admit groups that break an SLO by more than a per cent over
hundreds. Without doubt about means the scenarios of a forecast are equal, so two are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """A job with its true distributions: the means carry no doubt."""

    job: JobSpec
    truth: Belief
    tail: TailShape

    @classmethod
    def of(cls, one: SimulatedJob) -> "KnownJob":
        rollout_s, training_s = one.means_s
        accelerators = ROLLOUT_ACCELERATORS * one.job.phases[0].nodes
        return cls(
            job=one.job,
            truth=Belief(rollout_s, 0.0, PHASE_CV, training_s, 0.0, PHASE_CV),
            tail=best_shape(one.curve, accelerators=accelerators),
        )

    def as_searched_job(self, version: int) -> SearchedJob:
        slowest_s = self.job.slo * self.truth.iteration_s
        rollout, training = self.job.phases
        return SearchedJob(
            version,
            self.job.host_bytes,
            (
                self.truth.rollout_s * self.tail.node_ratio / slowest_s,
                self.truth.training_s / slowest_s,
            ),
            (rollout.nodes, training.nodes),
        )

    def as_occupant(self) -> Occupant:
        tail, slo = self.tail, self.job.slo
        return Occupant(0, 0, slo, self.truth, tail.bulk_ratio, tail.share)


@dataclass(frozen=True, slots=True)
class Optimum:
    jobs: Sequence[KnownJob]
    rules: Rules = OUR_RULES
    horizon: Horizon = LONG_RUN
    _search: CheapestHosting = field(default_factory=lambda: CheapestHosting(NODE_TYPES))

    def cheapest(self) -> tuple[float, list[Hosting]]:
        """The least price per hour that keeps every SLO, and the groups that have it."""
        candidates = [known.as_searched_job(at) for at, known in enumerate(self.jobs)]
        bounds = PriceFloor(self._search).bounds(candidates, self._forecast)
        if bounds is None:
            raise AssertionError("every job can be alone")
        return self._search.search(candidates, self._forecast, bounds)

    def admits(self, hosting: Hosting) -> bool:
        """Whether every job of this one group keeps its SLO, by the search's own judgement."""
        return self._search.verdicts.admitted(hosting.members, hosting, self._forecast)

    def _forecast(self, hosting: Hosting) -> bool:
        roster = Roster.of([known.as_occupant() for known in self.jobs]).hosted(*hosting)
        return keeps_all(roster.jobs, roster.beliefs, NO_SHORT_RUN, self.horizon, 0.0, self.rules)


class PinnedPlanner(GroupPlanner):
    """Places every job where a given hosting has it, and leaves it there."""

    def __init__(self, jobs: Sequence[SimulatedJob], hostings: Sequence[Hosting]) -> None:
        super().__init__(Judge(), NODE_TYPES, PlannerConfig(moves=False))
        self._pinned: dict[JobId, tuple[GroupState, Placement]] = {}
        for hosting in hostings:
            group = self.table.fresh_group()
            rollout = self._nodes(Pool.ROLLOUT, hosting.rollout)
            training = self._nodes(Pool.TRAINING, hosting.training)
            for at, member in enumerate(hosting.members):
                job = jobs[member].job.job
                placement = Placement(
                    job=job, rollout_nodes=rollout[at], training_nodes=training[at]
                )
                self._pinned[job] = (group, placement)

    def choose(self, job: JobId) -> Opening:
        group, placement = self._pinned[job]
        added_per_hour = sum(
            NODE_TYPES[pool].price_per_hour
            for pool, nodes in (
                (Pool.ROLLOUT, placement.rollout_nodes),
                (Pool.TRAINING, placement.training_nodes),
            )
            for node in nodes
            if node not in self.table.nodes
        )
        return Opening(
            kind=OpeningKind.DIRECT, group=group, placement=placement, delta_per_hour=added_per_hour
        )

    def _nodes(self, pool: Pool, masks: Masks) -> list[tuple[NodeId, ...]]:
        """The nodes of each member, a new name for each bit."""
        count = max(masks).bit_length()
        names = self.table.fresh_nodes(pool, count)
        return [tuple(name for bit, name in enumerate(names) if mask >> bit & 1) for mask in masks]
