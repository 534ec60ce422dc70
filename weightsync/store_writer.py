"""The one writer of a store: versions appear whole or not at all.

A version is written into a `.tmp-` directory, by one process or several, fsynced, marked READY and
renamed; only then does LATEST name it. A kill at any byte leaves the previous version as it was,
and the next writer sweeps the leftovers. Decides nothing about contents.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from harvester.contracts.errors import ConfigError, PeerProtocolError, RoseMuxError
from harvester.contracts.ids import WeightVersion, is_name
from weightsync.durable import TEMPORARY, refusals, sync_directory
from weightsync.store import LATEST_FILE, READY_FILE, Kind, Store, VersionRef

_LOCK_FILE = ".publisher-lock"


class FileWriter(Protocol):
    def __call__(self, path: Path, chunks: Iterable[Any]) -> int:
        """Writes a new file durably; returns its size in bytes."""
        ...


def write_durably(path: Path, chunks: Iterable[Any]) -> int:
    """Writes and fsyncs a file."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def refusing(write: FileWriter, root: Path) -> FileWriter:
    """`write`, with what the file system says as an error of ours."""

    def written(path: Path, chunks: Iterable[Any]) -> int:
        with refusals(root):
            return write(path, chunks)

    return written


def begun(root: Path, name: str) -> Path:
    """The directory that another rank was told to write into; raises PeerProtocolError."""
    if not name.startswith(TEMPORARY) or not is_name(name.removeprefix(TEMPORARY)):
        raise PeerProtocolError(f"{name!r} is no directory that a version is begun in")
    return root / name


class StoreWriter:
    """Holds the store's lock for as long as it lives; `close` gives it back.

    `write` is how a file is written: tests replace it to crash at a chosen byte.
    """

    def __init__(self, root: Path, *, write: FileWriter = write_durably) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._write = refusing(write, root)
        self._lock = (root / _LOCK_FILE).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(f"{root} has a publisher already: stop it or use another") from error
        self.sweep()
        self.store = Store(root)

    def close(self) -> None:
        self._lock.close()

    def begin(self, ref: VersionRef) -> Path:
        """A directory to write a version into; nobody who was given an earlier one writes here.

        There is one at a time: a straggler may have kept an earlier one from being deleted.
        """
        self.sweep()
        directory = self._root / f"{TEMPORARY}{ref.directory}-{secrets.token_hex(4)}"
        with refusals(self._root):
            directory.mkdir()
        return directory

    def write(self, path: Path, chunks: Iterable[Any]) -> int:
        """Writes one file; raises Exhausted where the disk is full."""
        return self._write(path, chunks)

    def finish(self, directory: Path, ref: VersionRef) -> int:
        """Makes a version appear whose files are written; returns its size in bytes."""
        with refusals(self._root):
            size = sum(file.stat().st_size for file in directory.iterdir())
            self._write(directory / READY_FILE, [])
            sync_directory(directory)
            directory.rename(self._root / ref.directory)
            sync_directory(self._root)
        return size

    def point_latest(self, version: WeightVersion) -> None:
        """Replaces LATEST."""
        temporary = self._root / f"{TEMPORARY}{LATEST_FILE}"
        line = VersionRef(Kind.WEIGHT, version).directory + "\n"
        with refusals(self._root):
            try:
                self._write(temporary, [line.encode()])
                temporary.rename(self._root / LATEST_FILE)
            except (OSError, RoseMuxError):
                temporary.unlink(missing_ok=True)
                raise
            sync_directory(self._root)

    def remove(self, ref: VersionRef) -> None:
        """Deletes one version; a reader sees it whole or not at all."""
        doomed = self._root / f"{TEMPORARY}pruned-{ref.directory}"
        with refusals(self._root):
            (self._root / ref.directory).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def sizes(self) -> dict[VersionRef, int]:
        """What each directory of a version takes, finished or not."""
        return {
            ref: sum(file.stat().st_size for file in (self._root / ref.directory).iterdir())
            for ref in self.store.refs()
        }

    def sweep(self) -> None:
        """Deletes what was begun and not finished."""
        for leftover in self._root.glob(f"{TEMPORARY}*"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
