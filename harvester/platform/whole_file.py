"""Files that exist whole or not at all, at whatever byte a kill or a power cut falls."""

import errno
import os
import tempfile
from pathlib import Path

from harvester.contracts.errors import ConfigError

TEMPORARY = ".tmp-"
"""Prefix of the name of every unfinished file; the next write of the file replaces it."""


def replace(path: Path, data: bytes, *, mode: int | None = 0o600) -> None:
    """Replaces a file with mode `mode`, None for the umask's.

    Raises OSError; what stood there stays then, and nothing else is left.
    """
    new = path.with_name(TEMPORARY + path.name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(new, flags, 0o666 if mode is None else mode), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # Whatever the umask.
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def is_there(path: Path) -> bool:
    """Raises PermissionError where this user may not look: `Path.exists` does so before Python 3.14
    and says False from it on. A link that leads nowhere, or to itself, leads to no file."""
    try:
        path.stat()
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            raise
        return False
    return True


def sync_directory(path: Path) -> None:
    """Make created, replaced and removed names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_writable(path: Path) -> None:
    """Make the folder of a command's output file before the command's work. Raises ConfigError
    where a file could not be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # The file keeps its content until there is new content to replace it.
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Replaces the file only once the text is whole. Raises ConfigError where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
