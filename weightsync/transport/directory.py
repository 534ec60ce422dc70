"""A store in a directory of a local or shared file system."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harvester.contracts.errors import ConfigError, Corrupt
from weightsync.layout.durable import open_plain, read_plain
from weightsync.transport.source import StoreSource, no_store


def local_path(given: Path | str) -> Path:
    """A path as a user writes it: `~` is a home directory. Raises ConfigError without one, and for
    an empty text, which would be the working directory."""
    if not given:
        raise ConfigError("an empty location: give a directory or URL")
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{given}: {error}") from error


class DirectorySource(StoreSource):
    """Reads files in place; one stream, because the kernel reads ahead by itself."""

    streams = 1
    range_bytes = 64 << 20

    def __init__(self, root: Path, *, links_out: bool = True) -> None:
        """`links_out`: whether links below the root may lead out of it."""
        with readable(root):
            if not root.is_dir():
                raise no_store(root)
        self._root = root
        self._links_out = links_out

    def __str__(self) -> str:
        return str(self._root)

    def names_in(self, directory: str) -> frozenset[str]:
        with self._found(directory) as found:
            return frozenset(each.name for each in found.iterdir())

    def is_inside(self, path: str) -> bool:
        try:
            return (self._root / path).resolve().is_relative_to(self._root.resolve())
        except (OSError, RuntimeError):
            # Links in a circle lead nowhere.
            return False

    def stamp(self, path: str) -> str:
        with self._found(path) as there:
            found = there.stat()
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        with self._found(path) as found:
            return read_plain(found, limit_bytes)

    def size_bytes(self, path: str) -> int:
        with self._found(path) as found:
            return found.stat().st_size

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        with self._found(path) as found, open(found, "rb", 0, opener=open_plain) as file:
            file.seek(start)
            at = 0
            # One call moves at most 2 GiB.
            while at < len(into) and (got := file.readinto(into[at:])):
                at += got
        if at < len(into):
            raise Corrupt(f"{self._root / path} ends at byte {start + at} of {start + len(into)}")

    @contextmanager
    def _found(self, path: str) -> Iterator[Path]:
        """A path of what lies there, and of nothing that takes its place meanwhile."""
        full = self._root / path
        with readable(full):
            if self._links_out:
                yield full
                return
            handle = os.open(full, os.O_PATH)
            try:
                held = Path(f"/proc/self/fd/{handle}")
                if not held.readlink().is_relative_to(self._root.resolve()):
                    raise Corrupt(f"{full} is a link out of the store: it is not read")
                yield held
            finally:
                os.close(handle)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError inside the context into ConfigError or Corrupt, but for a missing file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give this user the right"
        ) from error
    except OSError as error:
        raise Corrupt(f"cannot read {path}: {error.strerror or error}") from error
