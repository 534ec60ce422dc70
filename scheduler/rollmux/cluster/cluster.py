"""Places jobs on nodes: turns the group planner's answers into terms of run permits.

Jobs are submitted, wait for a place, and get one; observed phases teach the planner. Its requests
take effect where they cost no phase: a job learns of a move at the end of its iteration, and has
left its old nodes when it requests its next phase. Host memory is given once. A failed node is
replaced by a free one; only a phase that ran on it ends. Reads the permit state of each job and
returns events of the permit policy. No I/O, no clock.
"""

from typing import Protocol

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import PhaseKind, Placement, Pool
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_placement import JobPlacement, PlacementStage
from scheduler.rollmux.cluster.measured import MeasuredSeconds
from scheduler.rollmux.cluster.node_fleet import NodeFleet
from scheduler.rollmux.cluster.plan_events import (
    CloseJob,
    ClusterEffect,
    ClusterEvent,
    ClusterResumed,
    JobGone,
    JobSubmitted,
    NodeBack,
    NodeLost,
    PhaseAsked,
    PhaseBegan,
    PhaseDone,
    PhaseLost,
    PlacementDecision,
    PlanJob,
    PlanReviewed,
    QueueJob,
    SettleJob,
    TellMove,
)
from scheduler.rollmux.cluster.submission import KINDS, Submission, nodes_of, submission_fault
from scheduler.rollmux.permits.events import JobLeft, JobPlaced
from scheduler.rollmux.permits.job_permit import NO_EPOCH, JobPermit, PermitStage
from scheduler.rollmux.permits.terms import JobTerms
from scheduler.rollmux.planner.group_events import (
    AddNode,
    GroupEffect,
    JobEnded,
    JobMoved,
    MoveJob,
    NodeFailed,
    PhaseMeasured,
    PlaceJob,
    ReleaseNode,
    RestartJob,
    ReviewDue,
)
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.rollmux.planner.residency import Residency

_QUEUE_TRIES = 16
"""Waiting jobs that are looked at when something has changed."""


class Permits(Protocol):
    def permit(self, job: JobId) -> JobPermit | None: ...


