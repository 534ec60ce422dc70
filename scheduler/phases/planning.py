"""The desk of a control that plans: jobs are submitted, and their permits follow the plan.

What jobs and permits do is told to the cluster policy, and what it says is done with the permits
before anything is answered and kept with them in one transaction, so that a phase is learned from
once, whenever the control ends.
"""

from pathlib import Path
from typing import Any, Final

from harvester.contracts.clock import Clock, monotonic_origin
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import JobId
from scheduler.phases.desk import JOBS_MAX, PermitDesk
from scheduler.phases.kept_plan import (
    KeptClock,
    changed_records,
    kept_jobs,
    restore_plan,
    shift_s,
    shifted,
)
from scheduler.phases.plan_status import plan_status
from scheduler.phases.wire import (
    Call,
    Enter,
    EnterReply,
    Forget,
    Kept,
    Leave,
    LeaveReply,
    Left,
    Move,
    NodeReport,
    Placed,
    PlaceReply,
    PlanStatus,
    Queued,
    Refused,
    Reply,
    ReportReply,
    SubmitReply,
)
from scheduler.policy.cluster.cluster import ClusterPolicy
from scheduler.policy.cluster.config import ClusterConfig
from scheduler.policy.cluster.events import (
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
    PlanReviewed,
)
from scheduler.policy.cluster.memory import strangers
from scheduler.policy.cluster.stays import Stay, StayStage
from scheduler.policy.cluster.submission import Submission
from scheduler.policy.phases.events import (
    EndPermit,
    EndReason,
    GrantPermit,
    PermitEffect,
    PermitEvent,
)
from scheduler.policy.phases.terms import JobTerms, PermitsConfig

_RETRY_S: Final = 0.5
_LEAST_S: Final = 1e-3
"""Of a phase: no estimate is made of nothing."""
_LEASED_MOST: Final = 9.0
"""Times the length of a phase that leases may have taken off it."""
_PLANS: Final = "this control plans: submit the job, and it is placed"


