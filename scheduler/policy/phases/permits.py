"""Which job's phase may run on which nodes now: run permits, one holder per node at a time.

Every node has a line, first come, first served. A job enters the lines of all nodes that its phase
is pinned to at once, under one ticket, and starts when it may have all of them. When a phase ends,
the job's next phase is enqueued on its own nodes before its worker asks, so that the cycle keeps
its order. A permit is a lease with an epoch: a silent holder loses it, and whatever it says later
is refused. Long tails are asked to make room for those who wait. Asks nobody and reads no clock.
"""

from typing import Any, ClassVar

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.policy.phases.book import PermitBook
from scheduler.policy.phases.events import (
    AdmitJob,
    ControlResumed,
    DropPlace,
    EndPermit,
    EndReason,
    EnqueuePhase,
    FailJob,
    FreeNodes,
    GrantPermit,
    HolderHeard,
    JobLeft,
    JobPlaced,
    PermitEffect,
    PermitEvent,
    PhaseEnded,
    PhaseNarrowed,
    PhaseRequested,
    PhaseWithdrawn,
    Refuse,
    RemoveJob,
    TimePassed,
    WarnHolder,
    WidenPermit,
)
from scheduler.policy.phases.room import make_room, revoke
from scheduler.policy.phases.standing import Stage, Standing, Trigger
from scheduler.policy.phases.terms import PermitsConfig, PhaseTerms, terms_fault
from scheduler.policy.phases.watchdog import Verdict, deadlines_s, verdict

Effects = list[PermitEffect]


