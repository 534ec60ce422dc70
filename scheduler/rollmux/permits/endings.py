"""Ends of permits: done, failed, or taken back; and the consequences for the job."""

from typing import Final

from harvester.contracts.ids import Epoch, JobId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.completion import CompletionCurve
from scheduler.rollmux.permits.events import EndPermit, EnqueuePhase, Leave, PermitEndReason, Refuse
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage, PermitTrigger
from scheduler.rollmux.permits.longest_run import LongestRun
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.starts import enqueue
from scheduler.rollmux.permits.tail_room import LostTime

_LEAST_S: Final = 1e-3
"""Least duration of a phase, in s: estimates need a positive one."""
_LEASED_MAX_RATIO: Final = 9.0
"""Cap on a phase's time saved by leases, over its duration."""


def ended(
    table: PermitTable, event: Leave, *, now: float
) -> list[EndPermit | EnqueuePhase | Refuse]:
    """Ends the permit by its holder's report; the next phase gets its place before its worker
    asks."""
    permit = table.holder(event.job, event.epoch)
    if permit is None or permit.kind is None:
        return [stale(event.job, event.epoch)]
    if event.failed:
        asked = permit.stage is PermitStage.REVOKED
        reason = PermitEndReason.OVERRAN if asked else PermitEndReason.FAILED
        stays_loaded = event.stays_loaded
        return [fail(table, permit, reason, event.failed, now=now, stays_loaded=stays_loaded)]
    permit.work_until(now)
    leased_s = min(max(0.0, event.leased_s), _LEASED_MAX_RATIO * permit.worked_s)
    loading_s = min(event.loading_s, permit.worked_s)
    released_s = min(event.released_s, loading_s)
    lost = _learn(
        permit, permit.kind, loading_s=loading_s, released_s=released_s, leased_s=leased_s
    )
    done = end(
        table,
        permit,
        PermitEndReason.DONE,
        "",
        now=now,
        loading_s=loading_s,
        saved_s=leased_s - lost.here_s,
        earlier_lost_s=lost.earlier_s,
        stays_loaded=event.stays_loaded,
    )
    # Terms may have changed while it ran, and no longer know this phase.
    if permit.terms.phase(permit.kind) is None:
        return [done]
    return [done, enqueue(table, permit, permit.terms.after(permit.kind), now=now)]


def _learn(
    permit: JobPermit, kind: PhaseKind, *, loading_s: float, released_s: float, leased_s: float
) -> LostTime:
    """Learns the phase's duration and its completion, for the threshold of its tail; returns what
    its tail has lost on a part of its nodes."""
    longest = permit.longest_runs.get(kind, LongestRun())
    permit.longest_runs[kind] = longest.completed(permit.worked_s)
    lasted_s = _solo_s(permit, loading_s, leased_s)
    phase = permit.terms.phase(kind)
    learns = phase is not None and phase.learn_tail and not permit.was_away
    if not learns or permit.course is None:
        return LostTime()
    curve, lost, tail = permit.curves.get(kind, CompletionCurve()), LostTime(), permit.tail
    loaded_s = loading_s - released_s
    if tail is not None and tail.left_s is not None:
        worked_s = permit.worked_s - released_s
        curve, lost = curve.after_move(tail, worked_s=worked_s, loading_s=loaded_s)
    elif tail is None and not permit.accelerators:
        # A tail that ended before its move was a short one, and one beside another's ran on a part.
        curve = curve.after(permit.course, lasted_s=lasted_s, loading_s=loaded_s)
    permit.curves[kind] = curve
    return lost


def end(
    table: PermitTable,
    permit: JobPermit,
    reason: PermitEndReason,
    words: str,
    *,
    now: float,
    loading_s: float = 0.0,
    saved_s: float = 0.0,
    earlier_lost_s: float = 0.0,
    stays_loaded: bool = False,
) -> EndPermit:
    """`saved_s`: how much longer the phase's work would have taken alone on its own nodes."""
    assert permit.kind is not None
    permit.work_until(now)
    if stays_loaded:
        table.leave_loaded(permit)
    if reason is PermitEndReason.SILENT and permit.loaded_by == permit.holder:
        table.unload(permit, permit.loaded)
    table.free(permit, permit.nodes)
    table.leave_lines(permit)
    permit.move(PermitTrigger.ENDED)
    permit.ended = reason
    return EndPermit(
        job=permit.job,
        kind=permit.kind,
        epoch=permit.epoch,
        ended=reason,
        reason=words,
        solo_s=_solo_s(permit, loading_s, saved_s),
        measured=not permit.was_away,
        loading_s=loading_s,
        earlier_lost_s=earlier_lost_s,
    )


def _solo_s(permit: JobPermit, loading_s: float, saved_s: float) -> float:
    """Duration of the phase's work so far, alone on its own nodes, in s."""
    return max(_LEAST_S, permit.worked_s - max(0.0, loading_s) + saved_s)


def fail(
    table: PermitTable,
    permit: JobPermit,
    reason: PermitEndReason,
    words: str,
    *,
    now: float,
    stays_loaded: bool = False,
) -> EndPermit:
    """The job has lost its permit; it comes again from its last checkpoint, as if it were new."""
    if reason is PermitEndReason.OVERRAN and permit.kind is not None:
        longest = permit.longest_runs.get(permit.kind, LongestRun())
        permit.work_until(now)
        permit.longest_runs[permit.kind] = longest.cut(permit.worked_s)
    permit.failures += 1
    # The phases of the lost iteration are no time alone any more: what they may have lost is gone.
    permit.curves = {kind: curve.forget_tails() for kind, curve in permit.curves.items()}
    return end(table, permit, reason, words, now=now, stays_loaded=stays_loaded)


def stale(job: JobId, epoch: Epoch) -> Refuse:
    return Refuse(job=job, reason=f"epoch {epoch} is not in force")
