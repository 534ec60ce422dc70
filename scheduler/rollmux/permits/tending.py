"""Effects of time alone: silent holders, overruns, grace periods; and the amnesty after a pause."""

from scheduler.rollmux.permits.endings import fail
from scheduler.rollmux.permits.events import PermitEffect, PermitEndReason, WarnHolder
from scheduler.rollmux.permits.job_permit import JobPermit
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.room import revoke
from scheduler.rollmux.permits.watchdog import WatchdogVerdict, bound_s, verdict

Effects = list[PermitEffect]


def tend(book: PermitTable, *, now: float) -> Effects:
    effects: Effects = []
    for _, permit in sorted(book.jobs.items()):
        if permit.holding:
            effects += _watch(book, permit, now)
        elif not book.asks(permit, now):
            book.touch(permit.awaits)
    return effects


def resume(book: PermitTable, *, now: float) -> None:
    """Counts no silence before now: no holder could be heard until now."""
    for permit in book.jobs.values():
        # A record of before a reboot lies in this clock's future.
        permit.started_s = min(permit.started_s, now)
        permit.worked_at_s = min(permit.worked_at_s, now)
        permit.enqueued_s = min(permit.enqueued_s, now)
        if permit.warned_s is not None:
            permit.warned_s = min(permit.warned_s, now)
        if permit.revoked_s is not None:
            permit.revoked_s = min(permit.revoked_s, now)
        if permit.holding or permit.heard_s is not None:
            permit.heard_s = now
        permit.course = None


def _watch(book: PermitTable, permit: JobPermit, now: float) -> Effects:
    wanted = permit.warned_s is not None and book.wanted(permit, now)
    lasted_s = now - permit.started_s
    match verdict(permit, book.config, wanted=wanted, now=now):
        case WatchdogVerdict.WELL:
            return []
        case WatchdogVerdict.SILENT:
            reason = f"silent for {book.config.lease_s:g} s"
            return [*fail(book, permit, PermitEndReason.SILENT, reason, now=now)]
        case WatchdogVerdict.OUT_OF_GRACE:
            reason = f"ran for {lasted_s:.1f} s and did not end on request"
            return [*fail(book, permit, PermitEndReason.OVERRAN, reason, now=now)]
        case WatchdogVerdict.LATE:
            permit.warned_s = now
            reason = f"runs for {lasted_s:.1f} s, longer than its bound of {bound_s(permit):.1f} s"
            return [WarnHolder(job=permit.job, epoch=permit.epoch, reason=reason)]
        case WatchdogVerdict.OBSTRUCTS:
            return [revoke(book, book.config, permit, now=now)]
