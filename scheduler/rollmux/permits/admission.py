"""Jobs and workers that come and go."""

from scheduler.rollmux.permits.endings import end
from scheduler.rollmux.permits.events import (
    AdmitJob,
    DropPlace,
    JobLeft,
    JobPlaced,
    PermitEffect,
    PermitEndReason,
    PhaseRequested,
    PhaseWithdrawn,
    Refuse,
    RemoveJob,
)
from scheduler.rollmux.permits.job_permit import PermitStage, PermitTrigger
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.places import enqueue, join
from scheduler.rollmux.permits.serving import grant
from scheduler.rollmux.permits.terms import terms_fault

Effects = list[PermitEffect]


def place(book: PermitTable, event: JobPlaced) -> Effects:
    job, fault = event.terms.job, terms_fault(event.terms)
    if fault:
        return [Refuse(job=job, reason=fault)]
    permit = book.admit(event.terms)
    book.leave_lines(permit)
    effects: Effects = [AdmitJob(job=job)]
    if permit.stage is PermitStage.WAITING and permit.kind is not None:
        phase = event.terms.phase(permit.kind)
        if phase is None:
            permit.move(PermitTrigger.ENDED)
        else:
            effects.append(join(book, permit, phase, permit.ticket))
    return effects


def remove(book: PermitTable, event: JobLeft, *, now: float) -> Effects:
    permit = book.jobs.get(event.job)
    if permit is None:
        return []
    effects: Effects = []
    if permit.holding:
        effects.append(end(book, permit, PermitEndReason.LEFT, "the job left", now=now))
    book.leave_lines(permit)
    if event.for_good:
        book.unload(permit, permit.loaded)
        book.remove(event.job)
        return [*effects, RemoveJob(job=event.job)]
    permit.move(PermitTrigger.ENDED)
    return [*effects, DropPlace(job=event.job)]


def request(book: PermitTable, event: PhaseRequested, *, now: float) -> Effects:
    permit = book.jobs.get(event.job)
    phase = permit.terms.phase(event.kind) if permit else None
    if permit is None or phase is None:
        return [Refuse(job=event.job, reason=f"no {event.kind} phase of such a job")]
    if permit.holding:
        if (permit.holder, permit.kind) != (event.holder, event.kind):
            reason = f"the job holds a permit for its {permit.kind} phase"
            return [Refuse(job=event.job, reason=reason)]
        permit.heard_s = now
        return []
    if permit.holder != event.holder and book.waits(permit, now):
        return [Refuse(job=event.job, reason="another process of the job waits")]
    effects: Effects = []
    if (permit.stage, permit.kind) != (PermitStage.WAITING, event.kind):
        book.leave_lines(permit)
        effects.append(enqueue(book, permit, phase, now=now))
    permit.holder, permit.heard_s = event.holder, now
    book.touch(permit.awaits)
    if not phase.nodes:
        effects.append(grant(book, permit, phase, (), now=now))
    return effects


def withdraw(book: PermitTable, event: PhaseWithdrawn, *, now: float) -> Effects:
    permit = book.jobs.get(event.job)
    if permit is None or permit.holder != event.holder:
        return []
    if permit.holding:
        words = "its worker stopped waiting"
        return [end(book, permit, PermitEndReason.WITHDRAWN, words, now=now)]
    book.leave_lines(permit)
    return [DropPlace(job=event.job)] if permit.move(PermitTrigger.ENDED) else []