class PermitPolicy:
    NAME: ClassVar[str] = "scheduler.policy.phases"
    SAMPLE: ClassVar[Any] = PermitEvent
    EFFECT: ClassVar[Any] = PermitEffect

    def __init__(self, config: PermitsConfig) -> None:
        self.config = config
        self._book = PermitBook(config)
        self._epoch = 0
        self._ticket = 0
        self._tended_s = float("-inf")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PermitPolicy":
        return cls(msgspec.convert(config, PermitsConfig))

    def snapshot(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "ticket": self._ticket, "jobs": self._book.snapshot()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Raises ValueError where two jobs hold one node."""
        self._epoch, self._ticket = snapshot["epoch"], snapshot["ticket"]
        self._book.restore(snapshot["jobs"])

    @property
    def counters(self) -> tuple[int, int]:
        """Last epoch and last ticket; neither is ever given again."""
        return self._epoch, self._ticket

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return tuple(sorted(self._book.jobs))

    def standing(self, job: JobId) -> Standing | None:
        """To read."""
        return self._book.jobs.get(job)

    def on(self, node: NodeId) -> JobId | None:
        return self._book.on(node)

    def ahead(self, job: JobId, *, now: float) -> int:
        """Jobs that come before this one on its nodes, with a permit or asking for one."""
        standing = self._book.jobs.get(job)
        return 0 if standing is None else len(self._book.ahead(standing, now))

    def due_s(self) -> float:
        """When `TimePassed` will next change something; infinite if nothing is pending."""
        jobs = self._book.jobs.values()
        due = (at for each in jobs for at in deadlines_s(each, self.config) if at > self._tended_s)
        return min(due, default=float("inf"))

    def observe(self, event: PermitEvent, *, now: float) -> tuple[PermitEffect, ...]:
        match event:
            case JobPlaced():
                effects = self._place(event)
            case JobLeft():
                effects = self._remove(event.job)
            case PhaseRequested():
                effects = self._request(event, now)
            case PhaseWithdrawn():
                effects = self._withdraw(event)
            case HolderHeard():
                effects = self._heard(event, now)
            case PhaseNarrowed():
                effects = self._narrowed(event, now)
            case PhaseEnded():
                effects = self._ended(event, now)
            case ControlResumed():
                effects = self._resume(now)
            case TimePassed():
                effects = self._tend(now)
        touched = self._book.settle()
        effects += self._serve(touched, now)
        effects += make_room(self._book, self.config, touched, now=now)
        # Who is asked to make room leaves its lines, where others may stand behind it.
        return (*effects, *self._serve(self._book.settle(), now))

    def _place(self, event: JobPlaced) -> Effects:
        job, fault = event.terms.job, terms_fault(event.terms)
        if fault:
            return [Refuse(job=job, reason=fault)]
        standing = self._book.admit(event.terms)
        self._book.leave_lines(standing)
        effects: Effects = [AdmitJob(job=job)]
        if standing.stage is Stage.WAITING and standing.kind is not None:
            phase = event.terms.phase(standing.kind)
            if phase is None:
                standing.move(Trigger.ENDED)
            else:
                effects += self._join(standing, phase, standing.ticket)
        return effects

    def _remove(self, job: JobId) -> Effects:
        standing = self._book.jobs.get(job)
        if standing is None:
            return []
        effects = self._end(standing, EndReason.LEFT, "the job left") if standing.holding else []
        self._book.leave_lines(standing)
        self._book.remove(job)
        return [*effects, RemoveJob(job=job)]

    def _request(self, event: PhaseRequested, now: float) -> Effects:
        standing = self._book.jobs.get(event.job)
        phase = standing.terms.phase(event.kind) if standing else None
        if standing is None or phase is None:
            return [Refuse(job=event.job, reason=f"no {event.kind} phase of such a job")]
        if standing.holding:
            if (standing.holder, standing.kind) != (event.holder, event.kind):
                reason = f"the job holds a permit for its {standing.kind} phase"
                return [Refuse(job=event.job, reason=reason)]
            standing.heard_s = now
            return []
        if standing.holder != event.holder and self._book.waits(standing, now):
            return [Refuse(job=event.job, reason="another process of the job waits")]
        effects: Effects = []
        if (standing.stage, standing.kind) != (Stage.WAITING, event.kind):
            self._book.leave_lines(standing)
            effects = self._enqueue(standing, phase, now)
        standing.holder, standing.heard_s = event.holder, now
        self._book.touch(standing.awaits)
        return effects

    def _withdraw(self, event: PhaseWithdrawn) -> Effects:
        standing = self._book.jobs.get(event.job)
        if standing is None or standing.holder != event.holder:
            return []
        if standing.holding:
            return self._end(standing, EndReason.WITHDRAWN, "nobody waited for it any more")
        self._book.leave_lines(standing)
        return [DropPlace(job=event.job)] if standing.move(Trigger.ENDED) else []

    def _heard(self, event: HolderHeard, now: float) -> Effects:
        standing = self._holder(event.job, event.epoch)
        if standing is None:
            return [_stale(event.job, event.epoch)]
        standing.heard_s = now
        standing.tokens = max(standing.tokens, event.tokens)
        standing.complete_ratio = max(standing.complete_ratio, event.complete_ratio)
        self._book.touch(standing.nodes)
        return []

    def _narrowed(self, event: PhaseNarrowed, now: float) -> Effects:
        standing = self._holder(event.job, event.epoch)
        if standing is None:
            return [_stale(event.job, event.epoch)]
        standing.heard_s = now
        if not standing.move(Trigger.NARROWED):
            return []
        freed = tuple(node for node in standing.nodes if node not in standing.keep)
        self._book.free(standing, freed)
        return [FreeNodes(job=event.job, epoch=event.epoch, nodes=freed)]

    def _ended(self, event: PhaseEnded, now: float) -> Effects:
        standing = self._holder(event.job, event.epoch)
        if standing is None or standing.kind is None:
            return [_stale(event.job, event.epoch)]
        if event.failed:
            return self._fail(standing, EndReason.FAILED, event.failed)
        effects = self._end(standing, EndReason.DONE, "")
        # Terms may have changed while it ran, and no longer know this phase.
        if standing.terms.phase(standing.kind) is None:
            return effects
        return effects + self._enqueue(standing, standing.terms.after(standing.kind), now)

    def _resume(self, now: float) -> Effects:
        for standing in self._book.jobs.values():
            # A record of before a reboot lies in this clock's future.
            standing.started_s = min(standing.started_s, now)
            standing.enqueued_s = min(standing.enqueued_s, now)
            if standing.warned_s is not None:
                standing.warned_s = min(standing.warned_s, now)
            if standing.revoked_s is not None:
                standing.revoked_s = min(standing.revoked_s, now)
            if standing.holding or standing.heard_s is not None:
                standing.heard_s = now
        return []

    def _tend(self, now: float) -> Effects:
        effects: Effects = []
        self._tended_s = now
        for _, standing in sorted(self._book.jobs.items()):
            if standing.holding:
                effects += self._watch(standing, now)
            elif not self._book.asks(standing, now):
                self._book.touch(standing.awaits)
        return effects

    def _watch(self, standing: Standing, now: float) -> Effects:
        wanted = self._book.wanted(standing, now)
        lasted_s = now - standing.started_s
        match verdict(standing, self.config, wanted=wanted, now=now):
            case Verdict.WELL:
                return []
            case Verdict.SILENT:
                reason = f"not heard for {self.config.lease_s:g} s"
                return self._fail(standing, EndReason.SILENT, reason)
            case Verdict.OUT_OF_GRACE:
                reason = f"ran for {lasted_s:.1f} s and did not end when told"
                return self._fail(standing, EndReason.OVERRAN, reason)
            case Verdict.LATE:
                standing.warned_s = now
                reason = f"runs for {lasted_s:.1f} s, longer than declared"
                return [WarnHolder(job=standing.job, epoch=standing.epoch, reason=reason)]
            case Verdict.OBSTRUCTS:
                return [revoke(self._book, self.config, standing, now=now)]

    def _serve(self, touched: tuple[NodeId, ...], now: float) -> Effects:
        """Give nodes to whoever comes first and may have all that it needs."""
        effects: Effects = []
        for standing in self._book.in_line(touched):
            if standing.holding:
                effects += self._widen(standing, now)
            elif self._book.waits(standing, now):
                effects += self._start(standing, now)
        return effects

    def _start(self, standing: Standing, now: float) -> Effects:
        kind = standing.kind
        phase = None if kind is None else standing.terms.phase(kind)
        if kind is None or phase is None:
            return []
        nodes = self._book.open_to(standing, now)
        rest = [node for node in standing.awaits if node not in nodes]
        enough = len(nodes) >= phase.least_nodes > 0 and all(map(self._book.under_tail, rest))
        if rest and not enough:
            return []
        waited_s = now - standing.enqueued_s
        self._epoch += 1
        standing.move(Trigger.GRANTED)
        standing.epoch, standing.started_s, standing.heard_s = Epoch(self._epoch), now, now
        standing.warned_s = standing.revoked_s = standing.ended = None
        standing.complete_ratio, standing.tokens, standing.keep = 0.0, 0, ()
        self._book.take(standing, nodes)
        return [
            GrantPermit(
                job=standing.job,
                kind=kind,
                epoch=standing.epoch,
                nodes=nodes,
                holder=standing.holder,
                reason=f"after {waited_s:.3f} s in line",
            )
        ]

    def _widen(self, standing: Standing, now: float) -> Effects:
        nodes = self._book.open_to(standing, now)
        if not nodes:
            return []
        self._book.take(standing, nodes)
        return [WidenPermit(job=standing.job, epoch=standing.epoch, nodes=nodes)]

    def _enqueue(self, standing: Standing, phase: PhaseTerms, now: float) -> Effects:
        """A new place at the end, which nobody has claimed yet."""
        self._ticket += 1
        standing.enqueued_s, standing.heard_s = now, None
        return self._join(standing, phase, self._ticket)

    def _join(self, standing: Standing, phase: PhaseTerms, ticket: int) -> Effects:
        standing.move(Trigger.ENQUEUED)
        standing.kind = phase.kind
        self._book.join(standing, ticket, phase.nodes)
        return [EnqueuePhase(job=standing.job, kind=phase.kind, ticket=ticket, nodes=phase.nodes)]

    def _end(self, standing: Standing, ended: EndReason, reason: str) -> Effects:
        assert standing.kind is not None
        self._book.free(standing, standing.nodes)
        self._book.leave_lines(standing)
        standing.move(Trigger.ENDED)
        standing.ended = ended
        return [
            EndPermit(
                job=standing.job,
                kind=standing.kind,
                epoch=standing.epoch,
                ended=ended,
                reason=reason,
            )
        ]

    def _fail(self, standing: Standing, ended: EndReason, reason: str) -> Effects:
        effects = self._end(standing, ended, reason)
        standing.failures += 1
        return [*effects, FailJob(job=standing.job, reason=reason)]

    def _holder(self, job: JobId, epoch: Epoch) -> Standing | None:
        standing = self._book.jobs.get(job)
        current = standing is not None and standing.holding and standing.epoch == epoch
        return standing if current else None


def _stale(job: JobId, epoch: Epoch) -> Refuse:
    return Refuse(job=job, reason=f"epoch {epoch} is not in force")
