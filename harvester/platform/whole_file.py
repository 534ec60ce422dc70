"""Files that are there whole or not at all, at whatever byte a kill or a power cut falls."""

import os
from pathlib import Path


def replace(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Raises OSError; what stood there stays then, and nothing else is left."""
    new = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(new, flags, mode), "wb") as file:
            # Whatever the umask.
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
