"""Gives free nodes to the job that comes first and may have all that it needs.

A node beside a tail counts for the accelerators that the tail leaves, where the phase may begin on
a part.
"""

from harvester.contracts.ids import NodeId
from scheduler.rollmux.permits.accelerators import work_until
from scheduler.rollmux.permits.book import PermitTable
from scheduler.rollmux.permits.completion import Course
from scheduler.rollmux.permits.events import GrantPermit, WidenPermit
from scheduler.rollmux.permits.standing import JobPermit, PermitTrigger
from scheduler.rollmux.permits.terms import PhaseTerms

Served = list[GrantPermit | WidenPermit]


def serve(book: PermitTable, touched: tuple[NodeId, ...], *, now: float) -> Served:
    """Starts jobs on the nodes that have changed."""
    effects: Served = []
    for standing in book.holders(touched):
        if standing.accelerators:
            effects += _widen_nodes(book, standing, now)
    for standing in book.in_line(touched):
        if standing.holding:
            effects += _widen(book, standing, now)
        elif book.waits(standing, now):
            effects += _start(book, standing, now)
    return effects


def grant(
    book: PermitTable,
    standing: JobPermit,
    phase: PhaseTerms,
    nodes: tuple[NodeId, ...],
    *,
    now: float,
) -> GrantPermit:
    epoch = book.next_epoch()
    standing.move(PermitTrigger.GRANTED)
    standing.epoch, standing.started_s, standing.heard_s = epoch, now, now
    standing.warned_s = standing.revoked_s = standing.ended = None
    standing.complete_ratio, standing.tokens = 0.0, 0
    standing.keep, standing.keep_accelerators, standing.accelerators = (), {}, {}
    standing.worked_s, standing.worked_at_s, standing.was_away = 0.0, now, False
    standing.course = Course()
    book.take(standing, nodes, per_node=phase.accelerators)
    return GrantPermit(
        job=standing.job,
        kind=phase.kind,
        epoch=epoch,
        nodes=nodes,
        accelerators=standing.accelerators,
        holder=standing.holder,
        reason=f"after {now - standing.enqueued_s:.3f} s in line",
    )


def _start(book: PermitTable, standing: JobPermit, now: float) -> Served:
    phase = None if standing.kind is None else standing.terms.phase(standing.kind)
    if phase is None:
        return []
    nodes = book.open_to(standing, now)
    rest = [node for node in standing.awaits if node not in nodes]
    found = sum(book.free_accelerators(node, per_node=phase.accelerators) for node in nodes)
    whole = not rest and found == phase.all_accelerators
    enough = found >= phase.least_accelerators > 0 and all(map(book.under_tail, rest))
    return [grant(book, standing, phase, nodes, now=now)] if whole or enough else []


def _widen(book: PermitTable, standing: JobPermit, now: float) -> list[WidenPermit]:
    phase = None if standing.kind is None else standing.terms.phase(standing.kind)
    nodes = book.open_to(standing, now)
    if phase is None or not nodes:
        return []
    work_until(standing, now=now)
    book.take(standing, nodes, per_node=phase.accelerators)
    if not standing.awaits and standing.move(PermitTrigger.RECALLED):
        standing.keep, standing.keep_accelerators = (), {}
    return [WidenPermit(job=standing.job, epoch=standing.epoch, nodes=nodes)]


def _widen_nodes(book: PermitTable, standing: JobPermit, now: float) -> list[WidenPermit]:
    work_until(standing, now=now)
    nodes = book.widen(standing)
    if nodes:
        book.touch_lines(standing.nodes)
    return [WidenPermit(job=standing.job, epoch=standing.epoch, nodes=nodes)] if nodes else []
