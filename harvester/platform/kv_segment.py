"""The shared-memory segment in which a kvcached engine keeps its KV limit and its KV use.

kvcached 0.1.6 documents it as three native 64-bit signed integers, one file in /dev/shm for each
engine: the limit, the bytes of pages in use, and the bytes of pages mapped ahead of use. The engine
writes the last two; the limit is written under an exclusive flock on the file.

A segment of any other shape belongs to another version and is refused: a limit at the wrong offset
would take production's memory.
"""

import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from harvester.contracts.errors import Exhausted, Unsupported
from harvester.contracts.ids import checked_name

KVCACHED_VERSION = "0.1.6"
SEGMENTS = Path("/dev/shm")

_LAYOUT = struct.Struct("=qqq")
_LIMIT = struct.Struct("=q")
_MOST_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class KvUse:
    """KV of one engine, over all layers of one accelerator, in bytes."""

    limit_bytes: int
    used_bytes: int
    ahead_bytes: int
    """Mapped ahead of use, so that the next page needs no mapping."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes that no other engine can use."""
        return self.used_bytes + self.ahead_bytes


class KvSegment:
    """`name` is the engine's KVCACHED_IPC_NAME. `owners` are the users whose segment is believed;
    None believes any user."""

    def __init__(
        self, name: str, *, owners: frozenset[int] | None = None, directory: Path = SEGMENTS
    ) -> None:
        self.path = directory / checked_name(name, what="KV segment")
        self._owners = owners

    def read(self) -> KvUse | None:
        """Read without a lock, since an engine may be stopped while it holds one.

        Returns None if the engine has not made the segment yet. Raises Unsupported for another
        layout.
        """
        try:
            opened = self._opened(os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return self._decoded(os.pread(opened, _LAYOUT.size, 0))
        finally:
            os.close(opened)

    def limit(self, limit_bytes: int) -> None:
        """Write the limit; kvcached reads it every tenth of a second.

        Raises Exhausted if another process holds the file or it is missing, Unsupported for another
        layout.
        """
        if not 0 <= limit_bytes <= _MOST_BYTES:
            raise ValueError(f"KV limit {limit_bytes} is not from 0 to {_MOST_BYTES} bytes")
        try:
            opened = self._opened(os.O_RDWR)
        except FileNotFoundError as error:
            raise Exhausted(f"{self.path} is not there yet") from error
        try:
            # kvcached reads, changes and writes all three: outside its lock a limit could be
            # overwritten.
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._decoded(os.pread(opened, _LAYOUT.size, 0))
            os.pwrite(opened, _LIMIT.pack(limit_bytes), 0)
        except BlockingIOError as error:
            raise Exhausted(f"{self.path} is locked") from error
        finally:
            os.close(opened)

    def remove(self) -> bool:
        """Remove the segment of an engine that has ended; False without a segment. Raises
        Unsupported, and removes nothing, if the file has another layout or an owner who is not
        trusted."""
        try:
            os.close(self._opened(os.O_RDONLY))
        except FileNotFoundError:
            return False
        self.path.unlink(missing_ok=True)
        return True

    def _opened(self, flags: int) -> int:
        try:
            opened = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unsupported(f"{self.path}: {error.strerror}") from error
        try:
            self._check(os.fstat(opened))
        except Unsupported:
            os.close(opened)
            raise
        return opened

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode) or found.st_size != _LAYOUT.size:
            raise Unsupported(
                f"{self.path} is not a segment of kvcached {KVCACHED_VERSION}: "
                f"{found.st_size} bytes where {_LAYOUT.size} are known"
            )
        if self._owners is not None and found.st_uid not in self._owners:
            raise Unsupported(f"{self.path} belongs to user {found.st_uid}, which is not trusted")

    def _decoded(self, data: bytes) -> KvUse:
        if len(data) != _LAYOUT.size:
            raise Unsupported(f"{self.path} ended while it was read")
        values = _LAYOUT.unpack(data)
        if not all(0 <= value <= _MOST_BYTES for value in values):
            raise Unsupported(f"{self.path} holds {values}: no sizes of a KV cache")
        return KvUse(*values)
