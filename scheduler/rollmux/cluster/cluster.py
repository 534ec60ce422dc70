"""Places jobs on nodes: turns the group planner's answers into terms of run permits.

Jobs are submitted, wait for nodes, and get them; observed phases teach the planner. Its requests
take effect where they cost no phase: a job learns of a move at the end of its iteration, and has
left its old nodes when it requests its next phase. Host memory is given once. A failed node is
replaced by a free one; only a phase that ran on it ends. Reads the permit state of each job and
returns events of the permit policy. No I/O, no clock.
"""

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import JobSpec, PhaseKind, Placement, Pool
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_limits import KINDS, permit_terms, spec_fault
from scheduler.rollmux.cluster.job_placement import JobPlacement, PlacementStage
from scheduler.rollmux.cluster.measured import LoadTimes
from scheduler.rollmux.cluster.node_fleet import NodeFleet
from scheduler.rollmux.cluster.permit_updates import ClusterEffect, PermitUpdates
from scheduler.rollmux.cluster.runtime_events import (
    CloseJob,
    OrderMove,
    PlanJob,
    QueueJob,
    SettleJob,
)
from scheduler.rollmux.permits.completion import CompletionCurve
from scheduler.rollmux.permits.events import EndPermit, PermitEndReason
from scheduler.rollmux.permits.job_permit import NO_EPOCH, PermitStage
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms
from scheduler.rollmux.planner.group_effects import AssignNodes, PlacementDecision
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.rollmux.planner.residency import Residency

_QUEUE_TRIES = 16
"""Waiting jobs that are looked at when something has changed."""


