"""The group planner with as many nodes as there are, and what was measured of jobs before."""

from collections import Counter

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId
from scheduler.policy.cluster.config import ClusterConfig
from scheduler.policy.cluster.submission import Submission, measured
from scheduler.policy.groups.book import GroupBook
from scheduler.policy.groups.events import (
    AddNode,
    GroupEffect,
    JobArrived,
    MoveJob,
    ReviewDue,
)
from scheduler.policy.groups.packing import Opening
from scheduler.policy.groups.planner import GroupPlanner
from scheduler.policy.model import Placement, Pool


class SuppliedPlanner(GroupPlanner):
    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config.judge, config.types, config.planner)
        self._supply: Counter[Pool] = Counter()
        self._submitted: Submission | None = None

    def admit(
        self, given: Submission, supply: Counter[Pool], *, now: float
    ) -> tuple[GroupEffect, ...]:
        """Raises Exhausted where `supply` more nodes and the groups that there are do not do."""
        self._supply, self._submitted = supply, given
        try:
            return self.observe(JobArrived(job=given.as_job), now=now)
        except Exhausted:
            del self.facts[given.job]
            raise
        finally:
            self._submitted = None

    def review(self, supply: Counter[Pool], *, now: float) -> tuple[GroupEffect, ...]:
        """Moves that need more nodes than `supply` are taken back, all of them."""
        effects = self.observe(ReviewDue(), now=now)
        added = Counter(one.node.pool for one in effects if isinstance(one, AddNode))
        if added <= supply:
            return effects
        for move in reversed([one for one in effects if isinstance(one, MoveJob)]):
            self._take_back(move.placement.job)
        return ()

    def choose(self, job: JobId) -> Opening:
        if self._submitted is not None and self._submitted.job == job:
            self._recall(self._submitted)
        opening = super().choose(job)
        if self._is_supplied(opening):
            return opening
        # The index may be older than what was learned of its jobs since.
        for cell in self.book.cells.values():
            self.packer.refresh(cell)
        within = self.packer.best(job, new_group=False, allowed=self._is_supplied)
        if within is None:
            raise Exhausted(self._shortage(opening))
        return within

    def _is_supplied(self, opening: Opening) -> bool:
        return nodes_taken(self.book, opening.placement) <= self._supply

    def _shortage(self, opening: Opening) -> str:
        taken = nodes_taken(self.book, opening.placement)
        wants = " and ".join(
            f"{count} {self.book.types[pool].type} of which {self._supply[pool]} are free"
            for pool, count in taken.items()
            if count > self._supply[pool]
        )
        return f"needs {wants}, and none of the {len(self.book.cells)} groups admits it"

    def _recall(self, given: Submission) -> None:
        """Into the estimates alone: it earns no credit here."""
        facts = self.facts[given.job]
        for estimate, phase in zip((facts.rollout, facts.training), given.phases, strict=True):
            for solo_s in measured(phase):
                estimate.observe(solo_s)

    def _take_back(self, job: JobId) -> None:
        book, facts = self.book, self.facts[job]
        left = book.cells[book.home[job]]
        host_bytes = facts.job.host_bytes_per_node
        book.unpin(job, host_bytes)
        self.packer.refresh(left)
        book.stay(job, host_bytes)
        self.packer.refresh(book.cells[book.home[job]])
        facts.moving = False


def nodes_taken(book: GroupBook, placement: Placement) -> Counter[Pool]:
    """Nodes that the placement would bring up."""
    sides = ((Pool.ROLLOUT, placement.rollout_nodes), (Pool.TRAINING, placement.training_nodes))
    return Counter({pool: sum(node not in book.nodes for node in nodes) for pool, nodes in sides})
