"""The production planner, with jobs that are known beforehand and as many nodes as there are.

Nobody runs yet: a job that was placed may move for nothing, so savings are looked for until none is
left. What was measured of a job reaches the planner as the observations that it is of.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, NodeId
from scheduler.plan.jobs_file import JobSettings, PhaseSettings, PlanSettings
from scheduler.policy.groups.events import JobArrived, JobMoved, PlaceJob
from scheduler.policy.groups.facts import JobFacts
from scheduler.policy.groups.judge import Distributional
from scheduler.policy.groups.packing import Opening, OpeningKind
from scheduler.policy.groups.planner import GroupPlanner, PlannerConfig
from scheduler.policy.groups.relocation import MovePrices
from scheduler.policy.groups.slo import ChanceConstraint
from scheduler.policy.groups.tail import best_shape
from scheduler.policy.model import PhaseKind, Placement, Pool

_FREE_MOVES: Final = MovePrices(move_s=0.0, least_saving_per_move=0.01, quiet_s=0.0)
_LOOKS: Final = 40


class KnownJobsPlanner(GroupPlanner):
    def __init__(self, settings: PlanSettings) -> None:
        constraint = ChanceConstraint(risk=settings.risk)
        config = PlannerConfig(prices=_FREE_MOVES, accelerators=settings.nodes.rollout.accelerators)
        super().__init__(Distributional(constraint=constraint), settings.types, config)
        self.reasons: dict[JobId, str] = {}
        self._given = {JobId(job.id): job for job in settings.jobs}
        self._supply = {
            Pool.ROLLOUT: settings.nodes.rollout.count,
            Pool.TRAINING: settings.nodes.training.count,
        }

    def place(self, job: JobSettings) -> None:
        """Raises Exhausted where the nodes that there are do not suffice."""
        try:
            effects = self.observe(JobArrived(job=job.as_job), now=0.0)
        except Exhausted:
            del self.facts[JobId(job.id)]
            raise
        self.reasons[JobId(job.id)] = next(
            effect.reason for effect in effects if isinstance(effect, PlaceJob)
        )

    def choose(self, job: JobId) -> Opening:
        self._recall(self.facts[job], self._given[job])
        opening = super().choose(job)
        if self._supplied(self._taken(opening)):
            return opening
        within = (each for each in self._openings(job) if self._supplied(self._taken(each)))
        admitted = [each for each in within if self.packer.admits(each)]
        if not admitted:
            raise Exhausted(self._shortage(opening))
        return min(admitted, key=lambda each: each.delta_per_hour)

    def settle(self) -> None:
        """Moves that spare nodes, until none is found."""
        for _ in range(_LOOKS):
            moves = self.regroup.improve(now=0.0)
            if moves and not self._supplied(Counter()):
                self.relocation.take_back(moves)
                return
            for move in moves:
                self.reasons[move.job] = "hosted together these jobs need fewer nodes"
                self.observe(JobMoved(job=move.job), now=0.0)
            if not moves and not self.regroup.unseen(now=0.0):
                return

    def _openings(self, job: JobId) -> Iterator[Opening]:
        for cell in self.book.cells.values():
            for kind in OpeningKind:
                if kind is not OpeningKind.NEW_GROUP:
                    yield from self.packer.unjudged(cell, job, kind)

    def _taken(self, opening: Opening) -> Counter[Pool]:
        """Nodes that the opening brings up."""
        known: dict[NodeId, object] = dict(self.book.nodes)
        placement = opening.placement
        return Counter(
            {
                Pool.ROLLOUT: sum(node not in known for node in placement.rollout_nodes),
                Pool.TRAINING: sum(node not in known for node in placement.training_nodes),
            }
        )

    def _supplied(self, taken: Counter[Pool]) -> bool:
        return all(
            count is None or self._up(pool) + taken[pool] <= count
            for pool, count in self._supply.items()
        )

    def _up(self, pool: Pool) -> int:
        """Nodes of which somebody will be left once everybody has moved."""
        sides = (
            {node for one in cell.pinned.values() for node in _nodes(one, pool)}
            for cell in self.book.cells.values()
        )
        return sum(map(len, sides))

    def _shortage(self, opening: Opening) -> str:
        taken = self._taken(opening)
        wants = " and ".join(
            f"{taken[pool]} {self.book.types[pool].type} of which {count - self._up(pool)} are free"
            for pool, count in self._supply.items()
            if count is not None and self._up(pool) + taken[pool] > count
        )
        return f"needs {wants}, and no group that there is admits it"

    def _recall(self, facts: JobFacts, given: JobSettings) -> None:
        facts.tail = best_shape(given.curve, accelerators=self.config.accelerators)
        for kind, phase in (
            (PhaseKind.ROLLOUT, given.rollout),
            (PhaseKind.TRAINING, given.training),
        ):
            for solo_s in _observations(phase):
                facts.observe(kind, solo_s)


def _nodes(placement: Placement, pool: Pool) -> tuple[NodeId, ...]:
    return placement.rollout_nodes if pool is Pool.ROLLOUT else placement.training_nodes


def _observations(phase: PhaseSettings) -> Iterator[float]:
    """Durations of that mean and variation; an odd last one is the mean itself."""
    if phase.mean_s is None:
        return
    for at in range(phase.seen):
        alone = at == phase.seen - 1 and phase.seen % 2
        side = 0.0 if alone else (1.0 if at % 2 else -1.0)
        yield phase.mean_s * max(0.01, 1.0 + side * phase.cv)
