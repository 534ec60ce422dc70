"""Files whole or not at all, with the errors of a store; harvester.platform.whole_file writes.

Decides nothing about contents.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harvester.contracts.errors import ConfigError, Corrupt, Exhausted, RoseMuxError
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


def read_plain(path: Path, limit_bytes: int) -> bytes:
    """A whole plain file. Raises OSError, and Corrupt over the limit or for another kind."""
    with open(path, "rb", opener=open_plain) as file:
        raw = file.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise Corrupt(f"{os.path.realpath(path)} is over the limit of {limit_bytes} bytes")
    return raw


def open_plain(path: str, flags: int) -> int:
    """Opens plain files only: another kind may never give anything, or never end."""
    # Without the flag, opening a pipe waits for its writer.
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Corrupt(f"{os.path.realpath(path)} is no plain file")
    return handle


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
