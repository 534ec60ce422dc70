"""Grants run permits: which job's phase may run on which nodes, one holder per node at a time.

Every node has a line, first come, first served. A job enters the lines of all nodes that its phase
is pinned to at once, under one ticket, and starts when it may have all of them. When a phase ends,
the job's next phase is enqueued on its own nodes before its worker asks, so that the cycle keeps
its order. A permit is a lease with an epoch: a silent holder loses it, and its later messages are
refused. Long tails are asked to make room for waiting jobs. No I/O, no clock.
"""

from collections.abc import Set
from typing import Any, ClassVar

import msgspec

from harvester.contracts.ids import JobId, NodeId
from scheduler.rollmux.permits.endings import end, ended, fail, stale
from scheduler.rollmux.permits.events import (
    AdmitJob,
    Beat,
    ControlResumed,
    DropPlace,
    EndPermit,
    EnqueuePhase,
    Enter,
    Forget,
    FreeNodes,
    Leave,
    PermitEffect,
    PermitEndReason,
    PermitEvent,
    Recall,
    Refuse,
    Register,
    RevokePermit,
    TimeElapsed,
    Unloaded,
    WarnHolder,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage, PermitTrigger
from scheduler.rollmux.permits.obstacles import make_room, revoke
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.starts import enqueue, grant, join, start_jobs
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig, terms_fault
from scheduler.rollmux.permits.watchdog import WatchdogVerdict, bound_s, deadlines_s, verdict

Effects = list[PermitEffect]


class PermitPolicy:
    NAME: ClassVar[str] = "scheduler.policy.phases"
    SAMPLE: ClassVar[Any] = PermitEvent

    def __init__(self, config: PermitsConfig) -> None:
        self.config = config
        self._table = PermitTable(config)
        self._tended_s = float("-inf")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PermitPolicy":
        return cls(msgspec.convert(config, PermitsConfig))

    def snapshot(self) -> dict[str, Any]:
        epoch, ticket = self._table.counters
        return {"epoch": epoch, "ticket": ticket, "jobs": self._table.snapshot()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Raises ValueError where two jobs hold one node."""
        self._table.counters = (snapshot["epoch"], snapshot["ticket"])
        self._table.restore(snapshot["jobs"])

    @property
    def counters(self) -> tuple[int, int]:
        """Last epoch and last ticket; neither is ever given again."""
        return self._table.counters

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return tuple(sorted(self._table.jobs))

    def close(self, nodes: Set[NodeId]) -> None:
        """Sets the failed nodes, exactly these: no phase starts there."""
        self._table.closed = nodes

    def permit(self, job: JobId) -> JobPermit | None:
        """The job's record; read-only for callers."""
        return self._table.jobs.get(job)

    def allow_load(self, job: JobId, seconds: float) -> None:
        """The running phase of the job may exceed its bound by that time."""
        self._table.jobs[job].load_s = seconds

    def on(self, node: NodeId) -> JobId | None:
        return self._table.on(node)

    def ahead(self, job: JobId, *, now: float) -> int:
        """Jobs that come before this one on its nodes, with a permit or asking for one."""
        permit = self._table.jobs.get(job)
        return 0 if permit is None else len(self._table.ahead(permit, now))

    def due_s(self) -> float:
        """Time at which `TimeElapsed` will next change something; infinite if nothing is due."""
        jobs = self._table.jobs.values()
        due = (at for each in jobs for at in deadlines_s(each, self.config) if at > self._tended_s)
        return min(due, default=float("inf"))

    def observe(self, event: PermitEvent, *, now: float) -> tuple[PermitEffect, ...]:
        return self._served(self._received(event, now), now)

    def register(self, terms: JobTerms, *, now: float) -> tuple[PermitEffect, ...]:
        return self._served(_register(self._table, terms), now)

    def remove(self, job: JobId, *, now: float, for_good: bool) -> tuple[PermitEffect, ...]:
        """Takes a job off its nodes; unless `for_good`, the knowledge about it stays."""
        return self._served(_remove(self._table, job, now=now, for_good=for_good), now)

    def _served(self, effects: Effects, now: float) -> tuple[PermitEffect, ...]:
        touched = self._table.take_touched()
        if not touched:
            return tuple(effects)
        effects += start_jobs(self._table, touched, now=now)
        # A holder that has its nodes whole again may make room on all of them.
        touched += self._table.take_touched()
        effects += make_room(self._table, self.config, touched, now=now)
        # A job that is asked to make room leaves its lines, where others may wait behind it.
        return (*effects, *start_jobs(self._table, self._table.take_touched(), now=now))

    def _received(self, event: PermitEvent, now: float) -> Effects:
        table = self._table
        match event:
            case Register():
                return _register(table, event.terms)
            case Forget():
                return _remove(table, event.job, now=now, for_good=True)
            case Enter():
                return _request(table, event, now=now)
            case Withdraw():
                return _withdraw(table, event, now=now)
            case Beat():
                return self._beat(event, now)
            case Leave():
                return [*ended(table, event, now=now)]
            case Unloaded():
                if (unloaded := table.jobs.get(event.job)) is not None:
                    table.unload(unloaded, event.nodes)
                return []
            case ControlResumed():
                self._resume(now)
                return []
            case TimeElapsed():
                self._tended_s = now
                return self._tend(now)

    def _beat(self, event: Beat, now: float) -> Effects:
        permit = self._table.holder(event.job, event.epoch)
        if permit is None:
            return [stale(event.job, event.epoch)]
        permit.last_call_s = now
        permit.work_until(now)
        permit.tokens = max(permit.tokens, event.tokens)
        permit.complete_ratio = max(permit.complete_ratio, event.complete_ratio)
        if permit.course is not None:
            permit.course = permit.course.progressed(event.complete_ratio, at_s=permit.worked_s)
        if event.narrowed and permit.move(PermitTrigger.NARROWED):
            if permit.tail is not None:
                permit.tail = msgspec.structs.replace(permit.tail, left_s=permit.worked_s)
            freed = self._table.narrow(permit)
            return [FreeNodes(job=event.job, epoch=event.epoch, nodes=freed)]
        if permit.in_tail:
            # Waiting jobs may start on what the tail leaves.
            self._table.touch_lines(permit.nodes)
        return [] if event.recall is None else [*self._recall(permit, event.recall, now)]

    def _recall(self, permit: JobPermit, recall: Recall, now: float) -> list[EnqueuePhase]:
        """Requests the nodes that a tail has left for it again, under the permit that it holds.

        The tail goes on meanwhile, and its phase counts once, with its whole duration.
        """
        table, phase = self._table, permit.phase
        if phase is None or permit.stage is not PermitStage.TAILING or permit.awaits:
            return []
        if permit.accelerators:
            # It keeps a part of a node, and others may have the rest.
            return []
        missing = tuple(node for node in phase.nodes if node not in permit.nodes)
        held = any(table.on(node) is not None for node in missing)
        asked_for = any(table.asks(other, now) for other in table.in_line(missing))
        if not missing or (recall is Recall.WHEN_FREE and (held or asked_for)):
            return []
        table.join(permit, table.next_ticket(), missing)
        return [
            EnqueuePhase(job=permit.job, kind=phase.kind, ticket=permit.ticket, nodes=permit.awaits)
        ]

    def _tend(self, now: float) -> Effects:
        """Effects of time alone: silent holders, overruns, grace periods."""
        effects: Effects = []
        for _, permit in sorted(self._table.jobs.items()):
            if permit.holding:
                effects += self._watch(permit, now)
            elif not self._table.asks(permit, now):
                self._table.touch(permit.awaits)
        return effects

    def _watch(self, permit: JobPermit, now: float) -> list[EndPermit | WarnHolder | RevokePermit]:
        table, config = self._table, self.config
        requested = permit.warned_s is not None and table.is_requested(permit, now)
        lasted_s = now - permit.started_s
        match verdict(permit, config, requested=requested, now=now):
            case WatchdogVerdict.WELL:
                return []
            case WatchdogVerdict.SILENT:
                reason = f"no call for {config.lease_s:g} s"
                return [fail(table, permit, PermitEndReason.SILENT, reason, now=now)]
            case WatchdogVerdict.OUT_OF_GRACE:
                words = f"ran for {lasted_s:.1f} s and did not end on request"
                reason = PermitEndReason.OVERRAN
                # The process still runs: the next job waits until it stops or falls silent.
                return [fail(table, permit, reason, words, now=now, stays_loaded=True)]
            case WatchdogVerdict.LATE:
                permit.warned_s = now
                bound = f"longer than its bound of {bound_s(permit):.1f} s"
                reason = f"runs for {lasted_s:.1f} s, {bound}"
                return [WarnHolder(job=permit.job, epoch=permit.epoch, reason=reason)]
            case WatchdogVerdict.OBSTRUCTS:
                return [revoke(table, config, permit, now=now)]

    def _resume(self, now: float) -> None:
        """Counts no silence before now: no holder could be heard until now."""
        for permit in self._table.jobs.values():
            # A record of before a reboot lies in this clock's future.
            permit.started_s = min(permit.started_s, now)
            permit.worked_at_s = min(permit.worked_at_s, now)
            permit.enqueued_s = min(permit.enqueued_s, now)
            if permit.warned_s is not None:
                permit.warned_s = min(permit.warned_s, now)
            if permit.revoked_s is not None:
                permit.revoked_s = min(permit.revoked_s, now)
            if permit.holding or permit.last_call_s is not None:
                permit.last_call_s = now
            permit.course = None


def _register(table: PermitTable, terms: JobTerms) -> Effects:
    job, fault = terms.job, terms_fault(terms)
    if fault:
        return [Refuse(job=job, reason=fault)]
    permit = table.admit(terms)
    table.leave_lines(permit)
    effects: Effects = [AdmitJob(job=job)]
    if permit.stage is PermitStage.WAITING and permit.kind is not None:
        phase = terms.phase(permit.kind)
        if phase is None:
            permit.move(PermitTrigger.ENDED)
        else:
            effects.append(join(table, permit, phase, permit.ticket))
    return effects


def _remove(table: PermitTable, job: JobId, *, now: float, for_good: bool) -> Effects:
    """Takes a job off its nodes and out of all lines; unless `for_good` it stays known."""
    permit = table.jobs.get(job)
    if permit is None:
        return []
    effects: Effects = []
    if permit.holding:
        # Its process does not know yet: the next job waits until it does, or is silent for a lease.
        reason, words = PermitEndReason.LEFT, "the job left"
        effects.append(end(table, permit, reason, words, now=now, stays_loaded=True))
    table.leave_lines(permit)
    if for_good:
        table.unload(permit, permit.loaded)
        table.remove(job)
    else:
        permit.move(PermitTrigger.ENDED)
    return [*effects, DropPlace(job=job, forgotten=for_good)]


def _request(table: PermitTable, event: Enter, *, now: float) -> Effects:
    permit = table.jobs.get(event.job)
    phase = permit.terms.phase(event.kind) if permit else None
    if permit is None or phase is None:
        return [Refuse(job=event.job, reason=f"no {event.kind} phase of such a job")]
    if permit.holding:
        if (permit.holder, permit.kind) != (event.holder, event.kind):
            reason = f"the job holds a permit for its {permit.kind} phase"
            return [Refuse(job=event.job, reason=reason)]
        permit.last_call_s = now
        return []
    if permit.holder != event.holder and table.waits(permit, now):
        return [Refuse(job=event.job, reason="another process of the job waits")]
    effects: Effects = []
    if (permit.stage, permit.kind) != (PermitStage.WAITING, event.kind):
        table.leave_lines(permit)
        effects.append(enqueue(table, permit, phase, now=now))
    permit.holder, permit.last_call_s = event.holder, now
    table.touch(permit.awaits)
    if not phase.nodes:
        effects.append(grant(table, permit, phase, (), now=now))
    return effects


def _withdraw(table: PermitTable, event: Withdraw, *, now: float) -> Effects:
    permit = table.jobs.get(event.job)
    if permit is None or permit.holder != event.holder:
        return []
    if permit.holding:
        words = "its worker stopped waiting"
        return [end(table, permit, PermitEndReason.WITHDRAWN, words, now=now)]
    table.leave_lines(permit)
    return [DropPlace(job=event.job)] if permit.move(PermitTrigger.ENDED) else []
