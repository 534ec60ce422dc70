"""One page as a memory-mapped file: a writer that owns it and readers that never wait for it.

The writer is the file's owner; others read. A reader that finds anything but a whole, fresh record
of the right kind gets a `PageFault` instead, never an exception and never an old value.
"""

import mmap
import os
import stat
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from harvester.contracts.bell import Word, address_of, ring
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.page.records import Record
from harvester.contracts.page.seal import (
    BODY_OFFSET,
    PAGE_BYTES,
    SEQUENCE_OFFSET,
    PageFault,
    pack_body,
    pack_head,
    sequence_of,
    time_fault,
    unseal,
)

R = TypeVar("R", bound=Record)
R_co = TypeVar("R_co", bound=Record, covariant=True)

# A write takes microseconds; a reader that meets one eight times in a row has met a dead writer.
_READ_ATTEMPTS = 8
_SEQUENCE = slice(SEQUENCE_OFFSET, BODY_OFFSET)
_LOWER_SEQUENCE = slice(SEQUENCE_OFFSET, SEQUENCE_OFFSET + 4)
# Each writer counts in a range of its own, above that of the one before it.
_TERM = 1 << 32
_TERMS = 1 << 31


class Reading(msgspec.Struct, Generic[R_co], frozen=True):
    """A record, or the fault that stands in its place."""

    record: R_co | None
    fault: PageFault | None
    stamp_ns: int = 0


class PageWriter(Generic[R]):
    """Creates the page, or takes over the one that an earlier process of the same user left.

    The newest writer wins: an earlier one that still lives writes no more.
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.path = path
        self._kind = kind
        self._encoder = msgspec.msgpack.Encoder()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write page {path}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                raise ConfigError(f"page {path} belongs to another user; remove it first")
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"page {path} is not a regular file; remove it first")
            # Whatever the umask: readers of other users are what a page is for.
            os.fchmod(fd, 0o644)
            os.ftruncate(fd, PAGE_BYTES)
            self._map = mmap.mmap(fd, PAGE_BYTES)
            self._inode = status.st_ino
        finally:
            os.close(fd)
        self._bell = address_of(self._map) + SEQUENCE_OFFSET
        left = sequence_of(self._map[:BODY_OFFSET])
        # The lower half goes on counting: it is what a sleeping reader sees of the sequence.
        self._sequence = (left // _TERM + 1) % _TERMS * _TERM + (left % _TERM & ~1)
        self._map[:BODY_OFFSET] = pack_head(kind=kind.KIND, sequence=self._sequence + 1)

    def write(self, record: R, *, now_ns: int, ttl_ns: int) -> None:
        if self._succeeded():
            return
        page, kind, sequence = self._map, self._kind.KIND, self._sequence + 2
        body = pack_body(
            self._encoder.encode(record),
            sequence=sequence,
            stamp_ns=now_ns,
            expires_ns=now_ns + ttl_ns,
        )
        inside = pack_head(kind=kind, sequence=sequence - 1)
        whole = pack_head(kind=kind, sequence=sequence)
        self._sequence = sequence
        page[:BODY_OFFSET] = inside
        page[BODY_OFFSET : BODY_OFFSET + len(body)] = body
        page[:BODY_OFFSET] = whole
        ring(self._bell)

    def in_place(self) -> bool:
        """Whether the path still names this page: not deleted, not made anew."""
        try:
            return self.path.lstat().st_ino == self._inode
        except OSError:
            return False

    def close(self, *, unlink: bool = False) -> None:
        """`unlink` removes the page, unless a successor has taken it over or made it anew."""
        succeeded = self._succeeded()
        self._map.close()
        if unlink and not succeeded and self.in_place():
            self.path.unlink(missing_ok=True)

    def _succeeded(self) -> bool:
        return sequence_of(self._map[:BODY_OFFSET]) // _TERM != self._sequence // _TERM


class PageReader(Generic[R]):
    """Reads another process's page, from one thread at a time.

    `owners` are the user ids whose page is believed, besides this process's own and root.
    """

    def __init__(self, path: Path, kind: type[R], *, owners: frozenset[int] = frozenset()) -> None:
        self.path = path
        self._kind = kind
        self._owners = owners | {os.geteuid(), 0}
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._map: mmap.mmap | None = None
        self._inode = self._bell = 0
        self._sequence = b""
        self._expires_ns = 0
        self._last: Reading[R] = Reading(None, PageFault.MISSING)

    def read(self, *, now_ns: int | None = None) -> Reading[R]:
        """The record, if it is whole, of the right kind and not expired at `now_ns`."""
        now_ns = monotonic_ns() if now_ns is None else now_ns
        if self._map is None:
            fault = self._open()
            if fault is not None:
                return Reading(None, fault)
        elif self._map[_SEQUENCE] == self._sequence:
            # Decoded before: one sequence number is one record, and only its age can spoil it.
            last = self._last
            if time_fault(last.stamp_ns, self._expires_ns, now_ns=now_ns) is None:
                return last
        reading = self._decode(now_ns)
        if reading.fault is None:
            return reading
        # The page may have been deleted and made anew since it was mapped.
        if self._replaced():
            self.close()
            fault = self._open()
            return self._decode(now_ns) if fault is None else Reading(None, fault)
        return reading

    def read_left(self) -> Reading[R]:
        """The last whole record however old: for a successor that takes the page over."""
        if self._map is None:
            fault = self._open()
            if fault is not None:
                return Reading(None, fault)
        assert self._map is not None
        stamp_ns = int.from_bytes(self._map[BODY_OFFSET : BODY_OFFSET + 8], "little")
        return self._decode(stamp_ns - 1)

    def peek(self) -> Word | None:
        """The sequence number's lower half: a change of it says that `read` has something new, and
        who sleeps on it is woken by the writer. None while there is no page."""
        if self._map is None:
            return None
        return Word(self._bell, int.from_bytes(self._map[_LOWER_SEQUENCE], "little"))

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
            self._sequence = b""

    def _open(self) -> PageFault | None:
        try:
            # Non-blocking: a named pipe in the page's place would hold the reader for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(self.path, flags)
        except FileNotFoundError:
            return PageFault.MISSING
        except OSError:
            return PageFault.FOREIGN
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in self._owners:
                return PageFault.FOREIGN
            if status.st_size < PAGE_BYTES:
                return PageFault.TORN
            self._map = mmap.mmap(fd, PAGE_BYTES, access=mmap.ACCESS_READ)
            self._inode = status.st_ino
            self._bell = address_of(self._map) + SEQUENCE_OFFSET
        finally:
            os.close(fd)
        return None

    def _replaced(self) -> bool:
        try:
            return self.path.lstat().st_ino != self._inode
        except OSError:
            return True

    def _decode(self, now_ns: int) -> Reading[R]:
        assert self._map is not None
        for _ in range(_READ_ATTEMPTS):
            page = self._map[:]
            sequence = page[_SEQUENCE]
            if not sequence[0] & 1 and self._map[_SEQUENCE] == sequence:
                sealed = unseal(page, kind=self._kind.KIND, now_ns=now_ns)
                if sealed is not PageFault.TORN:
                    break
            # The writer may wait for this very core.
            os.sched_yield()
        else:
            return Reading(None, PageFault.TORN)
        if isinstance(sealed, PageFault):
            return Reading(None, sealed)
        try:
            reading = Reading(self._decoder.decode(sealed.record), None, sealed.stamp_ns)
        except msgspec.DecodeError:
            return Reading(None, PageFault.TORN)
        self._sequence, self._expires_ns, self._last = sequence, sealed.expires_ns, reading
        return reading
