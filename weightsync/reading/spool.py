"""Storage for the bytes of a staging: in memory while they fit, else in an unlinked file.

The file belongs to the receiver alone. No other process can change it between the pass that checks
and the pass that applies, and it disappears with the process, however that ends. Does not interpret
its content.
"""

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import Bytes
from weightsync.layout.durable import refusals
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.transport.ranges import ByteSpan

DIRECTORY_VARIABLE = "TMPDIR"
_DISK = Path("/var/tmp")
"""Default directory without TMPDIR: /tmp is memory on many machines."""
_PIECE_BYTES = 1 << 20


class StagedFile(Protocol):
    """The bytes of one file, or the fetched part of them; unfetched bytes are undefined."""

    size_bytes: int
    kept_bytes: int
    """Bytes that it takes of the memory budget."""

    def read(self, span: ByteSpan) -> Bytes:
        """The bytes of a span: in memory the staging's own, else a copy."""

    def read_into(self, start: int, into: Bytes) -> None: ...

    def buffer(self, span: ByteSpan) -> Bytes:
        """A buffer to fill with the bytes of a span, for `write`."""

    def write(self, start: int, data: Bytes) -> None: ...

    def pieces(self, span: ByteSpan) -> Iterator[memoryview]:
        """The bytes of a span one after another, in little memory."""
        for piece in span.pieces(_PIECE_BYTES):
            yield self.read(piece).data

    def digest(self, span: ByteSpan) -> str:
        """xxh3-128 of a span."""
        whole = xxhash.xxh3_128()
        for piece in self.pieces(span):
            whole.update(piece)
        return str(whole.hexdigest())


class Spool:
    """Stages files in `budget` and, beyond it, in one file under `directory`."""

    def __init__(self, budget: MemoryBudget, directory: Path | None = None) -> None:
        self._budget = budget
        self._directory = directory
        self._file: _NamelessFile | None = None

    def stage(self, size_bytes: int) -> StagedFile:
        """Storage for a file of `size_bytes`; raises Exhausted if the disk is full."""
        if self._budget.keep(size_bytes):
            return MemoryStaging(size_bytes)
        if self._file is None:
            self._file = _NamelessFile(self._directory or default_directory())
        return self._file.stage(size_bytes)


def default_directory() -> Path:
    """The directory for spool files. Raises ConfigError if this process can write to none."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if not given and os.access(_DISK, os.W_OK | os.X_OK):
        return _DISK
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            f"no directory for data beyond the memory: set {DIRECTORY_VARIABLE}"
        ) from error


class MemoryStaging(StagedFile):
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self.kept_bytes = size_bytes
        self._data = np.empty(size_bytes, dtype=np.uint8)

    def read(self, span: ByteSpan) -> Bytes:
        return self._data[span.start : span.stop]

    def read_into(self, start: int, into: Bytes) -> None:
        np.copyto(into, self._data[start : start + into.size])

    def buffer(self, span: ByteSpan) -> Bytes:
        return self.read(span)

    def write(self, start: int, data: Bytes) -> None:
        there = self._data[start : start + data.size]
        if not np.may_share_memory(there, data):
            np.copyto(there, data)


class _DiskStaging(StagedFile):
    kept_bytes = 0

    def __init__(self, file: "_NamelessFile", base: int, size_bytes: int) -> None:
        self._file = file
        self._base = base
        self.size_bytes = size_bytes

    def read(self, span: ByteSpan) -> Bytes:
        data = np.empty(span.size_bytes, dtype=np.uint8)
        self.read_into(span.start, data)
        return data

    def read_into(self, start: int, into: Bytes) -> None:
        at = 0
        with refusals(self._file.directory):
            while at < into.size:
                got = os.preadv(self._file.handle, [into.data[at:]], self._base + start + at)
                if got == 0:
                    raise OSError(f"{self._file.directory} lost its contents")
                at += got

    def buffer(self, span: ByteSpan) -> Bytes:
        return np.empty(span.size_bytes, dtype=np.uint8)

    def write(self, start: int, data: Bytes) -> None:
        at = 0
        with refusals(self._file.directory):
            while at < data.size:
                at += os.pwrite(self._file.handle, data.data[at:], self._base + start + at)


class _NamelessFile:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._size_bytes = 0
        with refusals(directory), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            self.handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.handle)

    def stage(self, size_bytes: int) -> _DiskStaging:
        base = self._size_bytes
        self._size_bytes += size_bytes
        with refusals(self.directory):
            # A hole reads as zeros, so that unfetched bytes are never out of bounds.
            os.ftruncate(self.handle, self._size_bytes)
        return _DiskStaging(self, base, size_bytes)
