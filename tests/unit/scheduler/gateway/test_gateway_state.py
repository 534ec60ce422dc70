"""Durable facts come back after a restart."""

import sqlite3
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import Epoch, JobId, LeaseId, SlotId, WeightVersion
from scheduler.gateway.gateway_state import SchedulerState, StoredJob
from scheduler.gateway.policy.budget_ledger import BudgetLedger
from scheduler.gateway.policy.versions_events import VersionPublished
from scheduler.model import Lease

A, B = JobId("a"), JobId("b")


def published(
    job: JobId, store: str, version: int, state_hash: str = "", **more: bool
) -> VersionPublished:
    number = WeightVersion(version)
    return VersionPublished(job=job, store=store, version=number, state_hash=state_hash, **more)


def test_versions_activation_switches_and_leases_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.db"
    state = SchedulerState(path)
    state.publish(published(A, "sa", 1, "h1"))
    state.publish(published(A, "sa", 2, "h2"))
    state.publish(published(A, "sa", 2))
    state.activate(A)
    state.activate(B)
    state.set_harvesting(B, enabled=False)
    for job, enabled in ((A, False), (B, False), (B, False), (A, True)):
        state.use_dedicated(job, enabled=enabled)
    for name in ("l1", "l2"):
        lease = Lease(
            lease=LeaseId(name),
            slot=SlotId(name),
            agent="x",
            job=A,
            epoch=Epoch(3),
            expires_s=1e9,
        )
        state.keep_lease(lease)
    state.end(LeaseId("l1"))
    state.close()

    again = SchedulerState(path)
    assert again.jobs() == {
        A: StoredJob(published=published(A, "sa", 2, "h2", resumed=True)),
        B: StoredJob(published=published(B, "", 0, resumed=True), active=True, harvesting=False),
    }
    (held,) = again.leases()
    assert (held.lease, held.epoch) == ("l2", 3)
    assert again.parked() == [B]
    assert not held.usable(now=0.0, margin_s=0.0)
    again.close()


def test_a_power_cut_takes_back_no_version_that_was_acknowledged(tmp_path: Path) -> None:
    """A commit waits for the disk (2: FULL), but for budgets, which agents report again."""
    state = SchedulerState(tmp_path / "state.db")
    mode = state._db.execute("PRAGMA synchronous").fetchone()
    statements: list[str] = []
    state._db.set_trace_callback(statements.append)
    state.publish(published(A, "sa", 1))
    state.keep_budgets(BudgetLedger(), at_s=1.0)
    state.publish(published(A, "sa", 2))
    state._db.set_trace_callback(None)
    assert mode == state._db.execute("PRAGMA synchronous").fetchone() == (2,)
    order = [one for one in statements if one.startswith(("PRAGMA", "BEGIN"))]
    assert order == [
        "BEGIN",
        *("PRAGMA synchronous=NORMAL", "BEGIN", "PRAGMA synchronous=FULL"),
        "BEGIN",
    ]
    state.close()


def test_the_hash_of_a_version_is_not_that_of_the_next(tmp_path: Path) -> None:
    state = SchedulerState(tmp_path / "state.db")
    state.publish(published(A, "sa", 1, "h1"))
    state.publish(published(A, "sa", 2))
    assert state.jobs()[A].published.state_hash == ""
    state.publish(published(A, "other", 1))
    assert state.jobs()[A].published.state_hash == ""
    state.close()


def test_stores_come_back_in_the_order_of_their_publishes_also_from_an_older_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    state = SchedulerState(path)
    for job, store in ((B, "s"), (A, "s"), (B, "t"), (B, "s")):
        state.publish(published(job, store, 1))
    state.close()
    again = SchedulerState(path)
    assert again.stores() == [("s", B), ("s", A), ("t", B)]
    again.close()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE stores")
    db.close()
    older = SchedulerState(path)
    assert sorted(older.stores()) == [("s", A), ("s", B)]
    older.close()


def test_refuses_a_file_of_another_version_or_kind(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="schema 99"):
        SchedulerState(path)
    other = tmp_path / "text"
    other.write_text("not a database, but long enough to be looked at as one" * 10)
    with pytest.raises(ConfigError, match="text"):
        SchedulerState(other)


def test_a_fact_that_the_file_has_already_needs_no_room(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    log = path.with_name("state.db-wal")
    state = SchedulerState(path)
    for run in range(2):
        before = log.stat().st_size, log.stat().st_mtime_ns
        state.publish(published(A, "sa", 1, "h"), activate=True)
        state.activate(A)
        state.set_harvesting(A, enabled=False)
        state.use_dedicated(A, enabled=False)
        state.use_dedicated(B, enabled=True)
        state.end(LeaseId("l"))
        again = SchedulerState(path)
        assert again.jobs()[A].active
        again.close()
        assert (before == (log.stat().st_size, log.stat().st_mtime_ns)) is (run == 1)
    state.close()
