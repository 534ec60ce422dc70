"""Gives free nodes to whoever comes first and may have all that it needs.

In a round, nodes are kept for the job whose turn it is while it is on its way, in another phase of
its own; for no longer than the round's patience, and not again before it has run.
"""

from harvester.contracts.ids import NodeId
from scheduler.policy.model import PhaseKind
from scheduler.policy.phases.book import PermitBook
from scheduler.policy.phases.completion import Course
from scheduler.policy.phases.events import GrantPermit, MissTurn, WidenPermit
from scheduler.policy.phases.standing import Stage, Standing, Trigger
from scheduler.policy.phases.terms import PhaseTerms
from scheduler.policy.phases.turns import miss_until, next_place, take_turn

Served = list[GrantPermit | WidenPermit | MissTurn]


def serve(book: PermitBook, touched: tuple[NodeId, ...], *, now: float) -> Served:
    """On the nodes where something has changed, and for who is kept back by a round."""
    effects: Served = []
    for standing in book.in_line((*touched, *book.kept_nodes())):
        if standing.holding:
            effects += _widen(book, standing, now)
        elif book.waits(standing, now):
            effects += _start(book, standing, now)
    return effects


def _start(book: PermitBook, standing: Standing, now: float) -> Served:
    kind = standing.kind
    phase = None if kind is None else standing.terms.phase(kind)
    if kind is None or phase is None:
        return []
    nodes = book.open_to(standing, now)
    rest = [node for node in standing.awaits if node not in nodes]
    enough = len(nodes) >= phase.least_nodes > 0 and all(map(book.under_tail, rest))
    if (rest and not enough) or _kept_back(book, standing, phase, now):
        return []
    missed = _pass_turns(book, standing, phase)
    take_turn(standing, kind)
    granted = GrantPermit(
        job=standing.job,
        kind=kind,
        epoch=book.next_epoch(),
        nodes=nodes,
        holder=standing.holder,
        reason=f"after {now - standing.enqueued_s:.3f} s in line",
    )
    standing.move(Trigger.GRANTED)
    standing.epoch, standing.started_s, standing.heard_s = granted.epoch, now, now
    standing.warned_s = standing.revoked_s = standing.ended = None
    standing.complete_ratio, standing.tokens, standing.keep = 0.0, 0, ()
    standing.course = Course()
    book.take(standing, nodes)
    return [*missed, granted]


def _widen(book: PermitBook, standing: Standing, now: float) -> list[WidenPermit]:
    nodes = book.open_to(standing, now)
    if not nodes:
        return []
    book.take(standing, nodes)
    return [WidenPermit(job=standing.job, epoch=standing.epoch, nodes=nodes)]


def _kept_back(book: PermitBook, standing: Standing, phase: PhaseTerms, now: float) -> bool:
    """Whether its nodes are kept for another whose turn comes before; counts how long."""
    place = next_place(standing, phase.kind)
    awaited = any(
        next_place(other, phase.kind) < place and _on_its_way(book, other, phase.kind, now)
        for other in _sharers(book, standing, phase)
    )
    if not awaited:
        return False
    if standing.kept_s is None:
        book.keep_back(standing, now=now)
    assert standing.kept_s is not None
    return now < standing.kept_s + standing.turn_patience_s


def _on_its_way(book: PermitBook, other: Standing, kind: PhaseKind, now: float) -> bool:
    """In another phase of its own. Who waits in the same line is before or behind by its place."""
    if kind in other.missed or other.stage is Stage.APART:
        return False
    return other.holding or (other.kind is not kind and book.asks(other, now))


def _pass_turns(book: PermitBook, standing: Standing, phase: PhaseTerms) -> list[MissTurn]:
    """Who shares the nodes and had a turn before this one has missed it."""
    place = next_place(standing, phase.kind)
    return [
        MissTurn(job=other.job, kind=phase.kind)
        for other in _sharers(book, standing, phase)
        if miss_until(other, phase.kind, place)
    ]


def _sharers(book: PermitBook, standing: Standing, phase: PhaseTerms) -> list[Standing]:
    """The other jobs of its round that take turns with it on one of these nodes."""
    found = []
    for other in book.members(standing):
        theirs = other.terms.phase(phase.kind)
        if other is not standing and theirs and not set(theirs.nodes).isdisjoint(phase.nodes):
            found.append(other)
    return found
