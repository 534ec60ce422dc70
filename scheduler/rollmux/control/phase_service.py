"""The shell around the permit policy: calls in, decisions kept and journalled, answers out.

Never blocks and is used by one thread at a time; a waiting caller looks again when `on_change`
signals a change. The socket server and the Ray actor are the shells around it.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import JobId
from scheduler.decision_log import DecisionLog
from scheduler.rollmux.cluster.runtime_events import (
    Call,
    NodeReport,
    PhasePolicy,
    RuntimeEffect,
    RuntimeEvent,
    Submit,
)
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.control_state import ControlState
from scheduler.rollmux.control.metrics import PhaseMetrics
from scheduler.rollmux.control.wire import (
    Accepted,
    CallRefused,
    Ended,
    EnterReply,
    Granted,
    JobStatus,
    PermitSnapshot,
    PlanStatus,
    Reply,
    Waiting,
)
from scheduler.rollmux.permits.events import (
    Beat,
    ControlResumed,
    EndPermit,
    Enter,
    Forget,
    Leave,
    PermitEndReason,
    Refuse,
    Register,
    TimeElapsed,
    Unloaded,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import terms_changes

_log = logging.getLogger(__name__)
JOBS_MAX = 4096
TICK_S = 0.1
RETRY_S = 0.5
_TAKEN = (PermitEndReason.LEFT, PermitEndReason.OVERRAN)
"""Ends of permits whose processes live, and have a lease to learn of it."""


class PhaseService:
    """Raises ConfigError where its state file is another version's, or of a control that plans."""

    def __init__(self, settings: ControlSettings, clock: Clock) -> None:
        self.settings = settings
        self.config = settings.permits
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._policy = self._new_policy()
        self._metrics = PhaseMetrics()
        self.state = ControlState(settings.state)
        snapshot = self._kept()
        if snapshot is not None:
            self._policy.restore(snapshot)
            self._metrics.resume(self._policy)
        self._log = DecisionLog(
            settings.journal,
            self._policy,
            msgspec.to_builtins(self._policy.config),
            max_bytes=settings.journal_bytes,
            now=clock.now(),
            snapshot=snapshot,
        )
        self._ticked_s = clock.now()
        self._loaded_seen_s: dict[JobId, float] = {}
        """Time of the last call from a process that left its job's state loaded."""
        self._unsaved: set[JobId] = set()
        if snapshot is not None:
            self._observe(ControlResumed())

    @property
    def policy(self) -> PhasePolicy:
        """The permit policy; read-only for callers."""
        return self._policy

    def call(self, message: Call) -> Reply:
        """Raises Exhausted where its decision could not be kept: ask again."""
        match message:
            case Register():
                return self.register(message)
            case Enter():
                return self.enter(message)
            case Beat():
                return self.beat(message)
            case Leave():
                return self.leave(message)
            case Unloaded():
                return self.unloaded(message)
            case Withdraw() | Forget():
                self._observe(message)
                return Accepted()
            case Submit() | NodeReport():
                return CallRefused(
                    reason="this control does not plan: it was started without nodes"
                )

    def register(self, given: Register) -> Accepted | CallRefused:
        terms = given.terms
        known = self._policy.permit(terms.job)
        if known is None and len(self._policy.jobs) >= JOBS_MAX:
            return CallRefused(reason=f"{JOBS_MAX} jobs are registered", retry_after_s=RETRY_S)
        if known is None or known.terms != terms:
            changes = "" if known is None else terms_changes(known.terms, terms)
            refusal = _refusal(self._observe(given))
            if refusal:
                return CallRefused(reason=refusal)
            if changes:
                _log.warning("job %s was registered with other terms: %s", terms.job, changes)
        return Accepted()

    def enter(self, entry: Enter) -> EnterReply:
        permit = self._policy.permit(entry.job)
        if permit is None and entry.job not in self._policy.jobs:
            return CallRefused(reason=f"job {entry.job} is not placed", unknown=True)
        effects = self._observe(entry)
        refusal = _refusal(effects)
        if refusal:
            unknown = any(isinstance(each, Refuse) and each.unknown for each in effects)
            return CallRefused(reason=refusal, retry_after_s=self._retry_s(entry), unknown=unknown)
        return self.entry_reply(entry)

    def entry_reply(self, entry: Enter) -> EnterReply:
        """The reply to an entry; changes nothing. Raises Exhausted as `call` does."""
        if entry.job in self._unsaved:
            raise Exhausted("a decision is not on disk yet")
        permit = self._policy.permit(entry.job)
        if permit is None:
            return CallRefused(reason=f"job {entry.job} is not placed", unknown=True)
        if (permit.holder, permit.kind) != (entry.holder, entry.kind):
            return CallRefused(reason="another process of the job began", retry_after_s=RETRY_S)
        if permit.holding:
            return Granted(
                epoch=permit.epoch,
                nodes=permit.nodes,
                accelerators=permit.accelerators,
                lease_s=self.config.lease_s,
            )
        return Waiting(ahead=self._policy.ahead(entry.job, now=self._clock.now()))

    def beat(self, beat: Beat) -> PermitSnapshot | Ended:
        refusal = _refusal(self._observe(beat))
        permit = self._policy.permit(beat.job)
        if refusal or permit is None:
            return Ended(reason=refusal or "the job has left")
        return self._permit_state(permit)

    def leave(self, leave: Leave) -> Accepted | Ended:
        known = self._policy.permit(leave.job)
        if known is not None and (leave.stays_loaded or known.loaded_by == known.holder):
            self._loaded_seen_s[leave.job] = self._clock.now()
        refusal = _refusal(self._observe(leave))
        permit = self._policy.permit(leave.job)
        ended = None if permit is None or permit.epoch != leave.epoch else permit.ended
        # A leave whose reply was lost is repeated.
        if refusal and ended is not PermitEndReason.DONE:
            return Ended(reason=refusal)
        return Accepted(unload=() if permit is None else permit.unload)

    def unloaded(self, report: Unloaded) -> Accepted | Ended:
        permit = self._policy.permit(report.job)
        if permit is None:
            return Ended(reason=f"job {report.job} is not placed")
        if permit.loaded_by != report.holder:
            holds = permit.holding and permit.holder == report.holder
            return Accepted() if holds else Ended(reason="its process counts as gone")
        now, lease_s = self._clock.now(), self.config.lease_s
        seen_s = self._loaded_seen_s.get(report.job, float("-inf"))
        self._loaded_seen_s[report.job] = now
        # Reports a living process to the policy once per lease.
        if report.nodes or now // lease_s > seen_s // lease_s:
            self._observe(report)
        return Accepted(unload=permit.unload)

    def _unload_silent(self, now: float) -> None:
        """Counts a process that has to unload as gone, and all of its states, after one lease
        without a call."""
        for job in self._policy.jobs:
            permit = self._policy.permit(job)
            if permit is None or not permit.unload:
                continue
            if now - self._loaded_seen_s.setdefault(job, now) > self.config.lease_s:
                self._observe(Unloaded(job=job, holder=permit.loaded_by, nodes=permit.loaded))

    def tick(self) -> None:
        """Call every `TICK_S`; after a gap, silence of holders during it is forgiven."""
        now = self._clock.now()
        if now - self._ticked_s > self.config.lease_s / 2:
            self._loaded_seen_s.clear()
            with suppress(Exhausted):
                self._observe(ControlResumed())
        self._ticked_s = now
        if (snapshot := self._log.check(now=now)) is not None:
            self._begin_anew(snapshot)
        if self._unsaved or self._plan_records() or now >= self._policy.due_s():
            # Records that a full disk refuses are tried again at every tick, and reported by none.
            with suppress(Exhausted):
                self._observe(TimeElapsed())
        with suppress(Exhausted):
            self._unload_silent(now)

    def _retry_s(self, entry: Enter) -> float | None:
        """Delay before the next request, in s; None for a phase that the job does not have."""
        permit = self._policy.permit(entry.job)
        known = permit is None or permit.terms.phase(entry.kind) is not None
        return RETRY_S if known else None

    def plan_of(self, job: JobId) -> PlanStatus | None:  # noqa: ARG002 - a planning service's to say
        """Plan status of a job; None without a plan."""
        return None

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """All known jobs."""
        return self._policy.jobs

    def statuses(self) -> tuple[JobStatus, ...]:
        """Status of every job, for people and dashboards."""
        return tuple(map(self._status, self.jobs))

    def metrics(self) -> bytes:
        """Metrics in Prometheus's text format."""
        self._metrics.show(self._policy, now=self._clock.now())
        return self._metrics.render()

    def close(self) -> None:
        self._log.close()
        self.state.close()

    def _status(self, job: JobId) -> JobStatus:
        permit = self._policy.permit(job)
        # Without a permit: submitted, and without a placement or on its way to one.
        found = JobStatus(job=job, stage=PermitStage.APART)
        if permit is not None:
            found = msgspec.convert(permit, JobStatus, from_attributes=True)
        return msgspec.structs.replace(found, plan=self.plan_of(job))

    def _permit_state(self, permit: JobPermit) -> PermitSnapshot:
        ends_in_s: float | None = None
        if permit.stage is PermitStage.REVOKED and permit.revoked_s is not None:
            ends_s = permit.revoked_s + self.config.grace_s
            ends_in_s = max(0.0, ends_s - self._clock.now())
        found = msgspec.convert(permit, PermitSnapshot, from_attributes=True)
        return msgspec.structs.replace(found, ends_in_s=ends_in_s)

    def _observe(self, event: RuntimeEvent) -> tuple[RuntimeEffect, ...]:
        """Decided, journalled and kept, before anything that depends on it is answered."""
        now = self._clock.now()
        permit = self._policy.permit(event.job) if isinstance(event, Unloaded) else None
        loaded = () if permit is None else permit.loaded
        effects = self._policy.observe(event, now=now)
        self._metrics.decided(effects, self._policy, now=now)
        taken = (each for each in effects if isinstance(each, EndPermit) and each.ended in _TAKEN)
        self._loaded_seen_s |= {each.job: now for each in taken}
        changed = {each.job for each in effects if not isinstance(each, Refuse)}
        if permit is not None and permit.loaded != loaded:
            # Its record tells a restart where its states are.
            changed.add(permit.job)
        self._unsaved |= changed
        # A full disk costs the journal decisions, never a job its answer.
        snapshot = self._log.decided(now=now, sample=event, effects=effects)
        if snapshot is not None:
            self._begin_anew(snapshot)
        try:
            self._keep()
        except Exhausted:
            # A holder whose own decisions are all kept goes on while another's cannot be.
            holds = isinstance(event, Beat | Unloaded) and event.job not in self._unsaved
            if changed or not holds:
                raise
        return effects

    def _begin_anew(self, snapshot: dict[str, Any]) -> None:
        """Restarts the policy from the snapshot in the journal's new file, which then replays
        exactly."""
        self._policy = self._new_policy()
        self._policy.restore(msgspec.json.decode(msgspec.json.encode(snapshot)))
        self._log.policy = self._policy

    def _keep(self) -> None:
        """Raises Exhausted: nothing that was decided for these jobs may be answered then."""
        plan = self._plan_records()
        if self._unsaved or plan:
            job_permits = {job: self._policy.permit(job) for job in sorted(self._unsaved)}
            self.state.keep(self._policy.counters, job_permits, plan, self._clock.now())
            self._unsaved.clear()
            self._plan_kept()
            self.on_change()

    def _new_policy(self) -> PhasePolicy:
        return PermitPolicy(self.config)

    def _kept(self) -> dict[str, Any] | None:
        """The policy's kept state, in the times of this clock; None without a kept state."""
        if self.state.plan():
            raise ConfigError("the state file holds a plan: start the control with its nodes")
        return self.state.snapshot(now=self._clock.now())

    def _plan_records(self) -> dict[str, bytes | None]:
        """Records of the plan that belong to the same decision."""
        return {}

    def _plan_kept(self) -> None:
        pass


def _refusal(effects: tuple[RuntimeEffect, ...]) -> str:
    return next((effect.reason for effect in effects if isinstance(effect, Refuse)), "")
