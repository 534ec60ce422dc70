"""The one writer of a store: versions appear whole or not at all.

A version is written into a `.tmp-` directory, fsynced, marked READY and renamed; only then does
LATEST name it. A kill at any byte leaves the previous version as it was, and the next writer sweeps
the leftovers. Decides nothing about contents.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import WeightVersion
from weightsync.store import LATEST_FILE, READY_FILE, Kind, Store, VersionRef

_TEMPORARY = ".tmp-"
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


class StoreWriter:
    """Holds the store's lock for as long as it lives; `close` gives it back.

    `write` is how a file is written: tests replace it to crash at a chosen byte.
    """

    def __init__(self, root: Path, *, write: FileWriter = write_durably) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._write = write
        self._lock = (root / _LOCK_FILE).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(f"{root} has a publisher already: stop it or use another") from error
        self._sweep()
        self.store = Store(root)

    def close(self) -> None:
        self._lock.close()

    def commit(self, ref: VersionRef, files: Mapping[str, Iterable[Any]]) -> int:
        """Makes one version directory appear; returns its size in bytes.

        Raises Exhausted where the disk is full; the store is then as it was before.
        """
        temporary = self._root / f"{_TEMPORARY}{ref.directory}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            size = sum(self._write(temporary / name, chunks) for name, chunks in files.items())
            self._write(temporary / READY_FILE, [])
            _fsync_directory(temporary)
            temporary.rename(self._root / ref.directory)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _refusal(error, self._root) from error
        _fsync_directory(self._root)
        return size

    def point_latest(self, version: WeightVersion) -> None:
        """Replaces LATEST."""
        temporary = self._root / f"{_TEMPORARY}{LATEST_FILE}"
        line = VersionRef(Kind.WEIGHT, version).directory + "\n"
        try:
            self._write(temporary, [line.encode()])
            temporary.rename(self._root / LATEST_FILE)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _refusal(error, self._root) from error
        _fsync_directory(self._root)

    def remove(self, ref: VersionRef) -> None:
        """Deletes one version; a reader sees it whole or not at all."""
        doomed = self._root / f"{_TEMPORARY}pruned-{ref.directory}"
        (self._root / ref.directory).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self) -> None:
        for leftover in self._root.glob(f"{_TEMPORARY}*"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refusal(error: OSError, root: Path) -> Exception:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return Exhausted(f"no space left for another version in {root}: {error}")
    return ConfigError(f"cannot write to the weight store {root}: {error}")
