"""Detects permits that may be lost: a silent holder, or a phase longer than its known runs.

An overrun is warned of at once, and costs the permit only when another job waits for its nodes:
ending a phase that blocks no job would gain nothing. Pure; the policy acts on the verdict.
"""

from enum import StrEnum

from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage
from scheduler.rollmux.permits.longest_run import LongestRun
from scheduler.rollmux.permits.terms import PermitsConfig


class WatchdogVerdict(StrEnum):
    WELL = "well"
    SILENT = "silent"
    """No beat for the length of a lease."""
    LATE = "late"
    """Longer than its bound: warn."""
    OBSTRUCTS = "obstructs"
    """Warned, and another job waits: revoke."""
    OUT_OF_GRACE = "out_of_grace"


def verdict(
    permit: JobPermit, config: PermitsConfig, *, requested: bool, now: float
) -> WatchdogVerdict:
    """Verdict on a job with a permit; `requested`: another job requests one of its nodes."""
    if permit.last_call_s is None or now >= permit.last_call_s + config.lease_s:
        return WatchdogVerdict.SILENT
    if permit.stage is PermitStage.REVOKED:
        ends_s = (permit.revoked_s or 0.0) + config.grace_s
        return WatchdogVerdict.OUT_OF_GRACE if now >= ends_s else WatchdogVerdict.WELL
    if permit.warned_s is None:
        return WatchdogVerdict.LATE if now >= late_s(permit) else WatchdogVerdict.WELL
    obstructs = requested and now >= permit.warned_s + config.warn_s
    return WatchdogVerdict.OBSTRUCTS if obstructs else WatchdogVerdict.WELL


def late_s(permit: JobPermit) -> float:
    """Time at which the phase's work will reach its bound; infinite without a declared bound.

    Slow-down by other jobs' tails does not count as lateness.
    """
    return permit.worked_at_s + (bound_s(permit) - permit.worked_s) / permit.speed


def bound_s(permit: JobPermit) -> float:
    """Longest expected duration of the phase alone: as declared, or as its runs have shown."""
    phase = permit.phase
    if phase is None or phase.max_s is None:
        return float("inf")
    return permit.load_s + permit.longest_runs.get(phase.kind, LongestRun()).bound_s(phase.max_s)


def deadlines_s(permit: JobPermit, config: PermitsConfig) -> tuple[float, ...]:
    """Times at which time alone may change something for this job, passed deadlines included."""
    last_call_s = permit.last_call_s
    lapses_s = permit.enqueued_s + config.patience_s
    if last_call_s is not None:
        lapses_s = last_call_s + config.lease_s
    match permit.stage:
        case PermitStage.APART:
            return ()
        case PermitStage.WAITING:
            return (lapses_s,)
        case PermitStage.REVOKED:
            return lapses_s, (permit.revoked_s or 0.0) + config.grace_s
    if permit.warned_s is None:
        return lapses_s, late_s(permit)
    return lapses_s, permit.warned_s + config.warn_s