class ClusterPolicy:
    def __init__(
        self, config: ClusterConfig, permits: Permits, planner: GroupPlanner | None = None
    ) -> None:
        """`planner` is another one than the settings give."""
        self.config = config
        self.planner = planner or GroupPlanner(config.judge, config.types, config.planner)
        self.fleet = NodeFleet(config.pools)
        self.placements: dict[JobId, JobPlacement] = {}
        """Every submitted job, in order of arrival."""
        self.residency = Residency({pool: one.host_bytes for pool, one in config.types.items()})
        """Host memory in use now; the planner's book counts what it has planned."""
        self.move_s = MeasuredSeconds.begin(config.move_s)
        self.warm_start_s = MeasuredSeconds.begin(config.warm_start_s)
        self.arrivals = 0
        self.unsaved: set[JobId] = set()
        """Jobs whose record has changed since the shell last cleared this set."""
        self.layout_changed = False
        """Whether the layout (groups and their jobs) changed since the shell cleared this."""
        self._permits = permits
        self._effects: list[ClusterEffect] = []
        self._removed: set[JobId] = set()
        """Jobs removed from their permits in the present decision."""
        self._arrived: set[JobId] = set()
        """Jobs that the present decision has put on nodes."""
        self._touched: set[JobId] = set()

    def refusal(self, given: Submission) -> str:
        """Why the job will never be placed so; empty if it may be."""
        known = self.placements.get(given.job)
        if known is not None and known.submission != given:
            return "the job is known with another declaration: it must be forgotten first"
        fault = submission_fault(given)
        for pool, phase in zip((Pool.ROLLOUT, Pool.TRAINING), given.phases, strict=False):
            there, host_bytes = self.fleet.count(pool), self.config.types[pool].host_bytes
            if not fault and phase.nodes > there:
                fault = f"{phase.kind}: wants {phase.nodes} nodes, there are {there}"
            if not fault and given.host_bytes > host_bytes:
                fault = f"{given.host_bytes} bytes do not fit on a {pool} node of {host_bytes}"
        return fault

    def observe(self, event: ClusterEvent, *, now: float) -> tuple[ClusterEffect, ...]:
        self._effects, self._removed, self._arrived = [], set(), set()
        match event:
            case JobSubmitted(submission=given):
                self._submit(given, now)
            case PhaseAsked(job=job, kind=kind):
                self._asked(job, kind is KINDS[0], now)
            case PhaseBegan(job=job) if job in self.placements and not self.placements[job].started:
                self.placements[job].started = True
                self.unsaved.add(job)
            case PhaseDone() if event.job in self.planner.facts:
                self._learn(event, now)
            case PhaseLost(job=job) if job in self.planner.facts:
                facts = self.planner.facts[job]
                if event.overran is not None:
                    facts.observe_cut(event.overran, event.at_least_s)
                    facts.belief()
                facts.lose_iteration()
                self.unsaved.add(job)
            case JobGone(job=job) if job in self.placements:
                self._end(job, now)
            case NodeLost(node=node) if self.fleet.has_up(node):
                self._lose(node, now)
            case NodeBack(node=node) if node in self.fleet.failed:
                self.fleet.repair(node)
                self.layout_changed = True
                self._let_in(now)
            case PlanReviewed():
                self.planner.book.supply = self._supply()
                self._apply(self.planner.observe(ReviewDue(), now=now), now)
                self._let_in(now)
            case ClusterResumed():
                self._resume(now)
            case _:
                return ()
        self._settle()
        return tuple(sorted(self._effects, key=self._rank))

    def machines(self, placement: Placement | None) -> tuple[tuple[NodeId, ...], ...]:
        """Rollout and training nodes by their own names; none of a pool where one is missing."""
        if placement is None:
            return (), ()
        named = self.fleet.named
        return named(placement.rollout_nodes), named(placement.training_nodes)

    def wanted_terms(self, placed: JobPlacement) -> JobTerms | None:
        """The permit terms of the job on its current nodes; None without nodes."""
        rollout, training = self.machines(placed.at)
        return placed.submission.terms(
            rollout,
            training,
            accelerators=self.config.rollout.type.accelerators,
            tail_ratio=self.config.tail_ratio,
            leases=self.config.harvesting,
        )

    def _submit(self, given: Submission, now: float) -> None:
        placed = self.placements.get(given.job)
        if placed is None:
            self.arrivals += 1
            placed = JobPlacement(submission=given, number=self.arrivals, submitted_s=now)
            self.placements[given.job] = placed
            self.unsaved.add(given.job)
            self._admit(now)
            return
        if placed.changed:
            placed.changed = False
            self.unsaved.add(given.job)
        if placed.stage is PlacementStage.MOVING and (placed.told or self._is_apart(placed)):
            # Told at its iteration's end, or a new process is told with the answer.
            self._leave_old(placed, now)

    def _asked(self, job: JobId, begins: bool, now: float) -> None:
        placed = self.placements.get(job)
        if placed is not None and placed.arrived_s is not None:
            self.unsaved.add(job)
            if self.move_s.observe(now - placed.arrived_s):
                self.layout_changed = True
                self.planner.set_move_s(self.move_s.in_force_s)
            placed.arrived_s = None
        permit = self._permits.permit(job)
        if permit is not None and permit.holding:
            return
        if placed is not None and begins and placed.told and placed.stage is PlacementStage.MOVING:
            self._leave_old(placed, now)

    def _learn(self, event: PhaseDone, now: float) -> None:
        placed, facts = self.placements[event.job], self.planner.facts[event.job]
        ended = PhaseMeasured(
            job=event.job, phase=event.kind, solo_s=event.solo_s, measured=event.measured
        )
        self._apply(self.planner.observe(ended, now=now), now)
        # A rollout may have moved its tail, too.
        loaded = event.kind is PhaseKind.TRAINING and event.loading_s > 0.0
        if loaded and self.warm_start_s.observe(event.loading_s):
            self.layout_changed = True
            self.planner.set_warm_start_s(self.warm_start_s.in_force_s)
        if event.curve:
            facts.learn_tail(event.curve, accelerators=self._accelerators(placed))
        facts.belief()
        if event.kind is placed.submission.phases[-1].kind:
            placed.iterations += 1
            self._tell_move(placed)
        self.unsaved.add(event.job)

    def _accelerators(self, placed: JobPlacement) -> int:
        """Accelerators of all the job's rollout nodes."""
        return placed.submission.phases[0].nodes * self.config.rollout.type.accelerators

    def _tell_move(self, placed: JobPlacement) -> None:
        rollout, training = self.machines(placed.to)
        placed.told = placed.to is not None and bool(rollout) and bool(training)
        if placed.told:
            self._effects.append(
                TellMove(
                    job=placed.job,
                    rollout_nodes=rollout,
                    training_nodes=training,
                    reason=placed.reason,
                )
            )

    def _end(self, job: JobId, now: float) -> None:
        placed = self.placements.pop(job)
        self.unsaved.add(job)
        self.layout_changed = True
        if placed.stage is PlacementStage.QUEUED:
            return
        self.residency.hold(job, (), 0)
        self._remove(job, for_good=True)
        facts = self.planner.facts[job]
        if placed.iterations:
            # A silent job is given up much later; that is no delay of the planner's making.
            account = facts.account
            self._effects.append(
                CloseJob(
                    job=job,
                    slowdown=(facts.seen_s - account.began_s) / account.solo_s,
                    slo=account.slo,
                    iterations=placed.iterations,
                    moves=placed.moves,
                )
            )
        self._apply(self.planner.observe(JobEnded(job=job), now=now), now)
        self._let_in(now)

    def _lose(self, node: NodeId, now: float) -> None:
        name = self.fleet.fail(node)
        self.layout_changed = True
        if name is not None:
            why = f"node {node} failed; it is replaced"
            self.planner.book.supply = self._supply()
            self._apply(self.planner.observe(NodeFailed(node=name), now=now), now, why=why)
        for job in self.placements:
            permit = self._permits.permit(job)
            if permit is not None and permit.holding and node in permit.nodes:
                self._remove(job)
                self._touched.add(job)
        self._let_in(now)

    def _resume(self, now: float) -> None:
        for placed in self.placements.values():
            self._touched.add(placed.job)
        self._let_in(now)

    def _apply(self, effects: tuple[GroupEffect, ...], now: float, *, why: str = "") -> None:
        """`why` replaces the planner's reason where given; the latter names nodes by planner
        names."""
        for effect in effects:
            self.layout_changed = True
            match effect:
                case AddNode(node=node):
                    self.fleet.bind(node.node, node.pool)
                case ReleaseNode(node=name):
                    self.fleet.release(name)
                case PlaceJob(group=group, placement=placement, reason=reason):
                    placed = self.placements[placement.job]
                    placed.placed_s, placed.reason = now, reason
                    self.planner.facts[placed.job].belief()
                    self._direct(placed, group, placement)
                    self._decided(PlacementDecision.PLACED, placed, placement)
                    self._enter_if_room(placed, now)
                case MoveJob(group=group, placement=placement, reason=reason):
                    self._move(self.placements[placement.job], group, placement, why or reason, now)
                case RestartJob(group=group, placement=placement, reason=reason):
                    self._restart(
                        self.placements[placement.job], group, placement, why or reason, now
                    )

    def _decided(
        self, decision: PlacementDecision, placed: JobPlacement, placement: Placement
    ) -> None:
        rollout, training = self.machines(placement)
        self._effects.append(
            PlanJob(
                decision=decision,
                job=placed.job,
                group=placed.to_group or GroupId(""),
                rollout_nodes=rollout,
                training_nodes=training,
                beside=self._beside(placed, placement),
                reason=placed.reason,
            )
        )

    def _beside(self, placed: JobPlacement, placement: Placement) -> tuple[JobId, ...]:
        cell = self.planner.book.cells.get(placed.to_group or GroupId(""))
        others = {} if cell is None else cell.pinned
        nodes = set(nodes_of(placement))
        found = (job for job, other in others.items() if nodes.intersection(nodes_of(other)))
        return tuple(sorted(job for job in found if job != placed.job))

    def _direct(self, placed: JobPlacement, group: GroupId, placement: Placement) -> None:
        placed.to, placed.to_group, placed.told = placement, group, False
        self.unsaved.add(placed.job)

    def _move(
        self, placed: JobPlacement, group: GroupId, placement: Placement, reason: str, now: float
    ) -> None:
        placed.reason = reason
        self._direct(placed, group, placement)
        self._decided(PlacementDecision.MOVED, placed, placement)
        if not placed.started or placed.at is None:
            placed.changed = True
            # Nothing of it is on the nodes that it would have to leave.
            self._leave_old(placed, now)

    def _restart(
        self, placed: JobPlacement, group: GroupId, placement: Placement, reason: str, now: float
    ) -> None:
        """A phase on nodes that the job keeps runs to its end; any other is over now."""
        placed.reason = reason
        self._direct(placed, group, placement)
        self._decided(PlacementDecision.RESTARTED, placed, placement)
        self._hold(placed, self.residency.kept(placed.job, placement))
        permit = self._permits.permit(placed.job)
        own = {node for nodes in self.machines(placement) for node in nodes}
        if permit is not None and not (permit.holding and own.issuperset(permit.nodes)):
            self._remove(placed.job)
        placed.at, placed.changed = None, True
        self._touched.add(placed.job)
        self._enter_if_room(placed, now)

    def _leave_old(self, placed: JobPlacement, now: float) -> None:
        placed.at = None
        self._hold(placed, ())
        self._touched.add(placed.job)
        self.unsaved.add(placed.job)
        self.layout_changed = True
        self._apply(self.planner.observe(JobMoved(job=placed.job), now=now), now)
        self._let_in(now)

    def _hold(self, placed: JobPlacement, nodes: tuple[NodeId, ...]) -> None:
        self.residency.hold(placed.job, nodes, placed.submission.host_bytes)

    def _enter_if_room(self, placed: JobPlacement, now: float) -> None:
        assert placed.to is not None
        if not self.residency.has_room(placed.to, placed.submission.host_bytes):
            return
        placed.moves += placed.started
        placed.arrived_s = now if placed.started else None
        self._hold(placed, nodes_of(placed.to))
        placed.arrive()
        self._arrived.add(placed.job)
        self._touched.add(placed.job)
        self.unsaved.add(placed.job)

    def _let_in(self, now: float) -> None:
        """Binds machines first, then memory for jobs between two places, then places for the
        queue."""
        for name in self.fleet.bind_awaited():
            self.layout_changed = True
            self._touched |= {
                job for job, placed in self.placements.items() if _is_on(placed, name)
            }
        for placed in self.placements.values():
            if placed.stage is PlacementStage.BETWEEN and all(self.machines(placed.to)):
                self._enter_if_room(placed, now)
        self._admit(now)

    def _admit(self, now: float) -> None:
        """First come, first served; a later job may pass if it takes no free node."""
        book = self.planner.book
        book.supply = self._supply()
        waiting = [one for one in self.placements.values() if one.stage is PlacementStage.QUEUED]
        for placed in waiting[:_QUEUE_TRIES]:
            try:
                effects = self.planner.observe(placed.arrival, now=now)
            except Exhausted as error:
                book.supply = dict.fromkeys(Pool, 0)
                if placed.reason != str(error):
                    placed.reason = str(error)
                    self.unsaved.add(placed.job)
                    self._effects.append(QueueJob(job=placed.job, reason=placed.reason))
                continue
            self._apply(effects, now)

    def _supply(self) -> dict[Pool, int]:
        """Machines in use plus free machines that no job awaits, per pool."""
        up = self.planner.book.up
        return {pool: up[pool] + self.fleet.spare(pool) for pool in self.config.pools}

    def _remove(self, job: JobId, *, for_good: bool = False) -> None:
        permit = self._permits.permit(job)
        known = permit is not None and (for_good or permit.stage is not PermitStage.APART)
        if known and job not in self._removed:
            self._removed.add(job)
            self._effects.append(JobLeft(job=job, for_good=for_good))

    def _is_apart(self, placed: JobPlacement) -> bool:
        permit = self._permits.permit(placed.job)
        return permit is None or permit.stage is PermitStage.APART or permit.epoch == NO_EPOCH

    def _rank(self, effect: ClusterEffect) -> int:
        """New terms before a holder leaves: a job that waits for a freed node must not be on a lost
        one, nor about to leave itself."""
        match effect:
            case JobLeft(job=job):
                permit = self._permits.permit(job)
                return int(permit is not None and permit.holding)
            case JobPlaced(terms=terms) if terms.job in self._removed:
                return 2
        return 0

    def _settle(self) -> None:
        """Terms as they shall be now, where they may have changed."""
        for job in sorted(self._touched):
            placed, permit = self.placements.get(job), self._permits.permit(job)
            if placed is None:
                continue
            wanted = self.wanted_terms(placed)
            there = None if permit is None or job in self._removed else permit.terms
            if wanted is None:
                self._remove(job)
            elif wanted != there or job in self._arrived:
                self._effects += [JobPlaced(terms=wanted), self._settled(placed)]
        self._touched = set()

    def _settled(self, placed: JobPlacement) -> SettleJob:
        rollout, training = self.machines(placed.at)
        return SettleJob(
            job=placed.job,
            group=placed.group or GroupId(""),
            rollout_nodes=rollout,
            training_nodes=training,
        )


def _is_on(placed: JobPlacement, name: NodeId) -> bool:
    return placed.at is not None and name in nodes_of(placed.at)
