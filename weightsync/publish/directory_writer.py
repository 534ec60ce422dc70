"""A store that is written in a directory of a local or shared file system.

A version is written into a `.tmp-` directory, by one process or several, fsynced, marked READY and
renamed; only then does LATEST name it.

A lock keeps a second publisher out where locks hold. On a file system whose locks are those of one
host, the newest publisher takes the store over, as in an object store: its token is in the lock's
file, and every publisher reads that before it changes what readers see.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from harvester.contracts.errors import ConfigError, Corrupt, PeerProtocolError, RoseMuxError
from harvester.contracts.ids import WeightVersion, checked_name, is_name
from harvester.platform.file_lock import locked
from harvester.platform.whole_file import TEMPORARY, sync_directory
from weightsync.elements.bits import Bytes
from weightsync.layout.durable import refusals, write_durably
from weightsync.layout.names import LATEST_FILE, READY_FILE, VersionRef, latest_line
from weightsync.publish.agreement import Shard, final_names
from weightsync.publish.store_writer import Draft
from weightsync.reading.store import Store

FileWriter: TypeAlias = Callable[[Path, Iterable[Any]], int]
"""Writes a new file durably; returns its size in bytes."""
_LOCK_FILE = ".publisher-lock"
_FULL_FILE_BYTES = 1 << 37
"""Half of what readers take as one file."""


class WritableDirectory:
    """`write` is how a file is written: tests replace it to crash at a chosen byte."""

    def __init__(self, root: Path, *, write: FileWriter = write_durably) -> None:
        with refusals(root):
            root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._write = write
        self.ranks_dir: Path | None = root

    def reader(self) -> Store:
        return Store(self._root)

    def writer(self) -> "DirectoryWriter":
        return DirectoryWriter(self._root, self._write)

    def draft(self, begun: str) -> "DirectoryDraft":
        if not begun.startswith(TEMPORARY) or not is_name(begun.removeprefix(TEMPORARY)):
            raise PeerProtocolError(f"{begun!r} is not a draft directory of this store")
        return DirectoryDraft(self._root, begun, self._write)


class DirectoryDraft(Draft):
    full_file_bytes = _FULL_FILE_BYTES

    def __init__(self, root: Path, begun: str, write: FileWriter) -> None:
        self._root = root
        self._directory = root / begun
        self._write = write

    def write(self, file: str, chunks: Iterable[Any]) -> int:
        with refusals(self._root):
            return self._write(self._directory / file, chunks)

    def write_all(self, files: Mapping[str, Iterable[Any]]) -> None:
        for file, chunks in files.items():
            self.write(file, chunks)

    def written(self, file: str, published: str) -> Bytes:  # noqa: ARG002 - it was renamed
        return np.memmap(self._root / published, dtype=np.uint8, mode="r")


class DirectoryWriter:
    """Holds the store's lock for as long as it lives; `close` gives it back."""

    def __init__(self, root: Path, write: FileWriter) -> None:
        self._root = root
        self._write = write
        taken = f"{root} has a publisher already: stop it or use another"
        with refusals(root):
            self._lock = locked(root / _LOCK_FILE, taken=taken)
        self._owner = secrets.token_hex(16).encode()
        try:
            with refusals(root):
                os.pwrite(self._lock.descriptor, self._owner, 0)
                os.fsync(self._lock.descriptor)
        except BaseException:
            self._lock.close()
            raise
        self.sweep()
        self.store = Store(root)

    def close(self) -> None:
        self._lock.close()

    def refs(self) -> frozenset[VersionRef]:
        return self.store.refs()

    def newest(self) -> WeightVersion:
        return max((ref.version for ref in self.refs()), default=WeightVersion(0))

    def begin(self, ref: VersionRef) -> str:
        self._check_owner()
        self.sweep()
        begun = f"{TEMPORARY}{ref.directory}-{secrets.token_hex(4)}"
        with refusals(self._root):
            (self._root / begun).mkdir()
        return begun

    def place(self, begun: str, shards: Sequence[Shard], *, alone: str) -> dict[str, str]:
        names = final_names(shards, alone=alone)
        for shard in shards:
            path = self._root / begun / checked_name(shard.file, what="shard")
            with refusals(self._root):
                if path.stat().st_size != shard.record.bytes:
                    raise Corrupt(f"{path} is not as long as its rank wrote it")
                path.rename(path.with_name(names[shard.file]))
        return names

    def finish(self, begun: str, ref: VersionRef, small: Mapping[str, bytes]) -> None:
        self._check_owner()
        directory = self._root / begun
        with refusals(self._root):
            for file, data in {**small, READY_FILE: b""}.items():
                self._write(directory / file, [data])
            sync_directory(directory)
            directory.rename(self._root / ref.directory)
            sync_directory(self._root)

    def point_latest(self, version: WeightVersion) -> None:
        temporary = self._root / f"{TEMPORARY}{LATEST_FILE}-{secrets.token_hex(4)}"
        with refusals(self._root):
            try:
                self._write(temporary, [latest_line(version)])
                # A newer publisher writes its token and then sweeps: however long this one stalls,
                # it sees the token here or finds its file gone, and LATEST is not set back.
                self._check_owner()
                temporary.rename(self._root / LATEST_FILE)
            except (OSError, RoseMuxError):
                temporary.unlink(missing_ok=True)
                self._check_owner()
                raise
            sync_directory(self._root)

    def remove(self, ref: VersionRef) -> None:
        self._check_owner()
        doomed = self._root / f"{TEMPORARY}pruned-{ref.directory}"
        with refusals(self._root):
            (self._root / ref.directory).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def sizes(self) -> dict[VersionRef, int]:
        with refusals(self._root):
            # A file or a dead link with a version's name counts as an empty version.
            return {
                ref: sum(file.stat().st_size for file in (self._root / ref.directory).glob("*"))
                for ref in self.refs()
            }

    def sweep(self) -> None:
        if not self._is_owner():
            return
        for leftover in self._root.glob(f"{TEMPORARY}*"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                with refusals(self._root):
                    leftover.unlink(missing_ok=True)

    def _is_owner(self) -> bool:
        # Reopened: a network file system then asks the server.
        with refusals(self._root):
            return (self._root / _LOCK_FILE).read_bytes() == self._owner

    def _check_owner(self) -> None:
        if not self._is_owner():
            raise ConfigError(
                f"{self._root} has another publisher: only the newest one may publish; stop one of "
                "them, or give it a store of its own"
            )
