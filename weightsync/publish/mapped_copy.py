"""The mapped file of a publisher's copy that outlives the process.

Entries in order of arrival, each at a multiple of 64 bytes. last_published.py judges the contents.
"""

import errno
import fcntl
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from harvester.contracts.errors import ConfigError, Exhausted
from weightsync.elements.bits import Bits, TensorSpec, bits_from_bytes, bytes_of
from weightsync.publish.intake import Piece

_ALIGN_BYTES = 64


class MappedFile:
    """`copy-RANK.bin` and its record `copy-RANK.json` in one directory, under a lock."""

    def __init__(self, directory: Path, *, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._data = directory / f"copy-{rank:05d}.bin"
        self._record = self._data.with_suffix(".json")
        self._lock = self._data.with_suffix(".lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(f"{directory} is another publisher's copy_dir") from error

    def close(self) -> None:
        self._lock.close()

    def fill(self, pieces: Iterable[Piece]) -> dict[str, Bits]:
        """Store every piece; earlier content is lost.

        Raises Exhausted if the disk is full: a hole in the mapped file would kill the process.
        """
        self.drop()
        specs: dict[str, TensorSpec] = {}
        try:
            with self._data.open("wb") as file:
                for piece in pieces:
                    specs[piece.entry] = piece.spec
                    file.write(bytes_of(piece.bits(own=False)).data)
                    file.write(bytes(_padding(piece.spec)))
            return self.mapped(specs)
        except OSError as error:
            self.drop()
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise Exhausted(f"no space left for the copy {self._data}: {error}") from error
            raise ConfigError(f"cannot write the copy {self._data}: {error}") from error

    def mapped(self, specs: Mapping[str, TensorSpec]) -> dict[str, Bits]:
        """The entries, mapped from the file; raises OSError, or ValueError if the size differs."""
        size = sum(spec.size_bytes + _padding(spec) for spec in specs.values())
        if self._data.stat().st_size != size:
            raise ValueError(f"{self._data} has not {size} bytes")
        whole = np.empty(0, dtype=np.uint8)
        if size:
            with self._data.open("r+b") as file:
                whole = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
        bits: dict[str, Bits] = {}
        at = 0
        for entry, spec in specs.items():
            bits[entry] = bits_from_bytes(whole[at : at + spec.size_bytes], spec)
            at += spec.size_bytes + _padding(spec)
        return bits

    def record(self, text: bytes) -> None:
        temporary = self._record.with_suffix(".tmp")
        temporary.write_bytes(text)
        temporary.rename(self._record)

    def recorded(self) -> bytes:
        """The record; raises OSError if there is none."""
        return self._record.read_bytes()

    def drop(self) -> None:
        self._record.unlink(missing_ok=True)
        self._data.unlink(missing_ok=True)


def _padding(spec: TensorSpec) -> int:
    return -spec.size_bytes % _ALIGN_BYTES