class PlanningDesk(PermitDesk):
    """Raises ConfigError where the state file is of a control that does not plan."""

    _cluster: ClusterPolicy | None = None
    """Not before the permits are there, which it reads."""

    def __init__(
        self,
        config: PermitsConfig,
        cluster: ClusterConfig,
        clock: Clock,
        *,
        state: Path | None = None,
        journal: Path | None = None,
    ) -> None:
        self._shift_s, self._loading_s, self._leased_s = 0.0, 0.0, 0.0
        super().__init__(config, clock, state=state, journal=journal)
        self._settings = cluster
        self._reviewed_s = clock.now()
        self._heard_s: dict[JobId, float] = {}
        """When something was last heard of each placed job that is not in a phase."""
        self.cluster = self._begun(cluster)

    def call(self, message: Call) -> Reply:
        self._hear(message)
        match message:
            case Submission():
                return self.submit(message)
            case NodeReport():
                return self.report(message)
            case Forget(job=job) if job in self.cluster.stays:
                self._tell(JobGone(job=job))
                return Left()
            case _:
                return super().call(message)

    def place(self, terms: JobTerms) -> PlaceReply:
        return Refused(reason=f"job {terms.job}: {_PLANS}")

    def submit(self, given: Submission) -> SubmitReply:
        """The same submission may be said again, also to hear where the job is now."""
        known = self.cluster.stays.get(given.job)
        refusal = self.cluster.refusal(given)
        if refusal:
            return Refused(reason=refusal)
        if known is None and len(self.cluster.stays) >= JOBS_MAX:
            return Refused(reason=f"{JOBS_MAX} jobs are known", retry_after_s=_RETRY_S)
        self._tell(JobSubmitted(submission=given))
        stay = self.cluster.stays[given.job]
        if stay.stage is StayStage.QUEUED:
            waiting = [one for one in self.cluster.stays.values() if one.stage is StayStage.QUEUED]
            ahead = sum(one.number < stay.number for one in waiting)
            return Queued(reason=stay.reason or "others wait longer", ahead=ahead)
        rollout, training = self.cluster.machines(stay.at or stay.to)
        return Placed(
            group=stay.group or stay.to_group or "",
            rollout_nodes=rollout,
            training_nodes=training,
            reason=stay.reason,
            lease_s=self.config.lease_s,
            harvesting=given.harvesting and self._settings.harvesting,
        )

    def report(self, given: NodeReport) -> ReportReply:
        fleet = self.cluster.fleet
        if fleet.pool_of(given.node) is None and not fleet.has_up(given.node):
            return Refused(reason=f"no node {given.node}")
        self._tell(NodeLost(node=given.node) if given.failed else NodeBack(node=given.node))
        return Kept()

    def enter(self, entry: Enter) -> EnterReply:
        self._tell(PhaseAsked(job=entry.job, kind=entry.kind))
        held_up = self._held_up(entry)
        return held_up or super().enter(entry)

    def look(self, entry: Enter) -> EnterReply:
        held_up = self._held_up(entry)
        return held_up or super().look(entry)

    def leave(self, leave: Leave) -> LeaveReply:
        self._loading_s, self._leased_s = leave.loading_s, leave.leased_s
        reply = super().leave(leave)
        self._loading_s, self._leased_s = 0.0, 0.0
        stay = self.cluster.stays.get(leave.job)
        if isinstance(reply, Left) and stay is not None and stay.told and not leave.failed:
            rollout, training = self.cluster.machines(stay.to)
            return Left(
                move=Move(rollout_nodes=rollout, training_nodes=training, reason=stay.reason)
            )
        return reply

    def tick(self) -> None:
        super().tick()
        now = self._clock.now()
        try:
            if now - self._reviewed_s >= self._settings.review_s:
                self._reviewed_s = now
                self._tell(PlanReviewed())
                for job in self._silent(now):
                    self._tell(JobGone(job=job))
            elif self._plan_records():
                self._keep()
        except Exhausted:
            return

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return tuple(self.cluster.stays)

    def metrics(self) -> bytes:
        self._metrics.plan.show(self.cluster, now=self._clock.now())
        return super().metrics()

    def plan_of(self, job: JobId) -> PlanStatus | None:
        return plan_status(self.cluster, job, now=self._clock.now())

    def _begun(self, settings: ClusterConfig) -> ClusterPolicy:
        cluster, kept = ClusterPolicy(settings, self._policy), self._state.plan()
        unknown = sorted(set(self._policy.jobs) - kept_jobs(kept))
        if unknown:
            raise ConfigError(
                f"jobs of the state file were placed by hand, {unknown[0]} among them: "
                "start without nodes, or with another state file"
            )
        restore_plan(cluster, kept, by_s=self._shift_s)
        self._cluster = cluster
        self.cluster = cluster
        now = self._clock.now()
        self._heard_s = dict.fromkeys(cluster.stays, now)
        self._tell(ClusterResumed())
        for machine in strangers(cluster):
            self._tell(NodeLost(node=machine))
            if cluster.fleet.pool_of(machine) is not None:
                self._tell(NodeBack(node=machine))
        return cluster

    def _held_up(self, entry: Enter) -> EnterReply | None:
        """Why a job that is known has no line to stand in now; None where it has."""
        stay = self.cluster.stays.get(entry.job)
        if stay is None:
            return None
        terms = self.cluster.wanted_terms(stay)
        if terms is not None and terms.phase(entry.kind) is not None:
            return None
        standing = self._policy.standing(entry.job)
        if standing is not None and standing.holding:
            return None
        why = "it waits for room on its new nodes"
        if stay.stage is StayStage.QUEUED:
            why = f"it waits for a place: {stay.reason}"
        elif stay.at is not None:
            why = f"{stay.reason}, and none is free yet"
        return Refused(reason=why, retry_after_s=_RETRY_S)

    def _hear(self, message: Call) -> None:
        job = None if isinstance(message, NodeReport) else message.job
        if job in self.cluster.stays:
            self._heard_s[job] = self._clock.now()

    def _silent(self, now: float) -> list[JobId]:
        """Placed jobs of which nobody was heard for long; who waits for a place may be silent."""
        placed = [job for job, stay in self.cluster.stays.items() if _is_placed(stay)]
        self._heard_s = {job: self._heard_s.get(job, now) for job in placed}
        return [job for job in placed if now - self._heard_s[job] > self._settings.gone_s]

    def _observe(self, event: PermitEvent) -> tuple[PermitEffect, ...]:
        effects = self._decide(event, now=self._clock.now())
        self._follow(effects)
        self._keep()
        return effects

    def _tell(self, event: ClusterEvent) -> None:
        self._plan(event)
        self._keep()

    def _plan(self, event: ClusterEvent) -> None:
        assert self._cluster is not None
        now = self._clock.now()
        effects = self._cluster.observe(event, now=now)
        self._metrics.plan.decision_s.observe(self._clock.now() - now)
        for following in effects:
            self._follow(self._decide(following, now=now))

    def _follow(self, effects: tuple[PermitEffect, ...]) -> None:
        """Tells the plan what became of permits, and does what follows."""
        for effect in effects if self._cluster is not None else ():
            match effect:
                case GrantPermit(job=job):
                    self._plan(PhaseBegan(job=job))
                case EndPermit(job=job, kind=kind, ended=EndReason.DONE):
                    solo_s = self._solo_s(effect)
                    self._plan(PhaseDone(job=job, kind=kind, solo_s=solo_s))
                case EndPermit(job=job, kind=kind, ended=EndReason.OVERRAN):
                    lasted_s = self._solo_s(effect)
                    self._plan(PhaseLost(job=job, overran=kind, at_least_s=lasted_s))
                case EndPermit(job=job):
                    self._plan(PhaseLost(job=job))
                case _:
                    pass

    def _solo_s(self, end: EndPermit) -> float:
        """How long the phase would have taken without loading, and on its own nodes alone."""
        standing = self._policy.standing(end.job)
        held_s = 0.0 if standing is None else self._clock.now() - standing.started_s
        leased_s = min(max(0.0, self._leased_s), _LEASED_MOST * held_s)
        return max(_LEAST_S, held_s - min(max(0.0, self._loading_s), held_s) + leased_s)

    def _translated(self, snapshot: dict[str, Any] | None) -> dict[str, Any] | None:
        self._shift_s = shift_s(self._state.plan(), self._kept_clock())
        return snapshot and shifted(snapshot, self._shift_s)

    def _plan_records(self) -> dict[str, bytes | None]:
        if self._cluster is None:
            return {}
        return changed_records(self._cluster, self._kept_clock())

    def _plan_kept(self) -> None:
        if self._cluster is not None:
            self._cluster.unsaved.clear()
            self._cluster.layout_changed = False

    def _kept_clock(self) -> KeptClock:
        return KeptClock(origin=monotonic_origin(), now_s=self._clock.now())


def _is_placed(stay: Stay) -> bool:
    return stay.stage is not StayStage.QUEUED
