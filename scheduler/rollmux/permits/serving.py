"""Gives free nodes to the job that comes first and may have all that it needs.

A node beside a tail counts for the accelerators that the tail leaves, where the phase may begin on
a part.
"""

from harvester.contracts.ids import NodeId
from scheduler.rollmux.permits.accelerators import work_until
from scheduler.rollmux.permits.completion import Course
from scheduler.rollmux.permits.events import GrantPermit, WidenPermit
from scheduler.rollmux.permits.job_permit import JobPermit, PermitTrigger
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.terms import PhaseTerms

Served = list[GrantPermit | WidenPermit]


def serve(book: PermitTable, touched: tuple[NodeId, ...], *, now: float) -> Served:
    """Starts jobs on the nodes that have changed."""
    effects: Served = []
    for permit in book.holders(touched):
        if permit.accelerators:
            effects += _widen_nodes(book, permit, now)
    for permit in book.in_line(touched):
        if permit.holding:
            effects += _widen(book, permit, now)
        elif book.waits(permit, now):
            effects += _start(book, permit, now)
    return effects


def grant(
    book: PermitTable,
    permit: JobPermit,
    phase: PhaseTerms,
    nodes: tuple[NodeId, ...],
    *,
    now: float,
) -> GrantPermit:
    epoch = book.next_epoch()
    permit.move(PermitTrigger.GRANTED)
    permit.epoch, permit.started_s, permit.heard_s = epoch, now, now
    permit.warned_s = permit.revoked_s = permit.ended = None
    permit.complete_ratio, permit.tokens = 0.0, 0
    permit.keep, permit.keep_accelerators, permit.accelerators = (), {}, {}
    permit.worked_s, permit.worked_at_s, permit.was_away = 0.0, now, False
    permit.course = Course()
    book.take(permit, nodes, per_node=phase.accelerators)
    return GrantPermit(
        job=permit.job,
        kind=phase.kind,
        epoch=epoch,
        nodes=nodes,
        accelerators=permit.accelerators,
        holder=permit.holder,
        reason=f"after {now - permit.enqueued_s:.3f} s in line",
    )


def _start(book: PermitTable, permit: JobPermit, now: float) -> Served:
    phase = None if permit.kind is None else permit.terms.phase(permit.kind)
    if phase is None:
        return []
    nodes = book.open_to(permit, now)
    rest = [node for node in permit.awaits if node not in nodes]
    found = sum(book.free_accelerators(node, per_node=phase.accelerators) for node in nodes)
    whole = not rest and found == phase.all_accelerators
    enough = found >= phase.least_accelerators > 0 and all(map(book.under_tail, rest))
    return [grant(book, permit, phase, nodes, now=now)] if whole or enough else []


def _widen(book: PermitTable, permit: JobPermit, now: float) -> list[WidenPermit]:
    phase = None if permit.kind is None else permit.terms.phase(permit.kind)
    nodes = book.open_to(permit, now)
    if phase is None or not nodes:
        return []
    work_until(permit, now=now)
    book.take(permit, nodes, per_node=phase.accelerators)
    if not permit.awaits and permit.move(PermitTrigger.RECALLED):
        permit.keep, permit.keep_accelerators = (), {}
    return [WidenPermit(job=permit.job, epoch=permit.epoch, nodes=nodes)]


def _widen_nodes(book: PermitTable, permit: JobPermit, now: float) -> list[WidenPermit]:
    work_until(permit, now=now)
    nodes = book.widen(permit)
    if nodes:
        book.touch_lines(permit.nodes)
    return [WidenPermit(job=permit.job, epoch=permit.epoch, nodes=nodes)] if nodes else []
