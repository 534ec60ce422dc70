"""A state file is opened by one schema version, and an unusable one is a clear error."""

import sqlite3
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from harvester.platform import sqlite_file

SCHEMA = "CREATE TABLE IF NOT EXISTS names (name TEXT) STRICT;"


def test_rows_and_pragmas_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.db"
    for _ in range(2):
        db = sqlite_file.open_database(path, SCHEMA, version=3, pragmas=("journal_mode=WAL",))
        db.execute("INSERT INTO names VALUES ('a')")
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        rows = db.execute("SELECT count(*) FROM names").fetchone()
        db.close()
    assert rows == (2,)


def test_a_file_of_this_version_is_opened_without_a_write(tmp_path: Path) -> None:
    path, pragmas = tmp_path / "state.db", ("journal_mode=WAL",)
    first = sqlite_file.open_database(path, SCHEMA, version=3, pragmas=pragmas)
    log = path.with_name("state.db-wal")
    before = log.stat().st_size
    sqlite_file.open_database(path, SCHEMA, version=3, pragmas=pragmas).close()
    assert log.stat().st_size == before
    first.close()


def test_a_file_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be looked at as one" * 10)
    for path, match in ((other, "schema 99; this version knows 1"), (text, "cannot use state")):
        with pytest.raises(ConfigError, match=match):
            sqlite_file.open_database(path, SCHEMA, version=1, pragmas=())


def test_a_damaged_file_is_a_clear_error_and_no_empty_one(tmp_path: Path) -> None:
    """As half a copy of it is, or one from a disk that lost a sector: the table has no rows."""
    path = tmp_path / "state.db"
    db = sqlite_file.open_database(path, SCHEMA, version=1, pragmas=())
    db.executemany("INSERT INTO names VALUES (?)", [(f"name {at}",) for at in range(1000)])
    db.close()
    whole, page = path.read_bytes(), 4096
    lost = whole[:page] + bytes(512) + whole[page + 512 :]
    for damaged in (lost, whole[:-page]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"damaged|malformed"):
            sqlite_file.open_database(path, SCHEMA, version=1, pragmas=())
    path.write_bytes(whole)
    sqlite_file.open_database(path, SCHEMA, version=1, pragmas=()).close()


def test_an_exclusive_file_has_one_user(tmp_path: Path) -> None:
    pragmas = ("locking_mode=EXCLUSIVE",)
    first = sqlite_file.open_database(tmp_path / "db", SCHEMA, version=1, pragmas=pragmas)
    with pytest.raises(ConfigError, match="locked"):
        sqlite_file.open_database(tmp_path / "db", SCHEMA, version=1, pragmas=pragmas, lock_s=0.0)
    first.close()
