"""Durable facts of the scheduler in SQLite: what each job published, leases in hand, the error
budgets of services, and the cluster's stops.

A restart resumes with them. Lease times are not kept: after a restart a lease counts as held only
once its agent has renewed it. Budgets have a time of their own, which stands still while no
scheduler runs: no clock is compared over a restart.
"""

from contextlib import ExitStack
from pathlib import Path

import msgspec

from harvester.contracts.ids import Epoch, JobId, LeaseId, SlotId, WeightVersion
from harvester.contracts.wire.stops import Stop
from harvester.platform.sqlite_file import open_database
from scheduler.gateway.policy.budget_ledger import (
    BudgetLedger,
    HourKey,
    LifeKey,
    SharedHour,
    SlotAccount,
)
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.model import Lease

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    job TEXT PRIMARY KEY, store TEXT NOT NULL DEFAULT '', version INTEGER NOT NULL DEFAULT 0,
    active INTEGER NOT NULL DEFAULT 0, harvesting INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS state_hashes (
    job TEXT PRIMARY KEY, store TEXT NOT NULL, version INTEGER NOT NULL, state_hash TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS other_runs (job TEXT PRIMARY KEY, reason TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS leases (
    lease TEXT PRIMARY KEY, slot TEXT NOT NULL, agent TEXT NOT NULL, job TEXT NOT NULL,
    epoch INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS parked (job TEXT PRIMARY KEY) STRICT;
CREATE TABLE IF NOT EXISTS budget_time (one INTEGER PRIMARY KEY, at_s REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS budget_accounts (
    service TEXT NOT NULL, life TEXT NOT NULL, account BLOB NOT NULL, PRIMARY KEY (service, life)
) STRICT;
CREATE TABLE IF NOT EXISTS budget_hours (
    service TEXT NOT NULL, hour INTEGER NOT NULL, counts BLOB NOT NULL,
    PRIMARY KEY (service, hour)
) STRICT;
CREATE TABLE IF NOT EXISTS stops (tenant TEXT PRIMARY KEY, stop BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS stores (
    number INTEGER PRIMARY KEY, store TEXT NOT NULL, job TEXT NOT NULL, UNIQUE (store, job)
) STRICT;
INSERT OR IGNORE INTO stores (store, job) SELECT store, job FROM jobs WHERE store != '';
"""
"""The last line fills `stores` of a file that an older gateway wrote without it."""


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    published: VersionPublished
    active: bool = False
    harvesting: bool | None = None
    """The job's last switch; None before the first: the configuration applies."""


class SchedulerState:
    """Raises ConfigError if the file cannot be opened or belongs to another version, and
    sqlite3.Error if it cannot be written, which changes nothing. Values that it holds already
    are not written again, and need no room on a full disk."""

    def __init__(self, path: Path | None) -> None:
        pragmas = ("journal_mode=WAL",)
        self._db = open_database(path, _SCHEMA, version=_SCHEMA_VERSION, pragmas=pragmas)

    def jobs(self) -> dict[JobId, StoredJob]:
        rows = self._db.execute(
            "SELECT job, store, version, coalesce(state_hash, ''), active, harvesting "
            "FROM jobs LEFT JOIN state_hashes USING (job, store, version)"
        )
        return {
            JobId(job): StoredJob(
                published=VersionPublished(
                    job=JobId(job),
                    store=store,
                    version=WeightVersion(version),
                    state_hash=state_hash,
                    resumed=True,
                ),
                active=bool(active),
                harvesting=None if harvesting is None else bool(harvesting),
            )
            for job, store, version, state_hash, active, harvesting in rows
        }

    def publish(
        self,
        published: VersionPublished,
        *,
        activate: bool = False,
        owns: bool = True,
        resumes: bool = True,
    ) -> None:
        """`owns`: the store is remembered as the job's; `resumes`: its turns are taken again."""
        job, store, version = published.job, published.store, published.version
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute(
                "INSERT INTO jobs (job, store, version) VALUES (?, ?, ?) ON CONFLICT (job) "
                "DO UPDATE SET store = excluded.store, version = excluded.version "
                "WHERE store != excluded.store OR version != excluded.version",
                (job, store, version),
            )
            if published.state_hash:
                self._db.execute(
                    "INSERT OR REPLACE INTO state_hashes SELECT ?, ?, ?, ? "
                    "EXCEPT SELECT * FROM state_hashes",
                    (job, store, version, published.state_hash),
                )
            if resumes:
                self._db.execute("DELETE FROM other_runs WHERE job = ?", (job,))
            if owns:
                self._db.execute(
                    "INSERT OR IGNORE INTO stores (store, job) VALUES (?, ?)", (store, job)
                )
            if activate:
                self._activate(job)

    def other_runs(self) -> dict[JobId, str]:
        """Reasons for refusing the turns of jobs whose trainer began another run."""
        return {JobId(job): why for job, why in self._db.execute("SELECT * FROM other_runs")}

    def refuse_turns(self, job: JobId, reason: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO other_runs VALUES (?, ?)", (job, reason))

    def stores(self) -> list[tuple[str, JobId]]:
        """Pairs of a store and a job that has published to it, the oldest first."""
        rows = self._db.execute("SELECT store, job FROM stores ORDER BY number")
        return [(store, JobId(job)) for store, job in rows]

    def activate(self, job: JobId) -> None:
        with self._db:
            self._db.execute("BEGIN")
            self._activate(job)

    def _activate(self, job: JobId) -> None:
        self._db.execute("UPDATE jobs SET active = 0 WHERE active AND job != ?", (job,))
        self._db.execute(
            "INSERT INTO jobs (job, active) VALUES (?, 1) "
            "ON CONFLICT (job) DO UPDATE SET active = 1 WHERE NOT active",
            (job,),
        )

    def set_harvesting(self, job: JobId, *, enabled: bool) -> None:
        self._db.execute(
            "INSERT INTO jobs (job, harvesting) VALUES (?, ?) "
            "ON CONFLICT (job) DO UPDATE SET harvesting = excluded.harvesting "
            "WHERE harvesting IS NOT excluded.harvesting",
            (job, int(enabled)),
        )

    def parked(self) -> list[JobId]:
        """Jobs whose turns may not run on dedicated engines."""
        return [JobId(job) for (job,) in self._db.execute("SELECT job FROM parked ORDER BY job")]

    def use_dedicated(self, job: JobId, *, enabled: bool) -> None:
        if enabled:
            self._db.execute("DELETE FROM parked WHERE job = ?", (job,))
        else:
            self._db.execute("INSERT OR IGNORE INTO parked (job) VALUES (?)", (job,))

    def leases(self) -> list[Lease]:
        """Leases of the earlier process; their end is in the past, so that they need a renewal."""
        rows = self._db.execute("SELECT lease, slot, agent, job, epoch FROM leases ORDER BY lease")
        return [
            Lease(
                lease=LeaseId(lease),
                slot=SlotId(slot),
                agent=agent,
                job=JobId(job),
                epoch=Epoch(epoch),
                expires_s=float("-inf"),
            )
            for lease, slot, agent, job, epoch in rows
        ]

    def keep_lease(self, lease: Lease) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO leases (lease, slot, agent, job, epoch) VALUES (?, ?, ?, ?, ?)",
            (lease.lease, lease.slot, lease.agent, lease.job, lease.epoch),
        )

    def end(self, lease: LeaseId) -> None:
        self._db.execute("DELETE FROM leases WHERE lease = ?", (lease,))

    def stops(self) -> list[Stop]:
        """The cluster's last order for each tenant, lifted ones too."""
        rows = self._db.execute("SELECT stop FROM stops ORDER BY tenant")
        return [msgspec.json.decode(stop, type=Stop) for (stop,) in rows]

    def keep_stop(self, stop: Stop) -> None:
        row = (stop.tenant, msgspec.json.encode(stop))
        self._db.execute("INSERT OR REPLACE INTO stops VALUES (?, ?)", row)

    def budgets(self) -> tuple[BudgetLedger, float]:
        """The ledger of error budgets, and its time when it was kept last."""
        times = self._db.execute("SELECT at_s FROM budget_time").fetchone()
        accounts = self._db.execute("SELECT service, life, account FROM budget_accounts")
        hours = self._db.execute("SELECT service, hour, counts FROM budget_hours")
        ledger = BudgetLedger(
            {
                LifeKey(service, life): msgspec.msgpack.decode(account, type=SlotAccount)
                for service, life, account in accounts
            },
            {
                HourKey(service, hour): msgspec.msgpack.decode(counts, type=SharedHour)
                for service, hour, counts in hours
            },
        )
        return ledger, times[0] if times else 0.0

    def keep_budgets(self, ledger: BudgetLedger, *, at_s: float) -> None:
        """Keep all that has changed, or nothing. Raises sqlite3.Error.

        Does not wait for the disk, as it comes with each renewal of a lease: a power cut takes back
        seconds, which agents report again, and with them the allotments that they have.
        """
        self._db.execute("PRAGMA synchronous=NORMAL")
        with ExitStack() as after, self._db:
            after.callback(self._db.execute, "PRAGMA synchronous=FULL")
            self._db.execute("BEGIN")
            self._db.execute("INSERT OR REPLACE INTO budget_time VALUES (1, ?)", (at_s,))
            for key in ledger.changed:
                where = msgspec.structs.astuple(key)
                value: SlotAccount | SharedHour | None
                if isinstance(key, HourKey):
                    table, column, value = "hours", "hour", ledger.hours.get(key)
                else:
                    table, column, value = "accounts", "life", ledger.accounts.get(key)
                self._db.execute(
                    f"DELETE FROM budget_{table} WHERE service = ? AND {column} = ?", where
                )
                if value is not None:
                    self._db.execute(
                        f"INSERT INTO budget_{table} VALUES (?, ?, ?)",
                        (*where, msgspec.msgpack.encode(value)),
                    )
        ledger.changed.clear()

    def close(self) -> None:
        self._db.close()
