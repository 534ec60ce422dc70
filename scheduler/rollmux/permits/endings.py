"""Ends of permits: done, failed, or taken back; and the consequences for the job."""

from typing import Final

from harvester.contracts.ids import Epoch, JobId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.accelerators import work_until
from scheduler.rollmux.permits.book import PermitTable
from scheduler.rollmux.permits.completion import CompletionCurve
from scheduler.rollmux.permits.events import (
    EndPermit,
    EnqueuePhase,
    FailJob,
    PermitEndReason,
    PhaseEnded,
    Refuse,
)
from scheduler.rollmux.permits.longest_run import LongestRun
from scheduler.rollmux.permits.places import enqueue
from scheduler.rollmux.permits.standing import JobPermit, PermitStage, PermitTrigger

_LEAST_S: Final = 1e-3
"""Least duration of a phase, in s: estimates need a positive one."""
_LEASED_MAX_RATIO: Final = 9.0
"""Cap on a phase's time saved by leases, over its duration."""

Ending = list[EndPermit | EnqueuePhase | FailJob | Refuse]


def ended(book: PermitTable, event: PhaseEnded, *, now: float) -> Ending:
    """Ends the permit by its holder's report; the next phase gets its place before its worker
    asks."""
    standing = book.holder(event.job, event.epoch)
    if standing is None or standing.kind is None:
        return [stale(event.job, event.epoch)]
    if event.failed:
        told = standing.stage is PermitStage.REVOKED
        reason = PermitEndReason.OVERRAN if told else PermitEndReason.FAILED
        return fail(book, standing, reason, event.failed, now=now)
    work_until(standing, now=now)
    leased_s = min(max(0.0, event.leased_s), _LEASED_MAX_RATIO * standing.worked_s)
    _learn(standing, standing.kind, loading_s=event.loading_s, leased_s=leased_s)
    done = end(
        book,
        standing,
        PermitEndReason.DONE,
        "",
        now=now,
        loading_s=event.loading_s,
        leased_s=leased_s,
        stays_loaded=event.stays_loaded,
    )
    effects: Ending = [done]
    # Terms may have changed while it ran, and no longer know this phase.
    if standing.terms.phase(standing.kind) is None:
        return effects
    return [*effects, enqueue(book, standing, standing.terms.after(standing.kind), now=now)]


def _learn(standing: JobPermit, kind: PhaseKind, *, loading_s: float, leased_s: float) -> None:
    """Learns the phase's duration and its completion, for the threshold of its tail."""
    longest = standing.longest_runs.get(kind, LongestRun())
    standing.longest_runs[kind] = longest.completed(standing.worked_s)
    lasted_s = _solo_s(standing, loading_s, leased_s)
    phase = standing.terms.phase(kind)
    learns = phase is not None and phase.learn_tail and not standing.was_away
    if learns and standing.course is not None:
        before = standing.curves.get(kind, CompletionCurve())
        standing.curves[kind] = before.after(standing.course, lasted_s=lasted_s)


def end(
    book: PermitTable,
    standing: JobPermit,
    reason: PermitEndReason,
    words: str,
    *,
    now: float,
    loading_s: float = 0.0,
    leased_s: float = 0.0,
    stays_loaded: bool = False,
) -> EndPermit:
    assert standing.kind is not None
    work_until(standing, now=now)
    if stays_loaded:
        book.leave_loaded(standing)
    if reason is PermitEndReason.SILENT and standing.loaded_by == standing.holder:
        book.unload(standing, standing.loaded)
    book.free(standing, standing.nodes)
    book.leave_lines(standing)
    standing.move(PermitTrigger.ENDED)
    standing.ended = reason
    return EndPermit(
        job=standing.job,
        kind=standing.kind,
        epoch=standing.epoch,
        ended=reason,
        reason=words,
        solo_s=_solo_s(standing, loading_s, leased_s),
        measured=not standing.was_away,
        loading_s=loading_s,
    )


def _solo_s(standing: JobPermit, loading_s: float, leased_s: float) -> float:
    """Duration of the phase's work so far, alone on its own nodes, in s."""
    return max(_LEAST_S, standing.worked_s - max(0.0, loading_s) + leased_s)


def fail(
    book: PermitTable, standing: JobPermit, reason: PermitEndReason, words: str, *, now: float
) -> Ending:
    if reason is PermitEndReason.OVERRAN and standing.kind is not None:
        longest = standing.longest_runs.get(standing.kind, LongestRun())
        work_until(standing, now=now)
        standing.longest_runs[standing.kind] = longest.cut(standing.worked_s)
    ending = end(book, standing, reason, words, now=now)
    standing.failures += 1
    return [ending, FailJob(job=standing.job, reason=words)]


def stale(job: JobId, epoch: Epoch) -> Refuse:
    return Refuse(job=job, reason=f"epoch {epoch} is not in force")
