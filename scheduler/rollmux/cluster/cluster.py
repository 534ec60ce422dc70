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
from scheduler.rollmux.cluster.events import (
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
from scheduler.rollmux.cluster.fleet import NodeFleet
from scheduler.rollmux.cluster.measured import MeasuredSeconds
from scheduler.rollmux.cluster.stays import JobPlacement, PlacementStage
from scheduler.rollmux.cluster.submission import KINDS, Submission, nodes_of, submission_fault
from scheduler.rollmux.permits.events import JobLeft, JobPlaced
from scheduler.rollmux.permits.standing import NO_EPOCH, JobPermit, PermitStage
from scheduler.rollmux.permits.terms import JobTerms
from scheduler.rollmux.planner.events import (
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
    def standing(self, job: JobId) -> JobPermit | None: ...


class ClusterPolicy:
    def __init__(
        self, config: ClusterConfig, permits: Permits, planner: GroupPlanner | None = None
    ) -> None:
        """`planner` is another one than the settings give."""
        self.config = config
        self.planner = planner or GroupPlanner(config.judge, config.types, config.planner)
        self.fleet = NodeFleet(config.pools)
        self.stays: dict[JobId, JobPlacement] = {}
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
        known = self.stays.get(given.job)
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
            case PhaseBegan(job=job) if job in self.stays and not self.stays[job].started:
                self.stays[job].started = True
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
            case JobGone(job=job) if job in self.stays:
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

    def wanted_terms(self, stay: JobPlacement) -> JobTerms | None:
        """The permit terms of the job on its current nodes; None without nodes."""
        rollout, training = self.machines(stay.at)
        return stay.submission.terms(
            rollout,
            training,
            accelerators=self.config.rollout.type.accelerators,
            tail_ratio=self.config.tail_ratio,
            leases=self.config.harvesting,
        )

    def _submit(self, given: Submission, now: float) -> None:
        stay = self.stays.get(given.job)
        if stay is None:
            self.arrivals += 1
            stay = JobPlacement(submission=given, number=self.arrivals, submitted_s=now)
            self.stays[given.job] = stay
            self.unsaved.add(given.job)
            self._admit(now)
            return
        if stay.changed:
            stay.changed = False
            self.unsaved.add(given.job)
        if stay.stage is PlacementStage.MOVING and (stay.told or self._is_apart(stay)):
            # Told at its iteration's end, or a new process is told with the answer.
            self._leave_old(stay, now)

    def _asked(self, job: JobId, begins: bool, now: float) -> None:
        stay = self.stays.get(job)
        if stay is not None and stay.arrived_s is not None:
            self.unsaved.add(job)
            if self.move_s.observe(now - stay.arrived_s):
                self.layout_changed = True
                self.planner.set_move_s(self.move_s.in_force_s)
            stay.arrived_s = None
        standing = self._permits.standing(job)
        if standing is not None and standing.holding:
            return
        if stay is not None and begins and stay.told and stay.stage is PlacementStage.MOVING:
            self._leave_old(stay, now)

    def _learn(self, event: PhaseDone, now: float) -> None:
        stay, facts = self.stays[event.job], self.planner.facts[event.job]
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
            facts.learn_tail(event.curve, accelerators=self._accelerators(stay))
        facts.belief()
        if event.kind is stay.submission.phases[-1].kind:
            stay.iterations += 1
            self._tell_move(stay)
        self.unsaved.add(event.job)

    def _accelerators(self, stay: JobPlacement) -> int:
        """Accelerators of all the job's rollout nodes."""
        return stay.submission.phases[0].nodes * self.config.rollout.type.accelerators

    def _tell_move(self, stay: JobPlacement) -> None:
        rollout, training = self.machines(stay.to)
        stay.told = stay.to is not None and bool(rollout) and bool(training)
        if stay.told:
            self._effects.append(
                TellMove(
                    job=stay.job,
                    rollout_nodes=rollout,
                    training_nodes=training,
                    reason=stay.reason,
                )
            )

    def _end(self, job: JobId, now: float) -> None:
        stay = self.stays.pop(job)
        self.unsaved.add(job)
        self.layout_changed = True
        if stay.stage is PlacementStage.QUEUED:
            return
        self.residency.hold(job, (), 0)
        self._remove(job, for_good=True)
        facts = self.planner.facts[job]
        if stay.iterations:
            # A silent job is given up much later; that is no delay of the planner's making.
            account = facts.account
            self._effects.append(
                CloseJob(
                    job=job,
                    slowdown=(facts.seen_s - account.began_s) / account.solo_s,
                    slo=account.slo,
                    iterations=stay.iterations,
                    moves=stay.moves,
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
        for job in self.stays:
            standing = self._permits.standing(job)
            if standing is not None and standing.holding and node in standing.nodes:
                self._remove(job)
                self._touched.add(job)
        self._let_in(now)

    def _resume(self, now: float) -> None:
        for stay in self.stays.values():
            self._touched.add(stay.job)
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
                    stay = self.stays[placement.job]
                    stay.placed_s, stay.reason = now, reason
                    self.planner.facts[stay.job].belief()
                    self._direct(stay, group, placement)
                    self._decided(PlacementDecision.PLACED, stay, placement)
                    self._enter_if_room(stay, now)
                case MoveJob(group=group, placement=placement, reason=reason):
                    self._move(self.stays[placement.job], group, placement, why or reason, now)
                case RestartJob(group=group, placement=placement, reason=reason):
                    self._restart(self.stays[placement.job], group, placement, why or reason, now)

    def _decided(
        self, decision: PlacementDecision, stay: JobPlacement, placement: Placement
    ) -> None:
        rollout, training = self.machines(placement)
        self._effects.append(
            PlanJob(
                decision=decision,
                job=stay.job,
                group=stay.to_group or GroupId(""),
                rollout_nodes=rollout,
                training_nodes=training,
                beside=self._beside(stay, placement),
                reason=stay.reason,
            )
        )

    def _beside(self, stay: JobPlacement, placement: Placement) -> tuple[JobId, ...]:
        cell = self.planner.book.cells.get(stay.to_group or GroupId(""))
        others = {} if cell is None else cell.pinned
        nodes = set(nodes_of(placement))
        found = (job for job, other in others.items() if nodes.intersection(nodes_of(other)))
        return tuple(sorted(job for job in found if job != stay.job))

    def _direct(self, stay: JobPlacement, group: GroupId, placement: Placement) -> None:
        stay.to, stay.to_group, stay.told = placement, group, False
        self.unsaved.add(stay.job)

    def _move(
        self, stay: JobPlacement, group: GroupId, placement: Placement, reason: str, now: float
    ) -> None:
        stay.reason = reason
        self._direct(stay, group, placement)
        self._decided(PlacementDecision.MOVED, stay, placement)
        if not stay.started or stay.at is None:
            stay.changed = True
            # Nothing of it is on the nodes that it would have to leave.
            self._leave_old(stay, now)

    def _restart(
        self, stay: JobPlacement, group: GroupId, placement: Placement, reason: str, now: float
    ) -> None:
        """A phase on nodes that the job keeps runs to its end; any other is over now."""
        stay.reason = reason
        self._direct(stay, group, placement)
        self._decided(PlacementDecision.RESTARTED, stay, placement)
        self._hold(stay, self.residency.kept(stay.job, placement))
        standing = self._permits.standing(stay.job)
        own = {node for nodes in self.machines(placement) for node in nodes}
        if standing is not None and not (standing.holding and own.issuperset(standing.nodes)):
            self._remove(stay.job)
        stay.at, stay.changed = None, True
        self._touched.add(stay.job)
        self._enter_if_room(stay, now)

    def _leave_old(self, stay: JobPlacement, now: float) -> None:
        stay.at = None
        self._hold(stay, ())
        self._touched.add(stay.job)
        self.unsaved.add(stay.job)
        self.layout_changed = True
        self._apply(self.planner.observe(JobMoved(job=stay.job), now=now), now)
        self._let_in(now)

    def _hold(self, stay: JobPlacement, nodes: tuple[NodeId, ...]) -> None:
        self.residency.hold(stay.job, nodes, stay.submission.host_bytes)

    def _enter_if_room(self, stay: JobPlacement, now: float) -> None:
        assert stay.to is not None
        if not self.residency.has_room(stay.to, stay.submission.host_bytes):
            return
        stay.moves += stay.started
        stay.arrived_s = now if stay.started else None
        self._hold(stay, nodes_of(stay.to))
        stay.arrive()
        self._arrived.add(stay.job)
        self._touched.add(stay.job)
        self.unsaved.add(stay.job)

    def _let_in(self, now: float) -> None:
        """Binds machines first, then memory for jobs between two places, then places for the
        queue."""
        for name in self.fleet.bind_awaited():
            self.layout_changed = True
            self._touched |= {job for job, stay in self.stays.items() if _is_on(stay, name)}
        for stay in self.stays.values():
            if stay.stage is PlacementStage.BETWEEN and all(self.machines(stay.to)):
                self._enter_if_room(stay, now)
        self._admit(now)

    def _admit(self, now: float) -> None:
        """First come, first served; a later job may pass if it takes no free node."""
        book = self.planner.book
        book.supply = self._supply()
        waiting = [one for one in self.stays.values() if one.stage is PlacementStage.QUEUED]
        for stay in waiting[:_QUEUE_TRIES]:
            try:
                effects = self.planner.observe(stay.arrival, now=now)
            except Exhausted as error:
                book.supply = dict.fromkeys(Pool, 0)
                if stay.reason != str(error):
                    stay.reason = str(error)
                    self.unsaved.add(stay.job)
                    self._effects.append(QueueJob(job=stay.job, reason=stay.reason))
                continue
            self._apply(effects, now)

    def _supply(self) -> dict[Pool, int]:
        """Machines in use plus free machines that no job awaits, per pool."""
        up = self.planner.book.up
        return {pool: up[pool] + self.fleet.spare(pool) for pool in self.config.pools}

    def _remove(self, job: JobId, *, for_good: bool = False) -> None:
        standing = self._permits.standing(job)
        known = standing is not None and (for_good or standing.stage is not PermitStage.APART)
        if known and job not in self._removed:
            self._removed.add(job)
            self._effects.append(JobLeft(job=job, for_good=for_good))

    def _is_apart(self, stay: JobPlacement) -> bool:
        standing = self._permits.standing(stay.job)
        return standing is None or standing.stage is PermitStage.APART or standing.epoch == NO_EPOCH

    def _rank(self, effect: ClusterEffect) -> int:
        """New terms before a holder leaves: a job that waits for a freed node must not be on a lost
        one, nor about to leave itself."""
        match effect:
            case JobLeft(job=job):
                standing = self._permits.standing(job)
                return int(standing is not None and standing.holding)
            case JobPlaced(terms=terms) if terms.job in self._removed:
                return 2
        return 0

    def _settle(self) -> None:
        """Terms as they shall be now, where they may have changed."""
        for job in sorted(self._touched):
            stay, standing = self.stays.get(job), self._permits.standing(job)
            if stay is None:
                continue
            wanted = self.wanted_terms(stay)
            there = None if standing is None or job in self._removed else standing.terms
            if wanted is None:
                self._remove(job)
            elif wanted != there or job in self._arrived:
                self._effects += [JobPlaced(terms=wanted), self._settled(stay)]
        self._touched = set()

    def _settled(self, stay: JobPlacement) -> SettleJob:
        rollout, training = self.machines(stay.at)
        return SettleJob(
            job=stay.job,
            group=stay.group or GroupId(""),
            rollout_nodes=rollout,
            training_nodes=training,
        )


def _is_on(stay: JobPlacement, name: NodeId) -> bool:
    return stay.at is not None and name in nodes_of(stay.at)
