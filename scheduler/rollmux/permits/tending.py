"""Effects of time alone: silent holders, overruns, grace periods; and the amnesty after a pause."""

from scheduler.rollmux.permits.book import PermitTable
from scheduler.rollmux.permits.endings import fail
from scheduler.rollmux.permits.events import PermitEffect, PermitEndReason, WarnHolder
from scheduler.rollmux.permits.room import revoke
from scheduler.rollmux.permits.standing import JobPermit
from scheduler.rollmux.permits.watchdog import WatchdogVerdict, bound_s, verdict

Effects = list[PermitEffect]


def tend(book: PermitTable, *, now: float) -> Effects:
    effects: Effects = []
    for _, standing in sorted(book.jobs.items()):
        if standing.holding:
            effects += _watch(book, standing, now)
        elif not book.asks(standing, now):
            book.touch(standing.awaits)
    return effects


def resume(book: PermitTable, *, now: float) -> None:
    """Counts no silence before now: no holder could be heard until now."""
    for standing in book.jobs.values():
        # A record of before a reboot lies in this clock's future.
        standing.started_s = min(standing.started_s, now)
        standing.worked_at_s = min(standing.worked_at_s, now)
        standing.enqueued_s = min(standing.enqueued_s, now)
        if standing.warned_s is not None:
            standing.warned_s = min(standing.warned_s, now)
        if standing.revoked_s is not None:
            standing.revoked_s = min(standing.revoked_s, now)
        if standing.holding or standing.heard_s is not None:
            standing.heard_s = now
        standing.course = None


def _watch(book: PermitTable, standing: JobPermit, now: float) -> Effects:
    wanted = standing.warned_s is not None and book.wanted(standing, now)
    lasted_s = now - standing.started_s
    match verdict(standing, book.config, wanted=wanted, now=now):
        case WatchdogVerdict.WELL:
            return []
        case WatchdogVerdict.SILENT:
            reason = f"not heard for {book.config.lease_s:g} s"
            return [*fail(book, standing, PermitEndReason.SILENT, reason, now=now)]
        case WatchdogVerdict.OUT_OF_GRACE:
            reason = f"ran for {lasted_s:.1f} s and did not end when told"
            return [*fail(book, standing, PermitEndReason.OVERRAN, reason, now=now)]
        case WatchdogVerdict.LATE:
            standing.warned_s = now
            reason = (
                f"runs for {lasted_s:.1f} s, longer than its bound of {bound_s(standing):.1f} s"
            )
            return [WarnHolder(job=standing.job, epoch=standing.epoch, reason=reason)]
        case WatchdogVerdict.OBSTRUCTS:
            return [revoke(book, book.config, standing, now=now)]
