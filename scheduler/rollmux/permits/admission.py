"""Jobs and workers that come and go."""

from harvester.contracts.ids import JobId
from scheduler.rollmux.permits.endings import end
from scheduler.rollmux.permits.events import (
    AdmitJob,
    DropPlace,
    Enter,
    PermitEffect,
    PermitEndReason,
    Refuse,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import PermitStage, PermitTrigger
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.starts import enqueue, grant, join
from scheduler.rollmux.permits.terms import JobTerms, terms_fault

Effects = list[PermitEffect]


def register(table: PermitTable, terms: JobTerms) -> Effects:
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


def remove(table: PermitTable, job: JobId, *, now: float, for_good: bool) -> Effects:
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


def request(table: PermitTable, event: Enter, *, now: float) -> Effects:
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


def withdraw(table: PermitTable, event: Withdraw, *, now: float) -> Effects:
    permit = table.jobs.get(event.job)
    if permit is None or permit.holder != event.holder:
        return []
    if permit.holding:
        words = "its worker stopped waiting"
        return [end(table, permit, PermitEndReason.WITHDRAWN, words, now=now)]
    table.leave_lines(permit)
    return [DropPlace(job=event.job)] if permit.move(PermitTrigger.ENDED) else []
