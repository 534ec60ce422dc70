"""Durable facts of the phase control in SQLite: each job's permit, numbers used, the plan, and the
clock of all kept times.

Written before an answer leaves, one row for each job that a decision changed. Synchronous to the
disk: on Ray a holder may outlive the machine that the control ran on, and its epoch must not be
given again. Locked for as long as it is open: two controls on one file would give nodes twice.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from harvester.contracts.clock import monotonic_origin
from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, TenantId
from harvester.platform.sqlite_file import open_database
from scheduler.rollmux.permits.job_permit import JobPermit

_CLOCK: Final = "clock"
_TIMES: Final = ("enqueued_s", "last_call_s", "started_s", "worked_at_s", "warned_s", "revoked_s")
"""Time fields of a job's permit record."""
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, ticket INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS jobs (job TEXT PRIMARY KEY, permit BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS owners (job TEXT PRIMARY KEY, tenant TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS plan (name TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;
"""


class KeptClock(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of all kept times, and its last reading."""

    origin: str
    now_s: float


class ControlState:
    """Raises ConfigError if the file is another control's or another version's."""

    def __init__(self, path: Path | None, *, lock_s: float = 5.0) -> None:
        """`lock_s` is how long to wait for a control that is just ending."""
        # A write-ahead log would need shared memory, which no network file system has.
        pragmas = ("locking_mode=EXCLUSIVE", "journal_mode=TRUNCATE")
        self._db = open_database(
            path, _SCHEMA, version=_SCHEMA_VERSION, pragmas=pragmas, lock_s=lock_s, threads=True
        )
        self._origin = monotonic_origin()

    def shift_s(self, *, now: float) -> float:
        """Seconds to add to kept times; after a reboot, the time in between does not count."""
        kept = self._db.execute("SELECT record FROM plan WHERE name = ?", (_CLOCK,)).fetchone()
        if kept is None:
            return 0.0
        before = msgspec.json.decode(kept[0], type=KeptClock)
        same = before.origin == self._origin and now >= before.now_s
        return 0.0 if same else now - before.now_s

    def snapshot(self, *, now: float) -> dict[str, Any] | None:
        """The snapshot that the policy restores, in the times of this clock; None if no state was
        ever kept."""
        counters = self._db.execute("SELECT epoch, ticket FROM counters").fetchone()
        if counters is None:
            return None
        rows = self._db.execute("SELECT permit FROM jobs ORDER BY job")
        jobs = [msgspec.json.decode(permit) for (permit,) in rows]
        by_s = self.shift_s(now=now)
        for job in jobs:
            job |= {name: job[name] + by_s for name in _TIMES if job.get(name) is not None}
        return {"epoch": counters[0], "ticket": counters[1], "jobs": jobs}

    def plan(self) -> dict[str, bytes]:
        """Records of a planning control beside the permits, by name."""
        rows = self._db.execute(
            "SELECT name, record FROM plan WHERE name != ? ORDER BY name", (_CLOCK,)
        )
        return dict(rows)

    def owners(self) -> dict[JobId, TenantId]:
        """Tenants of jobs; some of the jobs may be gone."""
        return dict(self._db.execute("SELECT job, tenant FROM owners"))

    def keep_owners(self, owners: Mapping[JobId, TenantId]) -> None:
        """Replaces the recorded owners. Raises Exhausted if the disk is full."""
        with self._transaction():
            self._db.execute("DELETE FROM owners")
            self._db.executemany("INSERT INTO owners VALUES (?, ?)", owners.items())

    def keep(
        self,
        counters: tuple[int, int],
        job_permits: Mapping[JobId, JobPermit | None],
        plan: Mapping[str, bytes | None],
        now: float,
    ) -> None:
        """Writes all records or none; None deletes one. Raises Exhausted if the disk is full."""
        clock = KeptClock(origin=self._origin, now_s=now)
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO counters VALUES (1, ?, ?)", counters)
            for job, permit in job_permits.items():
                if permit is None:
                    self._db.execute("DELETE FROM jobs WHERE job = ?", (job,))
                    continue
                body = msgspec.json.encode(permit)
                self._db.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?)", (job, body))
            for name, record in {**plan, _CLOCK: msgspec.json.encode(clock)}.items():
                if record is None:
                    self._db.execute("DELETE FROM plan WHERE name = ?", (name,))
                    continue
                self._db.execute("INSERT OR REPLACE INTO plan VALUES (?, ?)", (name, record))

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._db:
                self._db.execute("BEGIN")
                yield
        except sqlite3.Error as error:
            raise Exhausted(f"the state file cannot be written: {error}") from error
