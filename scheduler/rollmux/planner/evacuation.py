"""Evacuation of the jobs on a failed node.

Two answers. Ours replaces the node in its group: only the jobs that were on it begin again, beside
the same others as before, so that every SLO that held still holds, up to the cost of the lost
iteration. The paper's stops those jobs and takes each as a new arrival. If one end of a job's move
fails, the move is over and the job keeps the other end.
"""

from collections.abc import Callable

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, NodeId
from scheduler.rollmux.planner.group_effects import (
    AddNode,
    AssignNodes,
    GroupEffect,
    PlacementDecision,
    ReleaseNode,
)
from scheduler.rollmux.planner.packing import Opening, Packer


class Evacuation:
    def __init__(self, packer: Packer, choose: Callable[[JobId], Opening]) -> None:
        self._packer = packer
        self._table = packer.table
        self._choose = choose

    def replace(self, node: NodeId) -> tuple[GroupEffect, ...]:
        """Replaces the lost node; the new one is brought up only if a job is pinned to it."""
        group = self._table.groups[self._table.nodes[node]]
        pinned, torn = self._table.on_node(node), self._table.leaving_node(node)
        down = [gone for job in torn for gone in self._left(job)]
        effects: list[GroupEffect] = []
        if pinned:
            effects.append(AddNode(node=self._table.replace(node)))
            down.append(node)
        self._packer.refresh(group)
        why = f"node {node} failed; it is replaced"
        effects += [self._again(job, why, lost=job in torn) for job in _each(pinned, torn)]
        return (*effects, *(ReleaseNode(node=gone) for gone in down))

    def resubmit(self, node: NodeId) -> tuple[GroupEffect, ...]:
        """Every job on the node gives up all nodes and arrives again."""
        pinned, torn = self._table.on_node(node), self._table.leaving_node(node)
        down = [gone for job in torn for gone in self._left(job)]
        for job in pinned:
            group = self._table.groups[self._table.home[job]]
            down += self._table.unpin(job, self._bytes(job))
            self._packer.refresh(group)
        effects: list[GroupEffect] = []
        for job in pinned:
            opening = self._anywhere(job)
            up = self._table.pin(opening.placement, opening.group, self._bytes(job))
            self._packer.refresh(opening.group)
            effects += [AddNode(node=one) for one in up]
        why = f"node {node} failed; arrives again"
        effects += [self._again(job, why, lost=job in torn) for job in _each(pinned, torn)]
        return (*effects, *(ReleaseNode(node=gone) for gone in down))

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

    def _left(self, job: JobId) -> tuple[NodeId, ...]:
        groups = self._table.leaving_groups(job)
        down = self._table.left(job, self._bytes(job))
        for group in groups:
            self._packer.refresh(group)
        return down

    def _bytes(self, job: JobId) -> int:
        return self._packer.facts[job].spec.host_bytes


def _each(first: tuple[JobId, ...], second: tuple[JobId, ...]) -> list[JobId]:
    return list(dict.fromkeys((*first, *second)))
