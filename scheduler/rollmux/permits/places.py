"""A job's place in the lines of its nodes: taken at the end, under one ticket for all of them."""

from scheduler.rollmux.permits.book import PermitBook
from scheduler.rollmux.permits.events import EnqueuePhase
from scheduler.rollmux.permits.standing import Standing, Trigger
from scheduler.rollmux.permits.terms import PhaseTerms


def enqueue(book: PermitBook, standing: Standing, phase: PhaseTerms, *, now: float) -> EnqueuePhase:
    """A new place at the end, which nobody has claimed yet."""
    standing.enqueued_s, standing.heard_s = now, None
    return join(book, standing, phase, book.next_ticket())


def join(book: PermitBook, standing: Standing, phase: PhaseTerms, ticket: int) -> EnqueuePhase:
    """The same place in other lines, or a new one."""
    standing.move(Trigger.ENQUEUED)
    standing.kind = phase.kind
    book.join(standing, ticket, phase.nodes)
    return EnqueuePhase(
        job=standing.job, kind=phase.kind, ticket=standing.ticket, nodes=standing.awaits
    )
