"""Places in the lines of nodes, and free nodes for the first job that may have all of its nodes.

A place is taken at the end of the lines of all nodes of a phase, under one ticket.

A node beside a tail counts for the accelerators that the tail leaves, where the phase may begin on
a part.
"""

from harvester.contracts.ids import NodeId
from scheduler.rollmux.permits.completion import ProgressTimes
from scheduler.rollmux.permits.events import EnqueuePhase, GrantPermit, WidenPermit
from scheduler.rollmux.permits.job_permit import JobPermit, PermitTrigger
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.terms import PhaseTerms

Grants = list[GrantPermit | WidenPermit]


def enqueue(
    table: PermitTable, permit: JobPermit, phase: PhaseTerms, *, now: float
) -> EnqueuePhase:
    """Takes a new place at the end of the lines; no worker has claimed it yet."""
    permit.enqueued_s, permit.last_call_s = now, None
    return join(table, permit, phase, table.next_ticket())


def join(table: PermitTable, permit: JobPermit, phase: PhaseTerms, ticket: int) -> EnqueuePhase:
    """Enters the lines of the phase's nodes under a ticket, kept or new."""
    permit.move(PermitTrigger.ENQUEUED)
    permit.kind = phase.kind
    table.join(permit, ticket, phase.nodes)
    return EnqueuePhase(job=permit.job, kind=phase.kind, ticket=permit.ticket, nodes=permit.awaits)


def start_jobs(table: PermitTable, touched: tuple[NodeId, ...], *, now: float) -> Grants:
    """Starts jobs on the nodes that have changed."""
    effects: Grants = []
    for permit in table.holders(touched):
        if permit.accelerators:
            effects += _widen_nodes(table, permit, now)
    for permit in table.in_line(touched):
        if permit.holding:
            effects += _widen(table, permit, now)
        elif table.waits(permit, now):
            effects += _start(table, permit, now)
    return effects


def grant(
    table: PermitTable,
    permit: JobPermit,
    phase: PhaseTerms,
    nodes: tuple[NodeId, ...],
    *,
    now: float,
) -> GrantPermit:
    epoch = table.next_epoch()
    permit.move(PermitTrigger.GRANTED)
    permit.epoch, permit.started_s, permit.last_call_s = epoch, now, now
    permit.warned_s = permit.revoked_s = permit.ended = None
    permit.complete_ratio, permit.tokens = 0.0, 0
    permit.keep, permit.keep_accelerators, permit.accelerators = (), {}, {}
    permit.worked_s, permit.worked_at_s, permit.was_away = 0.0, now, False
    permit.course, permit.tail = ProgressTimes(), None
    table.take(permit, nodes, per_node=phase.accelerators)
    return GrantPermit(
        job=permit.job,
        kind=phase.kind,
        epoch=epoch,
        nodes=nodes,
        accelerators=permit.accelerators,
        holder=permit.holder,
        reason=f"after {now - permit.enqueued_s:.3f} s in line",
    )


def _start(table: PermitTable, permit: JobPermit, now: float) -> Grants:
    phase = permit.phase
    if phase is None:
        return []
    nodes = table.open_to(permit, now)
    rest = [node for node in permit.awaits if node not in nodes]
    found = sum(table.free_accelerators(node, per_node=phase.accelerators) for node in nodes)
    whole = not rest and found == phase.all_accelerators
    enough = found >= phase.least_accelerators > 0 and all(map(table.under_tail, rest))
    return [grant(table, permit, phase, nodes, now=now)] if whole or enough else []


def _widen(table: PermitTable, permit: JobPermit, now: float) -> list[WidenPermit]:
    phase = permit.phase
    nodes = table.open_to(permit, now)
    if phase is None or not nodes:
        return []
    permit.work_until(now)
    table.take(permit, nodes, per_node=phase.accelerators)
    if not permit.awaits and permit.move(PermitTrigger.RECALLED):
        permit.keep, permit.keep_accelerators = (), {}
    return [WidenPermit(job=permit.job, epoch=permit.epoch, nodes=nodes)]


def _widen_nodes(table: PermitTable, permit: JobPermit, now: float) -> list[WidenPermit]:
    permit.work_until(now)
    nodes = table.widen(permit)
    if nodes:
        table.touch_lines(permit.nodes)
    return [WidenPermit(job=permit.job, epoch=permit.epoch, nodes=nodes)] if nodes else []
