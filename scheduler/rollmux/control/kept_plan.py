"""The plan in the state file: one record per job, one for the layout, one for the clock.

They are written with the permits that the same decision has changed, in one transaction.
"""

from typing import Any, Final

import msgspec

from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.cluster_record import (
    ClusterRecord,
    JobRecord,
    Layout,
    job_record,
    layout,
)

_LAYOUT: Final = "layout"
_CLOCK: Final = "clock"
_JOB: Final = "job/"
_TIMES: Final = (
    "enqueued_s",
    "heard_s",
    "started_s",
    "worked_at_s",
    "warned_s",
    "revoked_s",
)
"""Time fields of a job's permit record."""


class KeptClock(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of all kept times, and its last reading."""

    origin: str
    now_s: float


def changed_records(policy: ClusterPolicy, clock: KeptClock) -> dict[str, bytes | None]:
    """Records to write, None for removed ones; empty if nothing has changed."""
    if not policy.unsaved and not policy.layout_changed:
        return {}
    records: dict[str, bytes | None] = {_CLOCK: msgspec.json.encode(clock)}
    for job in sorted(policy.unsaved):
        record = job_record(policy, job)
        records[_JOB + job] = None if record is None else msgspec.json.encode(record)
    if policy.layout_changed:
        records[_LAYOUT] = msgspec.json.encode(layout(policy))
    return records


def shift_s(kept: dict[str, bytes], clock: KeptClock) -> float:
    """Seconds to add to kept times; after a reboot, the time in between does not count."""
    if _CLOCK not in kept:
        return 0.0
    before = msgspec.json.decode(kept[_CLOCK], type=KeptClock)
    same = before.origin == clock.origin and clock.now_s >= before.now_s
    return 0.0 if same else clock.now_s - before.now_s


def shifted(snapshot: dict[str, Any], by_s: float) -> dict[str, Any]:
    """The permit policy's snapshot with its times shifted by `by_s`."""
    jobs = [
        {
            name: value + by_s if name in _TIMES and value is not None else value
            for name, value in job.items()
        }
        for job in snapshot["jobs"]
    ]
    return {**snapshot, "jobs": jobs}


def kept_memory(kept: dict[str, bytes], *, by_s: float) -> dict[str, Any]:
    """The plan's snapshot with its times shifted by `by_s`."""
    jobs = tuple(
        msgspec.json.decode(record, type=JobRecord).shifted(by_s)
        for name, record in kept.items()
        if name.startswith(_JOB)
    )
    where = msgspec.json.decode(kept[_LAYOUT], type=Layout) if _LAYOUT in kept else Layout()
    memory: dict[str, Any] = msgspec.to_builtins(ClusterRecord(layout=where, jobs=jobs))
    return memory


def kept_jobs(kept: dict[str, bytes]) -> frozenset[JobId]:
    return frozenset(JobId(name.removeprefix(_JOB)) for name in kept if name.startswith(_JOB))
