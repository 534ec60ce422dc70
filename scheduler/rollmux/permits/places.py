"""A job's place in the lines of its nodes: taken at the end, under one ticket for all of them."""

from scheduler.rollmux.permits.book import PermitTable
from scheduler.rollmux.permits.events import EnqueuePhase
from scheduler.rollmux.permits.standing import JobPermit, PermitTrigger
from scheduler.rollmux.permits.terms import PhaseTerms


def enqueue(
    book: PermitTable, standing: JobPermit, phase: PhaseTerms, *, now: float
) -> EnqueuePhase:
    """Takes a new place at the end of the lines; no worker has claimed it yet."""
    standing.enqueued_s, standing.heard_s = now, None
    return join(book, standing, phase, book.next_ticket())


def join(book: PermitTable, standing: JobPermit, phase: PhaseTerms, ticket: int) -> EnqueuePhase:
    """Enters the lines of the phase's nodes under a ticket, kept or new."""
    standing.move(PermitTrigger.ENQUEUED)
    standing.kind = phase.kind
    book.join(standing, ticket, phase.nodes)
    return EnqueuePhase(
        job=standing.job, kind=phase.kind, ticket=standing.ticket, nodes=standing.awaits
    )
