"""Jobs and workers that come and go."""

from scheduler.rollmux.permits.book import PermitTable
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
from scheduler.rollmux.permits.places import enqueue, join
from scheduler.rollmux.permits.serving import grant
from scheduler.rollmux.permits.standing import PermitStage, PermitTrigger
from scheduler.rollmux.permits.terms import terms_fault

Effects = list[PermitEffect]


def place(book: PermitTable, event: JobPlaced) -> Effects:
    job, fault = event.terms.job, terms_fault(event.terms)
    if fault:
        return [Refuse(job=job, reason=fault)]
    standing = book.admit(event.terms)
    book.leave_lines(standing)
    effects: Effects = [AdmitJob(job=job)]
    if standing.stage is PermitStage.WAITING and standing.kind is not None:
        phase = event.terms.phase(standing.kind)
        if phase is None:
            standing.move(PermitTrigger.ENDED)
        else:
            effects.append(join(book, standing, phase, standing.ticket))
    return effects


def remove(book: PermitTable, event: JobLeft, *, now: float) -> Effects:
    standing = book.jobs.get(event.job)
    if standing is None:
        return []
    effects: Effects = []
    if standing.holding:
        effects.append(end(book, standing, PermitEndReason.LEFT, "the job left", now=now))
    book.leave_lines(standing)
    if event.for_good:
        book.unload(standing, standing.loaded)
        book.remove(event.job)
        return [*effects, RemoveJob(job=event.job)]
    standing.move(PermitTrigger.ENDED)
    return [*effects, DropPlace(job=event.job)]


def request(book: PermitTable, event: PhaseRequested, *, now: float) -> Effects:
    standing = book.jobs.get(event.job)
    phase = standing.terms.phase(event.kind) if standing else None
    if standing is None or phase is None:
        return [Refuse(job=event.job, reason=f"no {event.kind} phase of such a job")]
    if standing.holding:
        if (standing.holder, standing.kind) != (event.holder, event.kind):
            reason = f"the job holds a permit for its {standing.kind} phase"
            return [Refuse(job=event.job, reason=reason)]
        standing.heard_s = now
        return []
    if standing.holder != event.holder and book.waits(standing, now):
        return [Refuse(job=event.job, reason="another process of the job waits")]
    effects: Effects = []
    if (standing.stage, standing.kind) != (PermitStage.WAITING, event.kind):
        book.leave_lines(standing)
        effects.append(enqueue(book, standing, phase, now=now))
    standing.holder, standing.heard_s = event.holder, now
    book.touch(standing.awaits)
    if not phase.nodes:
        effects.append(grant(book, standing, phase, (), now=now))
    return effects


def withdraw(book: PermitTable, event: PhaseWithdrawn, *, now: float) -> Effects:
    standing = book.jobs.get(event.job)
    if standing is None or standing.holder != event.holder:
        return []
    if standing.holding:
        words = "nobody waited for it any more"
        return [end(book, standing, PermitEndReason.WITHDRAWN, words, now=now)]
    book.leave_lines(standing)
    return [DropPlace(job=event.job)] if standing.move(PermitTrigger.ENDED) else []
