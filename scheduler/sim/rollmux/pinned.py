"""A planner that places every job where a given hosting has it, and leaves it there."""

from collections.abc import Sequence

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import Placement, Pool
from scheduler.rollmux.forecast.judge import Distributional
from scheduler.rollmux.planner.assignments import Masks
from scheduler.rollmux.planner.group_table import GroupState
from scheduler.rollmux.planner.packing import Opening, OpeningKind
from scheduler.rollmux.planner.planner import GroupPlanner, PlannerConfig
from scheduler.rollmux.planner.verdicts import Hosting
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob


class PinnedPlanner(GroupPlanner):
    def __init__(self, jobs: Sequence[SimulatedJob], hostings: Sequence[Hosting]) -> None:
        super().__init__(Distributional(), NODE_TYPES, PlannerConfig(moves=False))
        self._pinned: dict[JobId, tuple[GroupState, Placement]] = {}
        for hosting in hostings:
            cell = self.book.fresh_group()
            rollout = self._nodes(Pool.ROLLOUT, hosting.rollout)
            training = self._nodes(Pool.TRAINING, hosting.training)
            for at, member in enumerate(hosting.members):
                job = jobs[member].job.job
                placement = Placement(
                    job=job, rollout_nodes=rollout[at], training_nodes=training[at]
                )
                self._pinned[job] = (cell, placement)

    def choose(self, job: JobId) -> Opening:
        cell, placement = self._pinned[job]
        added_per_hour = sum(
            NODE_TYPES[pool].price_per_hour
            for pool, nodes in (
                (Pool.ROLLOUT, placement.rollout_nodes),
                (Pool.TRAINING, placement.training_nodes),
            )
            for node in nodes
            if node not in self.book.nodes
        )
        return Opening(
            kind=OpeningKind.DIRECT, cell=cell, placement=placement, delta_per_hour=added_per_hour
        )

    def _nodes(self, pool: Pool, masks: Masks) -> list[tuple[NodeId, ...]]:
        """The nodes of each member, a new name for each bit."""
        count = max(masks).bit_length()
        names = self.book.fresh_nodes(pool, count)
        return [tuple(name for bit, name in enumerate(names) if mask >> bit & 1) for mask in masks]
