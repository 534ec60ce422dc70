"""The inter-group scheduler: the placement of each job, from its arrival to its end.

An arrival takes the cheapest admissible opening. Later knowledge, a departure or a drift may break
an SLO or leave a node half empty: a review moves the fewest jobs that restore every SLO, then
those that free a node. A supply limits the nodes of a pool: an arrival that finds no
placement within it is refused, and no move needs more. Permits start the phases within a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import JobSpec, PhaseKind, Pool
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.group_effects import AssignNodes, PlacementDecision
from scheduler.rollmux.planner.group_table import GroupState, GroupTable, NodeType
from scheduler.rollmux.planner.packing import Opening, Packer, PackingLimits
from scheduler.rollmux.planner.regroup import Regrouping
from scheduler.rollmux.planner.relocation import MovePrices, Relocation, endangered, together


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    cold_start_s: float = 135.0
    limits: PackingLimits = field(default_factory=PackingLimits)
    prices: MovePrices = field(default_factory=MovePrices)
    moves: bool = True
    """Whether reviews may move jobs; the paper's planner leaves them where they are."""
    searches: int = 2
    """Searches for a saving after something changed, one a review."""
    recheck_s: float = 1800.0
    """Period of reviews of a group without events, in s."""
    accelerators: int = 8
    """Accelerators of a rollout node."""
    slo_counts_queueing: bool = False
    """An SLO counts from the placement on; true: from the submission on."""


