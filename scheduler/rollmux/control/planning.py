"""The phase service of a control that plans: jobs are submitted, and their permits follow the plan.

Decides nothing itself: the runtime does. The service keeps permits and plan in one
transaction, so that a phase is learned from once, whenever the control ends: one record per job
and one for the layout.
"""

from typing import Any, Final

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId
from scheduler.model import JobSpec, PhaseSpec
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.cluster_record import (
    ClusterLayout,
    ClusterRecord,
    JobRecord,
    job_record,
    layout,
    strangers,
)
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_limits import KINDS
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.runtime import PhaseRuntime, RuntimeConfig
from scheduler.rollmux.cluster.runtime_events import (
    Call,
    NodeReport,
    PlanEffect,
    RuntimeEffect,
    RuntimeEvent,
    Submit,
)
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_service import JOBS_MAX, RETRY_S, PhaseService
from scheduler.rollmux.control.wire import (
    Accepted,
    CallRefused,
    Ended,
    EnterReply,
    Placed,
    PlanStatus,
    Reply,
    Waiting,
)
from scheduler.rollmux.permits.events import Enter, Leave, Register
from scheduler.rollmux.planner.planner import GroupPlanner

_LAYOUT: Final = "layout"
_JOB: Final = "job/"
_PLANS: Final = "this control plans: submit the job, and it is placed"


class PlanningService(PhaseService):
    """Raises ConfigError where the state file is of a control that does not plan."""

    def __init__(self, settings: ControlSettings, clock: Clock) -> None:
        super().__init__(settings, clock)
        for machine in strangers(self.cluster):
            self._observe(NodeReport(node=machine, failed=True))
            if self.cluster.fleet.pool_of(machine) is not None:
                self._observe(NodeReport(node=machine, failed=False))

    @property
    def runtime(self) -> PhaseRuntime:
        """The runtime; read-only for callers."""
        assert isinstance(self._policy, PhaseRuntime)
        return self._policy

    @property
    def cluster(self) -> ClusterPolicy:
        """The cluster policy; read-only for callers."""
        return self.runtime.cluster

    def call(self, message: Call) -> Reply:
        match message:
            case Submit():
                return self.submit(message)
            case NodeReport():
                return self.report(message)
            case _:
                return super().call(message)

    def register(self, given: Register) -> CallRefused:
        return CallRefused(reason=f"job {given.terms.job}: {_PLANS}")

    def submit(self, message: Submit) -> Placed | Waiting | CallRefused:
        """Repeated with the same declaration, also to learn the job's present placement.

        A job notified of a move sends this again when it has left its old nodes.
        """
        given = message.spec
        known = self.cluster.placements.get(given.job)
        refusal = self.cluster.refusal(given)
        if refusal:
            return CallRefused(reason=refusal)
        if known is None and len(self.cluster.placements) >= JOBS_MAX:
            return CallRefused(reason=f"{JOBS_MAX} jobs are known", retry_after_s=RETRY_S)
        self._observe(message)
        placed = self.cluster.placements[given.job]
        if placed.stage is PlacementStage.QUEUED:
            known_jobs = self.cluster.placements.values()
            queued = (one for one in known_jobs if one.stage is PlacementStage.QUEUED)
            ahead = sum(one.number < placed.number for one in queued)
            return Waiting(reason=placed.reason or "others wait longer", ahead=ahead)
        if placed.at is None:
            return Waiting(reason="it waits for room on its new nodes", ahead=0)
        rollout, training = self.cluster.machines(placed.at)
        return Placed(
            job=placed.job,
            group=placed.group or "",
            rollout_nodes=rollout,
            training_nodes=training,
            reason=placed.reason,
            harvesting=given.harvesting and self.cluster.config.harvesting,
        )

    def report(self, given: NodeReport) -> Accepted | CallRefused:
        fleet = self.cluster.fleet
        if fleet.pool_of(given.node) is None and not fleet.has_up(given.node):
            return CallRefused(reason=f"no node {given.node}")
        self._observe(given)
        return Accepted()

    def entry_reply(self, entry: Enter) -> EnterReply:
        held_up = self.runtime.held_up(entry.job, entry.kind)
        if not held_up:
            return super().entry_reply(entry)
        changed = self.cluster.placements[entry.job].changed
        return CallRefused(reason=held_up, retry_after_s=RETRY_S, unknown=changed)

    def leave(self, leave: Leave) -> Accepted | Ended:
        reply = super().leave(leave)
        placed = self.cluster.placements.get(leave.job)
        if isinstance(reply, Accepted) and placed and placed.notified and not leave.failed:
            return Accepted(move=self.cluster.order_move(placed), unload=reply.unload)
        return reply

    def metrics(self) -> bytes:
        self._metrics.plan.show(self.cluster, now=self._clock.now())
        return super().metrics()

    def plan_of(self, job: JobId) -> PlanStatus | None:
        cluster, now = self.cluster, self._clock.now()
        placed, facts = cluster.placements.get(job), cluster.planner.facts.get(job)
        if placed is None:
            return None
        rollout, training = cluster.machines(placed.at)
        waited_until_s = now if placed.placed_s is None else placed.placed_s
        slowdown = credit_s = None
        # Before the first iteration ended, both would compare the elapsed time with a cold start.
        if facts is not None and placed.iterations:
            slowdown, credit_s = facts.settled_slowdown(now), facts.settled_credit_s(now)
        return PlanStatus(
            job=job,
            stage=placed.stage,
            group=placed.group or placed.to_group or "",
            rollout_nodes=rollout,
            training_nodes=training,
            moves_to=tuple(node for side in cluster.machines(placed.to) for node in side),
            reason=placed.reason,
            slo=placed.spec.slo,
            slowdown=slowdown,
            credit_s=credit_s,
            iterations=placed.iterations,
            moves=placed.moves,
            waits_s=max(0.0, waited_until_s - placed.submitted_s),
        )

    def _observe(self, event: RuntimeEvent) -> tuple[RuntimeEffect, ...]:
        began_s = self._clock.now()
        effects = super()._observe(event)
        if any(isinstance(each, PlanEffect) for each in effects):
            self._metrics.plan.decision_s.observe(self._clock.now() - began_s)
        return effects

    def _retry_s(self, entry: Enter) -> float | None:
        placed = self.cluster.placements.get(entry.job)
        kinds = () if placed is None else tuple(one.kind for one in placed.spec.phases)
        return RETRY_S if entry.kind in kinds else None

    def _new_policy(self) -> PhaseRuntime:
        assert self.settings.cluster is not None
        return PhaseRuntime(RuntimeConfig(permits=self.config, cluster=self.settings.cluster))

    def _kept(self) -> dict[str, Any] | None:
        now = self._clock.now()
        permits, plan = self.state.snapshot(now=now), self.state.plan()
        if permits is None and not plan:
            return None
        permits = permits or {"epoch": 0, "ticket": 0, "jobs": []}
        by_s = self.state.shift_s(now=now)
        jobs = tuple(
            msgspec.json.decode(record, type=JobRecord).shifted(by_s)
            for name, record in plan.items()
            if name.startswith(_JOB)
        )
        known = {record.placed.job for record in jobs}
        unknown = sorted({one["terms"]["job"] for one in permits["jobs"]} - known)
        if unknown:
            raise ConfigError(
                f"jobs of the state file were placed by hand, {unknown[0]} among them: "
                "start without nodes, or with another state file"
            )
        where = msgspec.json.decode(plan.get(_LAYOUT, b"{}"), type=ClusterLayout)
        record = ClusterRecord(layout=where, jobs=jobs)
        return {"permits": permits, "plan": msgspec.to_builtins(record)}

    def _begin_anew(self, snapshot: dict[str, Any]) -> None:
        before = self.cluster
        super()._begin_anew(snapshot)
        self.cluster.unsaved |= before.unsaved
        self.cluster.layout_changed |= before.layout_changed

    def _plan_records(self) -> dict[str, bytes | None]:
        return _changed_records(self.cluster)

    def _plan_kept(self) -> None:
        self.cluster.unsaved.clear()
        self.cluster.layout_changed = False