class ClusterPolicy:
    def __init__(
        self, config: ClusterConfig, permits: PermitPolicy, planner: GroupPlanner | None = None
    ) -> None:
        """`planner` is another one than the settings give."""
        self.config = config
        self.planner = planner or GroupPlanner(config.judge, config.types, config.planner)
        self.fleet = NodeFleet(config.pools)
        self.placements: dict[JobId, JobPlacement] = {}
        """Every submitted job, in order of arrival."""
        self.residency = Residency({pool: one.host_bytes for pool, one in config.types.items()})
        """Host memory in use now; the planner's table counts what it has planned."""
        self.load_times = LoadTimes(config, self.planner)
        self.arrivals = 0
        self.unsaved: set[JobId] = set()
        """Jobs whose record has changed since the shell last cleared this set."""
        self.layout_changed = False
        """Whether the layout (groups and their jobs) changed since the shell cleared this."""
        self._permits = permits
        self._updates = PermitUpdates(permits)

    def refusal(self, given: JobSpec) -> str:
        """Why the job will never be placed so; empty if it may be."""
        known = self.placements.get(given.job)
        if known is not None and known.spec != given:
            return "the job is known with another declaration: it must be forgotten first"
        fault = spec_fault(given)
        for pool, phase in zip((Pool.ROLLOUT, Pool.TRAINING), given.phases, strict=False):
            there, host_bytes = self.fleet.count(pool), self.config.types[pool].host_bytes
            if not fault and phase.nodes > there:
                fault = f"{phase.kind}: wants {phase.nodes} nodes, there are {there}"
            if not fault and given.host_bytes > host_bytes:
                fault = f"{given.host_bytes} bytes do not fit on a {pool} node of {host_bytes}"
        return fault

    def submit(self, given: JobSpec, *, now: float, holder: str = "") -> None:
        """Places a job; a known one's process comes again when it restarts or has left its old
        nodes."""
        placed = self.placements.get(given.job)
        if placed is None:
            self.arrivals += 1
            placed = JobPlacement(spec=given, number=self.arrivals, submitted_s=now, holder=holder)
            self.placements[given.job] = placed
            self.unsaved.add(given.job)
            try:
                self._admit(now)
            except Exception:
                # A job that the planner fails on must not fail every later call too.
                if placed.stage is PlacementStage.QUEUED:
                    self.end_job(given.job, now=now)
                raise
            return
        if not holder:
            return
        if placed.changed or placed.holder != holder:
            placed.changed, placed.holder = False, holder
            self.unsaved.add(given.job)
        permit = self._permits.permit(given.job)
        # An earlier process of the job may still run there.
        leaves = placed.stage is PlacementStage.MOVING and not (permit and permit.holding)
        if leaves and (placed.notified or self._is_apart(placed)):
            # Notified at its iteration's end; a new process learns its nodes from the reply.
            self._leave_old(placed, now)

    def request_phase(self, job: JobId, kind: PhaseKind, *, now: float) -> None:
        """A worker requests a permit. A job notified of a move has left its old nodes by then."""
        placed = self.placements.get(job)
        if placed is not None and placed.arrived_s is not None:
            self.unsaved.add(job)
            placed.moving_s, placed.arrived_s = now - placed.arrived_s, None
        permit = self._permits.permit(job)
        if permit is not None and permit.holding:
            return
        leaves = placed is not None and placed.notified and placed.stage is PlacementStage.MOVING
        if placed is not None and leaves and kind is KINDS[0]:
            self._leave_old(placed, now)

    def begin_phase(self, job: JobId) -> float:
        """The time, in s, that its phase may take longer than declared because it loads."""
        placed = self.placements.get(job)
        if placed is None:
            return 0.0
        if not placed.started:
            placed.started = True
            self.unsaved.add(job)
        return (
            max(self.config.cold_start_s, self.load_times.move.in_force_s) if placed.loads else 0.0
        )

    def complete_phase(self, end: EndPermit, curve: CompletionCurve | None, *, now: float) -> None:
        """`curve` is of the job's phases of this kind; None: not enough of them were seen."""
        job = end.job
        if job not in self.planner.facts:
            return
        placed, facts = self.placements[job], self.planner.facts[job]
        self.planner.observe_phase(job, end.kind, end.solo_s, measured=end.measured, now=now)
        facts.account.take_back(end.earlier_lost_s)
        self.layout_changed |= self.load_times.observe(placed, end)
        if curve is not None:
            facts.learn_tail(
                curve.points,
                accelerators=self.config.rollout.type.accelerators * facts.rollout_nodes,
                room_ratio=curve.room.ratio,
            )
        facts.belief()
        if end.kind is placed.spec.phases[-1].kind:
            placed.iterations += 1
            placed.notified = all(self.machines(placed.to))
            if placed.notified:
                self._updates.add(self.order_move(placed))
        self.unsaved.add(job)

    def lose_phase(self, end: EndPermit) -> None:
        """A permit ended and its phase is not done: the job goes back to its last checkpoint."""
        if end.job not in self.planner.facts:
            return
        facts = self.planner.facts[end.job]
        if end.ended is PermitEndReason.OVERRAN:
            facts.observe_cut(end.kind, end.solo_s)
            facts.belief()
        facts.lose_iteration()
        self.placements[end.job].lose_loaded()
        self.unsaved.add(end.job)

    def end_job(self, job: JobId, *, now: float) -> None:
        """The job is done, was given up, or its process was silent for too long."""
        placed = self.placements.pop(job, None)
        if placed is None:
            return
        self.unsaved.add(job)
        self.layout_changed = True
        self._updates.remove(job, for_good=True)
        if placed.stage is PlacementStage.QUEUED:
            return
        self.residency.keep(job, (), 0)
        facts = self.planner.facts[job]
        if placed.iterations:
            # A silent job is given up much later; the planner did not cause that delay.
            account = facts.account
            self._updates.add(
                CloseJob(
                    job=job,
                    slowdown=account.slowdown(facts.seen_s - account.began_s),
                    slo=account.slo,
                    iterations=placed.iterations,
                    moves=placed.moves,
                )
            )
        self.planner.end_job(job, now=now)
        self._bind_nodes()
        self._let_in(now)

    def report_node(self, node: NodeId, *, failed: bool, now: float) -> None:
        if failed and self.fleet.has_up(node):
            self._lose(node, now)
        elif not failed and node in self.fleet.failed:
            self.fleet.repair(node)
            self.layout_changed = True
            self._let_in(now)

    def review(self, *, now: float) -> None:
        """Looks for endangered SLOs, nodes to release and room for waiting jobs."""
        self.planner.table.supply = self._supply()
        self._apply(self.planner.review(now=now), now)
        self._let_in(now)

    def resume(self, *, now: float) -> None:
        """The control restarted: permits are brought to the plan where they differ."""
        self._updates.touch(*self.placements)
        self._let_in(now)

    def take_effects(self) -> tuple[ClusterEffect, ...]:
        """Effects since the last call, in the order in which they are to be carried out."""
        for job in self._updates.touched():
            if (placed := self.placements.get(job)) is not None:
                rollout, training = self.machines(placed.at)
                settled = SettleJob(
                    job=job,
                    group=placed.group or GroupId(""),
                    rollout_nodes=rollout,
                    training_nodes=training,
                )
                self._updates.follow(self.current_terms(placed), settled)
        return self._updates.take()

    def machines(self, placement: Placement | None) -> tuple[tuple[NodeId, ...], ...]:
        """Rollout and training nodes by their own names; none of a pool where one is missing."""
        if placement is None:
            return (), ()
        named = self.fleet.named
        return named(placement.rollout_nodes), named(placement.training_nodes)

    def current_terms(self, placed: JobPlacement) -> JobTerms | None:
        """The permit terms of the job on its current nodes; None without nodes."""
        rollout, training = self.machines(placed.at)
        return permit_terms(
            placed.spec,
            rollout,
            training,
            accelerators=self.config.rollout.type.accelerators,
            tail_ratio=self.config.tail_ratio,
            leases=self.config.harvesting,
        )

    def order_move(self, placed: JobPlacement) -> OrderMove:
        rollout, training = self.machines(placed.to)
        return OrderMove(
            job=placed.job, rollout_nodes=rollout, training_nodes=training, reason=placed.reason
        )

    def _lose(self, node: NodeId, now: float) -> None:
        name = self.fleet.fail(node)
        self.layout_changed = True
        if name is not None:
            why = f"node {node} failed; it is replaced"
            self.planner.table.supply = self._supply()
            self._apply(self.planner.fail_node(name, now=now), now, why=why)
        for job in self.placements:
            permit = self._permits.permit(job)
            if permit is not None and permit.holding and node in permit.nodes:
                self._updates.remove(job)
                self._updates.touch(job)
        self._let_in(now)

    def _apply(self, assignments: tuple[AssignNodes, ...], now: float, *, why: str = "") -> None:
        """`why` replaces the planner's reason where given; the latter names nodes by planner
        names."""
        self._bind_nodes()
        for each in assignments:
            self.layout_changed = True
            self._assign(self.placements[each.placement.job], each, why or each.reason, now)

    def _bind_nodes(self) -> None:
        """Gives machines to the planner's new nodes, then takes those of its nodes that are
        gone."""
        came, gone = self.planner.table.take_changes()
        for name, pool in came.items():
            self.fleet.bind(name, pool)
        for name in gone:
            self.fleet.release(name)
        self.layout_changed |= bool(came or gone)

    def _assign(self, placed: JobPlacement, to: AssignNodes, reason: str, now: float) -> None:
        placed.reason = reason
        placed.to, placed.to_group, placed.notified = to.placement, to.group, False
        self.unsaved.add(placed.job)
        if to.decision is PlacementDecision.PLACED:
            placed.placed_s = now
            self.planner.facts[placed.job].belief()
        rollout, training = self.machines(to.placement)
        self._updates.add(
            PlanJob(
                decision=to.decision,
                job=placed.job,
                group=to.group,
                rollout_nodes=rollout,
                training_nodes=training,
                beside=self.planner.table.beside(to.placement, to.group),
                reason=reason,
            )
        )
        match to.decision:
            case PlacementDecision.PLACED:
                self._enter_if_room(placed, now)
            case PlacementDecision.MOVED:
                if not placed.started or placed.at is None:
                    placed.changed = True
                    # The job has no state on the nodes that it would leave.
                    self._leave_old(placed, now)
            case PlacementDecision.RESTARTED:
                self._restart(placed, to.placement, now)

    def _restart(self, placed: JobPlacement, placement: Placement, now: float) -> None:
        """A phase on nodes that the job keeps runs to its end; any other is over now."""
        self._keep_state(placed, self.residency.kept(placed.job, placement))
        permit = self._permits.permit(placed.job)
        own = {node for nodes in self.machines(placement) for node in nodes}
        if permit is not None and not (permit.holding and own.issuperset(permit.nodes)):
            self._updates.remove(placed.job)
        placed.at, placed.changed = None, True
        self._updates.touch(placed.job)
        self._enter_if_room(placed, now)

    def _leave_old(self, placed: JobPlacement, now: float) -> None:
        placed.at = None
        self._keep_state(placed, ())
        self._updates.touch(placed.job)
        self.unsaved.add(placed.job)
        self.layout_changed = True
        self.planner.complete_move(placed.job, now=now)
        self._bind_nodes()
        self._let_in(now)

    def _keep_state(self, placed: JobPlacement, nodes: tuple[NodeId, ...]) -> None:
        self.residency.keep(placed.job, nodes, placed.spec.host_bytes)

    def _enter_if_room(self, placed: JobPlacement, now: float) -> None:
        assert placed.to is not None
        if not self.residency.has_room(placed.to, placed.spec.host_bytes):
            return
        placed.moves += placed.started
        placed.arrived_s = now if placed.started else None
        self._keep_state(placed, placed.to.nodes)
        placed.arrive()
        self._updates.arrived(placed.job)
        self.unsaved.add(placed.job)

    def _let_in(self, now: float) -> None:
        """Binds machines first, then memory for jobs between two placements, then nodes for
        the queue."""
        for name in self.fleet.bind_awaited():
            self.layout_changed = True
            self._updates.touch(
                *(job for job, placed in self.placements.items() if _is_on(placed, name))
            )
        for placed in self.placements.values():
            if placed.stage is PlacementStage.BETWEEN and all(self.machines(placed.to)):
                self._enter_if_room(placed, now)
        self._admit(now)

    def _admit(self, now: float) -> None:
        """First come, first served; a later job may pass if it takes no free node."""
        table = self.planner.table
        table.supply = self._supply()
        waiting = [one for one in self.placements.values() if one.stage is PlacementStage.QUEUED]
        first = ""
        for placed in waiting[:_QUEUE_TRIES]:
            try:
                placement = self.planner.place_job(
                    placed.spec, submitted_s=placed.submitted_s, now=now
                )
            except Exhausted as error:
                table.supply = dict.fromkeys(Pool, 0)
                reason = f"job {first} waits longer for free nodes" if first else str(error)
                first = first or placed.job
                if placed.reason != reason:
                    placed.reason = reason
                    self.unsaved.add(placed.job)
                    self._updates.add(QueueJob(job=placed.job, reason=placed.reason))
                continue
            self._apply((placement,), now)

    def _supply(self) -> dict[Pool, int]:
        """Machines in use plus free machines that no job awaits, per pool."""
        up = self.planner.table.up
        return {pool: up[pool] + self.fleet.spare(pool) for pool in self.config.pools}

    def _is_apart(self, placed: JobPlacement) -> bool:
        permit = self._permits.permit(placed.job)
        return permit is None or permit.stage is PermitStage.APART or permit.epoch == NO_EPOCH


def _is_on(placed: JobPlacement, name: NodeId) -> bool:
    return placed.at is not None and name in placed.at.nodes
