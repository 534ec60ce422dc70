"""A job's place in the lines of its nodes: taken at the end, and exchanged where a round says so.

The places that the jobs of one round hold in lines are taken in the round's order: they exchange
tickets among themselves, so that all lines still agree on who comes first, and nobody else is
passed by more jobs than stood before it.
"""

from collections.abc import Sequence

from scheduler.policy.phases.book import PermitBook
from scheduler.policy.phases.events import EnqueuePhase
from scheduler.policy.phases.standing import Stage, Standing, Trigger
from scheduler.policy.phases.terms import PhaseTerms
from scheduler.policy.phases.turns import next_place


def enqueue(
    book: PermitBook, standing: Standing, phase: PhaseTerms, *, now: float
) -> list[EnqueuePhase]:
    """A new place at the end, which nobody has claimed yet."""
    standing.enqueued_s, standing.heard_s = now, None
    join(book, standing, phase, book.next_ticket())
    changed = exchanged(book, book.members(standing))
    return [_said(standing), *(each for each in changed if each.job != standing.job)]


def join(book: PermitBook, standing: Standing, phase: PhaseTerms, ticket: int) -> EnqueuePhase:
    """The same place in other lines, or a new one."""
    standing.move(Trigger.ENQUEUED)
    standing.kind = phase.kind
    book.join(standing, ticket, phase.nodes)
    return _said(standing)


def exchanged(book: PermitBook, members: Sequence[Standing]) -> list[EnqueuePhase]:
    """The places that a round's jobs have in line, taken in the order of their turns."""
    said: list[EnqueuePhase] = []
    waiting = [one for one in members if one.stage is Stage.WAITING and one.kind is not None]
    for kind in sorted({one.kind for one in waiting if one.kind is not None}):
        own = [one for one in waiting if one.kind is kind]
        tickets = sorted(one.ticket for one in own)
        own.sort(key=lambda one: (next_place(one, kind), one.ticket))
        changed = [
            (one, ticket) for one, ticket in zip(own, tickets, strict=True) if one.ticket != ticket
        ]
        book.exchange(changed)
        said += [_said(one) for one, _ in changed]
    return said


def _said(standing: Standing) -> EnqueuePhase:
    assert standing.kind is not None
    return EnqueuePhase(
        job=standing.job, kind=standing.kind, ticket=standing.ticket, nodes=standing.awaits
    )
