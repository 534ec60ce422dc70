"""Gives free nodes to the job that comes first and may have all that it needs."""

from harvester.contracts.ids import NodeId
from scheduler.policy.phases.book import PermitBook
from scheduler.policy.phases.completion import Course
from scheduler.policy.phases.events import GrantPermit, WidenPermit
from scheduler.policy.phases.standing import Standing, Trigger

Served = list[GrantPermit | WidenPermit]


def serve(book: PermitBook, touched: tuple[NodeId, ...], *, now: float) -> Served:
    """On the nodes where something has changed."""
    effects: Served = []
    for standing in book.in_line(touched):
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
    if rest and not enough:
        return []
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
    return [granted]


def _widen(book: PermitBook, standing: Standing, now: float) -> list[WidenPermit]:
    nodes = book.open_to(standing, now)
    if not nodes:
        return []
    book.take(standing, nodes)
    if not standing.awaits and standing.move(Trigger.RECALLED):
        standing.keep = ()
    return [WidenPermit(job=standing.job, epoch=standing.epoch, nodes=nodes)]
