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
from scheduler.rollmux.permits.accelerators import in_tail, work_until
from scheduler.rollmux.permits.admission import place, remove, request, withdraw
from scheduler.rollmux.permits.endings import ended, stale
from scheduler.rollmux.permits.events import (
    ControlResumed,
    FreeNodes,
    HolderHeard,
    JobLeft,
    JobPlaced,
    NodesUnloaded,
    PermitEffect,
    PermitEvent,
    PhaseEnded,
    PhaseNarrowed,
    PhaseRequested,
    PhaseWithdrawn,
    TailRecalled,
    TimeElapsed,
)
from scheduler.rollmux.permits.job_permit import JobPermit, PermitTrigger
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.recall import recall
from scheduler.rollmux.permits.room import make_room
from scheduler.rollmux.permits.serving import serve
from scheduler.rollmux.permits.tending import resume, tend
from scheduler.rollmux.permits.terms import PermitsConfig
from scheduler.rollmux.permits.watchdog import deadlines_s

Effects = list[PermitEffect]


class PermitPolicy:
    NAME: ClassVar[str] = "scheduler.policy.phases"
    SAMPLE: ClassVar[Any] = PermitEvent
    EFFECT: ClassVar[Any] = PermitEffect

    def __init__(self, config: PermitsConfig) -> None:
        self.config = config
        self._book = PermitTable(config)
        self._tended_s = float("-inf")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PermitPolicy":
        return cls(msgspec.convert(config, PermitsConfig))

    def snapshot(self) -> dict[str, Any]:
        epoch, ticket = self._book.counters
        return {"epoch": epoch, "ticket": ticket, "jobs": self._book.snapshot()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Raises ValueError where two jobs hold one node."""
        self._book.counters = (snapshot["epoch"], snapshot["ticket"])
        self._book.restore(snapshot["jobs"])

    @property
    def counters(self) -> tuple[int, int]:
        """Last epoch and last ticket; neither is ever given again."""
        return self._book.counters

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return tuple(sorted(self._book.jobs))

    def close(self, nodes: Set[NodeId]) -> None:
        """Sets the failed nodes, exactly these: no phase starts there."""
        self._book.closed = nodes

    def knows(self, job: JobId) -> bool:
        return job in self._book.jobs

    def permit(self, job: JobId) -> JobPermit | None:
        """The job's record; read-only for callers."""
        return self._book.jobs.get(job)

    def on(self, node: NodeId) -> JobId | None:
        return self._book.on(node)

    def ahead(self, job: JobId, *, now: float) -> int:
        """Jobs that come before this one on its nodes, with a permit or asking for one."""
        permit = self._book.jobs.get(job)
        return 0 if permit is None else len(self._book.ahead(permit, now))

    def due_s(self) -> float:
        """Time at which `TimeElapsed` will next change something; infinite if nothing is due."""
        jobs = self._book.jobs.values()
        due = (at for each in jobs for at in deadlines_s(each, self.config) if at > self._tended_s)
        return min(due, default=float("inf"))

    def observe(self, event: PermitEvent, *, now: float) -> tuple[PermitEffect, ...]:
        effects = self._heard(event, now)
        touched = self._book.settle()
        if not touched:
            return tuple(effects)
        effects += serve(self._book, touched, now=now)
        # A holder that has its nodes whole again may make room on all of them.
        touched += self._book.settle()
        effects += make_room(self._book, self.config, touched, now=now)
        # A job that is asked to make room leaves its lines, where others may stand behind it.
        return (*effects, *serve(self._book, self._book.settle(), now=now))

    def _heard(self, event: PermitEvent, now: float) -> Effects:
        book = self._book
        match event:
            case JobPlaced():
                return place(book, event)
            case JobLeft():
                return remove(book, event, now=now)
            case PhaseRequested():
                return request(book, event, now=now)
            case PhaseWithdrawn():
                return withdraw(book, event, now=now)
            case HolderHeard():
                return self._beaten(event, now)
            case PhaseNarrowed():
                return self._narrowed(event, now)
            case TailRecalled():
                return [*recall(book, event, now=now)]
            case PhaseEnded():
                return [*ended(book, event, now=now)]
            case NodesUnloaded():
                unloaded = book.jobs.get(event.job)
                if unloaded is not None:
                    book.unload(unloaded, event.nodes)
                return []
            case ControlResumed():
                resume(book, now=now)
                return []
            case TimeElapsed():
                self._tended_s = now
                return tend(book, now=now)

    def _beaten(self, event: HolderHeard, now: float) -> Effects:
        permit = self._book.holder(event.job, event.epoch)
        if permit is None:
            return [stale(event.job, event.epoch)]
        permit.heard_s = now
        work_until(permit, now=now)
        permit.tokens = max(permit.tokens, event.tokens)
        permit.complete_ratio = max(permit.complete_ratio, event.complete_ratio)
        if permit.course is not None:
            permit.course = permit.course.heard(event.complete_ratio, at_s=permit.worked_s)
        phase = None if permit.kind is None else permit.terms.phase(permit.kind)
        if phase is not None and in_tail(permit, phase):
            # Waiting jobs may start on what the tail leaves.
            self._book.touch_lines(permit.nodes)
        return []

    def _narrowed(self, event: PhaseNarrowed, now: float) -> Effects:
        permit = self._book.holder(event.job, event.epoch)
        if permit is None:
            return [stale(event.job, event.epoch)]
        permit.heard_s = now
        work_until(permit, now=now)
        if not permit.move(PermitTrigger.NARROWED):
            return []
        freed = self._book.narrow(permit)
        return [FreeNodes(job=event.job, epoch=event.epoch, nodes=freed)]
