"""A job's place in the lines of its nodes: taken at the end, under one ticket for all of them."""

from scheduler.rollmux.permits.events import EnqueuePhase
from scheduler.rollmux.permits.job_permit import JobPermit, PermitTrigger
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.terms import PhaseTerms


def enqueue(book: PermitTable, permit: JobPermit, phase: PhaseTerms, *, now: float) -> EnqueuePhase:
    """Takes a new place at the end of the lines; no worker has claimed it yet."""
    permit.enqueued_s, permit.heard_s = now, None
    return join(book, permit, phase, book.next_ticket())


def join(book: PermitTable, permit: JobPermit, phase: PhaseTerms, ticket: int) -> EnqueuePhase:
    """Enters the lines of the phase's nodes under a ticket, kept or new."""
    permit.move(PermitTrigger.ENQUEUED)
    permit.kind = phase.kind
    book.join(permit, ticket, phase.nodes)
    return EnqueuePhase(job=permit.job, kind=phase.kind, ticket=permit.ticket, nodes=permit.awaits)
