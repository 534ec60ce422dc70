"""Jobs and workers that come and go, and the rounds that a planner gives them."""

from harvester.contracts.ids import JobId
from scheduler.policy.phases.book import PermitBook
from scheduler.policy.phases.endings import end
from scheduler.policy.phases.events import (
    AdmitJob,
    DropPlace,
    EndReason,
    JobPlaced,
    KeepRound,
    PermitEffect,
    PhaseRequested,
    PhaseWithdrawn,
    Refuse,
    RemoveJob,
    RoundGiven,
)
from scheduler.policy.phases.places import enqueue, exchanged, join
from scheduler.policy.phases.standing import Stage, Standing, Trigger
from scheduler.policy.phases.terms import round_fault, terms_fault
from scheduler.policy.phases.turns import begin_round

Effects = list[PermitEffect]


def place(book: PermitBook, event: JobPlaced) -> Effects:
    job, fault = event.terms.job, terms_fault(event.terms)
    if fault:
        return [Refuse(job=job, reason=fault)]
    standing = book.admit(event.terms)
    book.leave_lines(standing)
    effects: Effects = [AdmitJob(job=job)]
    if standing.stage is Stage.WAITING and standing.kind is not None:
        phase = event.terms.phase(standing.kind)
        if phase is None:
            standing.move(Trigger.ENDED)
        else:
            effects.append(join(book, standing, phase, standing.ticket))
    return effects


def remove(book: PermitBook, job: JobId) -> Effects:
    standing = book.jobs.get(job)
    if standing is None:
        return []
    effects: Effects = []
    if standing.holding:
        effects.append(end(book, standing, EndReason.LEFT, "the job left"))
    book.leave_lines(standing)
    left = [other for other in book.members(standing) if other is not standing]
    book.remove(job)
    turns = tuple(one for one in standing.turns if one != job)
    return [*effects, RemoveJob(job=job), *_in_round(book, left, turns, standing.turn_patience_s)]


def request(book: PermitBook, event: PhaseRequested, *, now: float) -> Effects:
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
    if (standing.stage, standing.kind) != (Stage.WAITING, event.kind):
        book.leave_lines(standing)
        effects += enqueue(book, standing, phase, now=now)
    standing.holder, standing.heard_s = event.holder, now
    book.touch(standing.awaits)
    return effects


def withdraw(book: PermitBook, event: PhaseWithdrawn) -> Effects:
    standing = book.jobs.get(event.job)
    if standing is None or standing.holder != event.holder:
        return []
    if standing.holding:
        return [end(book, standing, EndReason.WITHDRAWN, "nobody waited for it any more")]
    book.leave_lines(standing)
    return [DropPlace(job=event.job)] if standing.move(Trigger.ENDED) else []


def give_round(book: PermitBook, event: RoundGiven) -> Effects:
    """All of the round's jobs, or none; who was in another round with one of them is in none."""
    named = event.turns[0] if event.turns else JobId("")
    unknown = sorted({job for job in event.turns if job not in book.jobs})
    fault = round_fault(event.turns, event.patience_s)
    if unknown and not fault:
        fault = f"not placed: {', '.join(unknown)}"
    if fault:
        return [Refuse(job=named, reason=fault)]
    members = [book.jobs[job] for job in dict.fromkeys(event.turns)]
    before = {other.job: other for one in members for other in book.members(one)}
    left = [other for other in before.values() if other not in members]
    return [
        *_in_round(book, left, (), event.patience_s),
        *_in_round(book, members, event.turns, event.patience_s),
    ]


def _in_round(
    book: PermitBook, members: list[Standing], turns: tuple[JobId, ...], patience_s: float
) -> Effects:
    """From now on; turns of one job alone are no round."""
    if len(set(turns)) < 2:
        turns = ()
    for one in members:
        begin_round(one, turns, patience_s=patience_s)
        book.touch(one.awaits)
    kept = [KeepRound(job=one.job, turns=turns, patience_s=patience_s) for one in members]
    return [*kept, *(exchanged(book, members) if turns else ())]
