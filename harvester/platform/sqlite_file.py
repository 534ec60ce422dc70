"""Opens a service's SQLite file. A commit is on the disk when it returns."""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from harvester.contracts.errors import ConfigError


def open_database(
    path: Path | None,
    schema: str,
    *,
    version: int,
    pragmas: Iterable[str],
    lock_s: float = 5.0,
    threads: bool = False,
) -> sqlite3.Connection:
    """A connection without implicit transactions; None: in memory.

    `threads`: used by several threads, by one of them at a time.

    `schema` creates missing tables. `lock_s`: longest wait for another process's lock. Raises
    ConfigError if the file is locked, no database, damaged or of another version.
    """
    where = ":memory:" if path is None else str(path)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(
            where, isolation_level=None, check_same_thread=not threads, timeout=lock_s
        )
        for pragma in ("synchronous=FULL", *pragmas):
            db.execute(f"PRAGMA {pragma}")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found not in (0, version):
            raise ConfigError(f"{where} has schema {found}; this version knows {version}")
        # A damaged page may read as a table without rows, or fail at a later read.
        (damage,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise ConfigError(
                f"state file {where} is damaged: put a whole copy in its place; "
                "without the file this process begins with no state"
            )
        db.executescript(schema)
        if found != version:  # Writing it again takes room, which a full disk has not.
            db.execute(f"PRAGMA user_version={version}")
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"cannot use state file {where}: {error}") from error
    return db
