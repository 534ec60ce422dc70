"""Costs of other planners for the same jobs.

Solo-D, veRL and Gavel+ never share a node, so their cost is a sum and needs no events. Random and
Greedy pack without regard to SLOs; they keep our limits on memory and group size, and run each
group first come, first served, with tails that move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from harvester.contracts.ids import JobId
from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.beliefs.tail import TailShape
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.forecast.forecast import Occupant, Roster, group_load
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.forecast.scenarios import ROUNDING, Horizon, slowdowns
from scheduler.rollmux.forecast.stages import Rules
from scheduler.rollmux.planner.packing import Opening, OpeningKind, PackingLimits
from scheduler.rollmux.planner.planner import GroupPlanner, PlannerConfig
from scheduler.sim.rollmux.workload import (
    H20_PER_HOUR,
    H800_PER_HOUR,
    NODE_TYPES,
    SimulatedJob,
    World,
)

VERL_SLOWDOWN: Final = 1.02
"""Iteration time on H800 alone, over Solo-D's, with as many of them as Solo-D trains on."""
UNLIMITED: Final = 10**6
_LEFT_ALONE: Final = PlannerConfig(moves=False)
"""Jobs stay where they were placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshared:
    """A baseline without shared nodes."""

    dollars: float
    attained: int


def _disaggregated_per_hour(one: SimulatedJob) -> float:
    rollout, training = one.job.phases
    return rollout.nodes * H20_PER_HOUR + training.nodes * H800_PER_HOUR


def _colocated_per_hour(one: SimulatedJob) -> float:
    return one.job.phases[1].nodes * H800_PER_HOUR


def _colocated_s(one: SimulatedJob, world: World) -> float:
    return world.cold_start_s + VERL_SLOWDOWN * (one.solo_s(world) - world.cold_start_s)


def solo_d(jobs: list[SimulatedJob], world: World) -> Unshared:
    """Every job on its own rollout and training nodes."""
    dollars = sum(one.solo_s(world) * _disaggregated_per_hour(one) for one in jobs) / 3600
    return Unshared(dollars=dollars, attained=len(jobs))


def verl(jobs: list[SimulatedJob], world: World) -> Unshared:
    """Every job alone on H800 nodes that do both."""
    dollars = sum(_colocated_s(one, world) * _colocated_per_hour(one) for one in jobs) / 3600
    kept = sum(_colocated_s(one, world) <= one.job.slo * one.solo_s(world) for one in jobs)
    return Unshared(dollars=dollars, attained=kept)


def gavel(jobs: list[SimulatedJob], world: World) -> Unshared:
    """Every job on the cheaper of the two that keeps its SLO."""
    dollars = 0.0
    for one in jobs:
        alone = one.solo_s(world) * _disaggregated_per_hour(one)
        colocated = _colocated_s(one, world) * _colocated_per_hour(one)
        keeps = _colocated_s(one, world) <= one.job.slo * one.solo_s(world)
        dollars += min(alone, colocated) if keeps else alone
    return Unshared(dollars=dollars / 3600, attained=len(jobs))


UNSHARED: Final[dict[str, Callable[[list[SimulatedJob], World], Unshared]]] = {
    "solo_d": solo_d,
    "verl": verl,
    "gavel": gavel,
}


class RandomPlanner(GroupPlanner):
    """Any opening that memory and group size allow, a new group among them."""

    def __init__(self, seed: int) -> None:
        super().__init__(Judge(), NODE_TYPES, _LEFT_ALONE)
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def choose(self, job: JobId) -> Opening:
        openings = [*_openings(self, job), self.packer.isolated(job)]
        return openings[int(self._rng.integers(len(openings)))]


class GreedyPlanner(GroupPlanner):
    """Chooses the opening on the idlest nodes; a new group without an opening."""

    def __init__(self) -> None:
        super().__init__(Judge(), NODE_TYPES, _LEFT_ALONE)

    def choose(self, job: JobId) -> Opening:
        openings = [
            opening for opening in _openings(self, job) if opening.kind is OpeningKind.DIRECT
        ]
        if not openings:
            return self.packer.isolated(job)
        return min(openings, key=self._busy)

    def _busy(self, opening: Opening) -> float:
        """Share of its nodes' time that jobs alone there would use."""
        busy = 0.0
        for placement in opening.group.pinned.values():
            belief = self.facts[placement.job].belief()
            if set(placement.rollout_nodes) & set(opening.placement.rollout_nodes):
                busy += belief.rollout_s / belief.iteration_s
            if set(placement.training_nodes) & set(opening.placement.training_nodes):
                busy += belief.training_s / belief.iteration_s
        return busy


def _openings(planner: GroupPlanner, job: JobId) -> list[Opening]:
    kinds = (OpeningKind.DIRECT, OpeningKind.ROLLOUT_SCALING)
    return [
        opening
        for group in planner.table.groups.values()
        for kind in kinds
        for opening in planner.packer.unjudged(group, job, kind)
    ]


PAPER_PLAN: Final = Rules(migrate=True, warm_s=0.0, migrate_s=3.0)
"""Rules that Algorithm 1 simulates, without the price of switching."""
PAPER_TAIL: Final = TailShape(bulk_ratio=0.5, share=0.25)
"""The last 20 % of the responses take half of the rollout, on 2 of 8 accelerators."""
PAPER_HORIZON: Final = Horizon(scenarios=1, warm_up=3.0, cycles=6.0)


@dataclass(frozen=True, slots=True)
class WorstCase(Judge):
    """RollMux: durations at the token limit, a few meta-iterations of them with tails that move,
    groups at or over their cycle left alone."""

    rules: Rules = PAPER_PLAN
    horizon: Horizon = PAPER_HORIZON
    planned_tail: TailShape = PAPER_TAIL

    def with_warm_start(self, seconds: float) -> "WorstCase":  # noqa: ARG002
        """Algorithm 1 counts no price of switching."""
        return self

    def belief(self, facts: JobFacts) -> Belief:
        rollout, training, *sync = facts.spec.phases
        sync_s = sum(phase.max_s for phase in sync)
        return Belief(rollout.max_s, 0.0, 0.0, training.max_s, 0.0, 0.0, sync_s)

    def tail(self, facts: JobFacts) -> TailShape:  # noqa: ARG002
        return self.planned_tail

    def slo(self, facts: JobFacts, *, now: float, delay_s: float = 0.0) -> float:  # noqa: ARG002
        return facts.account.slo

    def takes_more(self, occupants: Sequence[Occupant]) -> bool:
        cycle_s, busiest_s = group_load(occupants, tails_move=self.rules.migrate)
        return busiest_s < cycle_s

    def admits(self, roster: Roster) -> bool:
        return bool((self.bounds(roster) <= roster.slos + ROUNDING).all())

    def bounds(self, roster: Roster) -> Records:
        return np.asarray(slowdowns(roster.jobs, roster.beliefs, self.horizon, self.rules)[0])


def paper_planner(kind: type[GroupPlanner] = GroupPlanner) -> GroupPlanner:
    """RollMux: every group looked at, no move ever."""
    limits = PackingLimits(tries=UNLIMITED, combinations=UNLIMITED, training_scaling=False)
    config = replace(_LEFT_ALONE, limits=limits)
    return kind(WorstCase(), NODE_TYPES, config)
