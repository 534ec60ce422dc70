"""Evacuation of the jobs on a failed node.

Two answers. Ours replaces the node in its group: only the jobs that were on it begin again, beside
the same others as before, so that every SLO that held still holds, up to the cost of the lost
iteration. The paper's stops those jobs and takes each as a new arrival. If one end of a job's move
fails, the move is over and the job keeps the other end.
"""

from collections.abc import Callable

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, NodeId
from scheduler.rollmux.planner.group_effects import AssignNodes, PlacementDecision
from scheduler.rollmux.planner.packing import Opening, Packer


class Evacuation:
    def __init__(self, packer: Packer, choose: Callable[[JobId], Opening]) -> None:
        self._packer = packer
        self._table = packer.table
        self._choose = choose

    def replace(self, node: NodeId) -> tuple[AssignNodes, ...]:
        """Replaces the lost node; the new one is brought up only if a job is pinned to it."""
        group = self._table.groups[self._table.nodes[node]]
        pinned, torn = self._table.on_node(node), self._table.leaving_node(node)
        for job in torn:
            self._left(job)
        if pinned:
            self._table.replace(node)
        self._packer.refresh(group)
        why = f"node {node} failed; it is replaced"
        return tuple(self._again(job, why, lost=job in torn) for job in _each(pinned, torn))

    def resubmit(self, node: NodeId) -> tuple[AssignNodes, ...]:
        """Every job on the node gives up all nodes and arrives again."""
        pinned, torn = self._table.on_node(node), self._table.leaving_node(node)
        for job in torn:
            self._left(job)
        for job in pinned:
            self._packer.leave(job)
        for job in pinned:
            self._packer.take(self._anywhere(job))
        why = f"node {node} failed; arrives again"
        return tuple(self._again(job, why, lost=job in torn) for job in _each(pinned, torn))

    def _again(self, job: JobId, why: str, *, lost: bool) -> AssignNodes:
        """The job's new placement; takes effect at once unless the job still runs on nodes it is
        leaving."""
        facts = self._packer.facts[job]
        group = self._table.home[job]
        decision = PlacementDecision.MOVED
        if lost or not facts.moving:
            decision, facts.moving = PlacementDecision.RESTARTED, False
            facts.lose_iteration()
        placement = self._table.groups[group].pinned[job]
        return AssignNodes(decision=decision, group=group, placement=placement, reason=why)

    def _anywhere(self, job: JobId) -> Opening:
        """Opening for a job that has run already; without free nodes, new ones that it awaits."""
        try:
            return self._choose(job)
        except Exhausted:
            return self._packer.isolated(job)

    def _left(self, job: JobId) -> None:
        groups = self._table.leaving_groups(job)
        self._table.left(job)
        for group in groups:
            self._packer.refresh(group)


def _each(first: tuple[JobId, ...], second: tuple[JobId, ...]) -> list[JobId]:
    return list(dict.fromkeys((*first, *second)))
