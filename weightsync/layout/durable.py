"""Atomic file writes: a file exists whole or not at all, after a kill and after a power cut.

Decides nothing about contents.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harvester.contracts.errors import ConfigError, Exhausted, RoseMuxError

TEMPORARY = ".tmp-"
"""Prefix of the name of every unfinished file; the next owner removes them."""


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: `path` holds its old bytes or `data`, never anything else.

    Raises Exhausted if the disk is full; `path` is then as it was.
    """
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path.parent) from error


def write_durably(path: Path, chunks: Iterable[Any]) -> int:
    """Writes and fsyncs a new file; returns its size in bytes."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def sync_directory(path: Path) -> None:
    """Make created, replaced and removed names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def refusals(where: Path) -> Iterator[None]:
    """Turn an OSError inside the context into Exhausted or ConfigError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, where) from error


def storage_error(error: OSError, where: Path) -> RoseMuxError:
    """Exhausted for a full disk or quota, ConfigError for any other failed write."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return Exhausted(f"no space left in {where}: {error}")
    return ConfigError(f"cannot write to {where}: {error}")
