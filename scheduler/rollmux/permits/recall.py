"""A tail that has left its nodes requests them again, under the permit that it holds.

    when free   at once, if no job holds the nodes or waits for them; else nothing
    in line     a place at the end of their lines, like any job; the tail has lost its engines

The phase continues where it is: it counts as one phase, with its whole duration.
"""

from scheduler.rollmux.permits.endings import stale
from scheduler.rollmux.permits.events import EnqueuePhase, Recall, Refuse, TailRecalled
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.permit_table import PermitTable


def recall(book: PermitTable, event: TailRecalled, *, now: float) -> list[EnqueuePhase | Refuse]:
    permit = book.holder(event.job, event.epoch)
    if permit is None:
        return [stale(event.job, event.epoch)]
    permit.heard_s = now
    phase = None if permit.kind is None else permit.terms.phase(permit.kind)
    if phase is None or permit.stage is not PermitStage.TAILING or permit.awaits:
        return []
    missing = tuple(node for node in phase.nodes if node not in permit.nodes)
    held = any(book.on(node) is not None for node in missing)
    asked_for = any(book.asks(other, now) for other in book.in_line(missing))
    if not missing or (event.recall is Recall.WHEN_FREE and (held or asked_for)):
        return []
    book.join(permit, book.next_ticket(), missing)
    return [
        EnqueuePhase(job=permit.job, kind=phase.kind, ticket=permit.ticket, nodes=permit.awaits)
    ]
