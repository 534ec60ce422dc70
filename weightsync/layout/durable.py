"""Atomic file writes with the errors of a store; harvester.platform.whole_file writes.

Decides nothing about contents.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harvester.contracts.errors import ConfigError, Exhausted, RoseMuxError
from harvester.platform import whole_file


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: `path` holds its old bytes or `data`, never anything else.

    Raises Exhausted if the disk is full; `path` is then as it was.
    """
    with refusals(path.parent):
        whole_file.replace(path, data, mode=None)


def write_durably(path: Path, chunks: Iterable[Any]) -> int:
    """Writes and fsyncs a new file; returns its size in bytes."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


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