class GroupPlanner:
    def __init__(
        self,
        judge: Judge,
        types: dict[Pool, NodeType],
        config: PlannerConfig | None = None,
        supply: Mapping[Pool, int] | None = None,
    ) -> None:
        self.config = config or PlannerConfig()
        self.table = GroupTable(types, supply)
        self.facts: dict[JobId, JobFacts] = {}
        self.packer = Packer(self.table, self.facts, judge, self.config.limits)
        self.relocation = Relocation(self.packer, self.config.prices)
        self._checked_s: dict[str, float] = {}
        self.regroup = Regrouping(self.packer, self.relocation, self.config.prices)
        self._searches_left = 0
        self._changed = False
        """Something happened since the last review that may let a node be spared."""

    def set_move_s(self, seconds: float) -> None:
        """Sets the measured duration of a move, in s."""
        self.relocation.move_s = seconds

    def set_warm_start_s(self, seconds: float) -> None:
        """Sets the measured duration of a warm start, in s; every forecast is recomputed."""
        judge = self.packer.judge.with_warm_start(seconds)
        if judge != self.packer.judge:
            self.packer.judge = judge
            self.regroup.forget()
            self._changed = True

    def place_job(
        self, job: JobSpec, *, now: float, submitted_s: float | None = None
    ) -> AssignNodes:
        """Places an arrival. Raises Exhausted if none fits; the planner is as before then.

        `submitted_s` is the time at which the job began to wait for nodes; None: it did not wait.
        """
        config = self.config
        self.packer.now_s, self.packer.load_s = now, config.cold_start_s
        began_s = submitted_s if config.slo_counts_queueing else None
        facts = JobFacts.of(job, cold_start_s=config.cold_start_s, began_s=began_s, now=now)
        facts.recall(accelerators=config.accelerators)
        self.facts[job.job] = facts
        try:
            opening = self.choose(job.job)
        except Exception:
            del self.facts[job.job]
            raise
        self.packer.take(opening)
        return AssignNodes(
            decision=PlacementDecision.PLACED,
            group=opening.group.group,
            placement=opening.placement,
            reason=f"{opening.kind}, {opening.delta_per_hour:+.2f} $/h",
        )

    def choose(self, job: JobId) -> Opening:
        """The opening for an arrival; the table is unchanged. Raises Exhausted if nodes are
        lacking."""
        opening = self.packer.best(job)
        if self.table.is_supplied(opening.placement):
            return opening
        within = self.packer.best_within_supply(job)
        if within is None:
            raise Exhausted(self._shortage(opening))
        return within

    def _shortage(self, opening: Opening) -> str:
        wants = " and ".join(
            f"{count} {self.table.types[pool].type} of which {self.table.free_nodes(pool)} are free"
            for pool, count in self.table.shortage(opening.placement).items()
        )
        return f"needs {wants}, and none of the {len(self.table.groups)} groups admits it"

    def observe_phase(
        self, job: JobId, kind: PhaseKind, solo_s: float, *, now: float, measured: bool = True
    ) -> None:
        """A phase took `solo_s` alone on its nodes: waiting, loading and narrowed nodes not
        counted. Unless `measured`, this is only an upper bound, and teaches nothing."""
        self.packer.now_s = now
        facts = self.facts[job]
        young = not facts.mature
        facts.observe(kind, solo_s, measured=measured)
        facts.seen_s = now
        self._changed |= young and facts.mature

    def end_job(self, job: JobId, *, now: float) -> None:
        """The job is done, or was given up."""
        self.packer.now_s = now
        group = self.table.groups[self.table.home[job]]
        self.table.unpin(job)
        self.table.left(job)
        self.packer.refresh(group)
        del self.facts[job]
        self._changed = True

    def complete_move(self, job: JobId, *, now: float) -> None:
        """The job has left its old nodes."""
        self.packer.now_s = now
        self.facts[job].moving = False
        self.table.left(job)

    def fail_node(self, node: NodeId, *, now: float) -> tuple[AssignNodes, ...]:
        """The node is gone, with the current iteration of every job pinned to it.

        It is replaced in its group if a job is pinned to it. Only its jobs begin again, beside the
        same others as before, so that every SLO that held still holds, up to the cost of the lost
        iteration. If one end of a job's move fails, the move is over and the job keeps the other.
        """
        self.packer.now_s, self.packer.load_s = now, self.relocation.move_s
        if node not in self.table.nodes:
            return ()
        group = self.table.groups[self.table.nodes[node]]
        pinned, torn = self.table.on_node(node), self.table.leaving_node(node)
        for job in torn:
            self._leave_torn(job)
        if pinned:
            self.table.replace(node)
        self.packer.refresh(group)
        return self._begin_again(pinned, torn, f"node {node} failed; it is replaced")

    def review(self, *, now: float) -> tuple[AssignNodes, ...]:
        """Looks for SLOs at risk and for nodes that could be spared."""
        self.packer.now_s, self.packer.load_s = now, self.relocation.move_s
        if not self.config.moves:
            return ()
        effects: list[AssignNodes] = []
        for group in list(self.table.groups.values()):
            if now - self._checked_s.get(group.group, float("-inf")) >= self.config.recheck_s:
                self._checked_s[group.group] = now
                self._searches_left = max(self._searches_left, 1)
                effects += self._restore(group, now=now)
        if self._changed:
            self._changed = False
            self._searches_left = self.config.searches
        if self._searches_left:
            self._searches_left -= 1
            before = self.table.committed_per_hour
            moves = self.regroup.improve(now=now)
            saved_per_hour = before - self.table.committed_per_hour
            effects += self._announce(moves, f"saves {saved_per_hour:.2f} $/h", now=now)
            if moves:
                self._searches_left = self.config.searches
        return tuple(effects)

    def _leave_torn(self, job: JobId) -> None:
        """The job's move is over, since the node that it was leaving has failed."""
        groups = self.table.leaving_groups(job)
        self.table.left(job)
        for group in groups:
            self.packer.refresh(group)

    def _begin_again(
        self, pinned: tuple[JobId, ...], torn: tuple[JobId, ...], why: str
    ) -> tuple[AssignNodes, ...]:
        """The placements of the jobs on a failed node; each takes effect at once unless the job
        still runs on nodes that it is leaving."""
        assigned = []
        for job in dict.fromkeys((*pinned, *torn)):
            facts, group = self.facts[job], self.table.home[job]
            decision = PlacementDecision.MOVED
            if job in torn or not facts.moving:
                decision, facts.moving = PlacementDecision.RESTARTED, False
                facts.lose_iteration()
            placement = self.table.groups[group].pinned[job]
            assigned.append(
                AssignNodes(decision=decision, group=group, placement=placement, reason=why)
            )
        return tuple(assigned)

    def _restore(self, group: GroupState, *, now: float) -> list[AssignNodes]:
        if len(group.pinned) < 2:
            return []
        self.packer.refresh(group)
        occupants = self.packer.occupants(group, slo_of=self.packer.slo_ahead)
        judge, roster = self.packer.judge, Roster.of(occupants)
        if judge.admits(roster):
            return []
        members = [self.facts[job] for job in group.pinned]
        before = self.table.committed_per_hour
        moves = self.relocation.restore(group, now=now)
        if not moves:
            return []
        price = f"costs {self.table.committed_per_hour - before:+.2f} $/h"
        cause = endangered(members, roster, judge, now=now)
        return self._announce(moves, f"{cause}; {price}", now=now)

    def _announce(self, moves: list[Opening], why: str, *, now: float) -> list[AssignNodes]:
        for move in moves:
            facts = self.facts[move.job]
            facts.moving, facts.moved_s = True, now
        return [
            AssignNodes(
                decision=PlacementDecision.MOVED,
                group=move.group.group,
                placement=move.placement,
                reason=f"{why}{together(move, moves)}; {move.kind}",
            )
            for move in moves
        ]