def make_service(settings: ControlSettings, clock: Clock) -> PhaseService:
    """Raises ConfigError if the state file belongs to another kind of control."""
    kind = PhaseService if settings.cluster is None else PlanningService
    return kind(settings, clock)


def compile_for(cluster: ClusterConfig | None) -> None:
    """Compiles a planner's forecasts before the first call: tens of seconds on a new machine.

    A client of a present but silent control gives its permit up in the end; a client of an absent
    control goes on.
    """
    if cluster is None:
        return
    planner = GroupPlanner(cluster.judge, cluster.types, cluster.planner)
    for name in ("first", "second"):
        phases = tuple(PhaseSpec(kind=kind, max_s=100.0, mean_s=80.0) for kind in KINDS)
        job = JobSpec(job=JobId(name), phases=phases, slo=100.0, host_bytes=0)
        planner.place_job(job, now=0.0)
    planner.review(now=0.0)


def _changed_records(policy: ClusterPolicy) -> dict[str, bytes | None]:
    """Records to write, None for removed ones; empty if nothing has changed."""
    records: dict[str, bytes | None] = {}
    for job in sorted(policy.unsaved):
        record = job_record(policy, job)
        records[_JOB + job] = None if record is None else msgspec.json.encode(record)
    if policy.layout_changed:
        records[_LAYOUT] = msgspec.json.encode(layout(policy))
    return records
