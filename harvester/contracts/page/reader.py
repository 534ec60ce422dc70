"""Reads one page without ever waiting for its writer.

A reader that finds anything but a whole, fresh record of the right kind gets a `PageFault` instead,
never an exception and never an old value. It copies the page by a call and maps nothing that it
reads: a page that is cut short meanwhile is a fault as well, not a signal that ends the process.
"""

import os
import stat
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from harvester.contracts.bell import FileWord, Word
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import UNDECODABLE
from harvester.contracts.page.owners import trusted_uids
from harvester.contracts.page.records import Record
from harvester.contracts.page.seal import (
    BODY_OFFSET,
    PAGE_BYTES,
    SEQUENCE_OFFSET,
    PageFault,
    time_fault,
    unseal,
)

R = TypeVar("R", bound=Record)
R_co = TypeVar("R_co", bound=Record, covariant=True)

# A write takes microseconds; a reader that meets one eight times in a row has met a dead writer.
_READ_ATTEMPTS = 8
_SEQUENCE = slice(SEQUENCE_OFFSET, BODY_OFFSET)
_STAMP = slice(BODY_OFFSET, BODY_OFFSET + 8)
_WORD_BYTES = 4


class Reading(msgspec.Struct, Generic[R_co], frozen=True):
    """A record, or the fault in its place."""

    record: R_co | None
    fault: PageFault | None
    stamp_ns: int = 0


class PageReader(Generic[R]):
    """Reads another process's page, from one thread at a time.

    `owners` are the users whose page is believed, besides root; none is this process's own.
    """

    def __init__(self, path: Path, kind: type[R], *, owners: frozenset[int] = frozenset()) -> None:
        self.path = path
        self._kind = kind
        self._owners = trusted_uids(owners)
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._fd = -1
        self._inode = 0
        self._bell: FileWord | None = None
        self._sequence: bytes | None = None
        self._expires_ns = 0
        self._last: Reading[R] = Reading(None, PageFault.MISSING)
        self._raw: bytes | None = None

    def read(self, *, now_ns: int | None = None) -> Reading[R]:
        """The record, if it is whole, of the right kind and not expired at `now_ns`."""
        now_ns = monotonic_ns() if now_ns is None else now_ns
        if self._fd < 0:
            fault = self._open()
            if fault is not None:
                return Reading(None, fault)
        # One copy, as most reads find a new record: the agent's beat is as long as its writers'.
        page = _copied(self._fd)
        if page[_SEQUENCE] == self._sequence:
            # Already decoded: one sequence number is one record, and only age can spoil it.
            last = self._last
            if time_fault(last.stamp_ns, self._expires_ns, now_ns=now_ns) is None:
                return last
        reading = self._decode(page, now_ns)
        if reading.fault is None:
            return reading
        # The page may have been deleted and recreated since it was opened.
        if self._replaced():
            self.close()
            fault = self._open()
            if fault is not None:
                return Reading(None, fault)
            return self._decode(_copied(self._fd), now_ns)
        return reading

    def read_left(self) -> Reading[R]:
        """The last whole record however old: for a successor that takes the page over."""
        if self._fd < 0:
            fault = self._open()
            if fault is not None:
                return Reading(None, fault)
        page = _copied(self._fd)
        return self._decode(page, int.from_bytes(page[_STAMP], "little") - 1)

    def sequence(self) -> bytes | None:
        """The sequence number; a changed value means a new record. None without a page."""
        if self._fd < 0:
            return None
        return _copied(self._fd, BODY_OFFSET - SEQUENCE_OFFSET, SEQUENCE_OFFSET)

    def peek(self) -> Word | None:
        """Futex word of the sequence number's lower half, rung by the writer; None without page."""
        if self._fd < 0:
            return None
        if self._bell is None:
            self._bell = FileWord(self._fd, offset=SEQUENCE_OFFSET)
        value = _copied(self._fd, _WORD_BYTES, SEQUENCE_OFFSET)
        if not self._bell.address or len(value) < _WORD_BYTES:
            return None
        return Word(self._bell.address, int.from_bytes(value, "little"))

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._sequence = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> PageFault | None:
        try:
            # Non-blocking: a named pipe in the page's place would hold the reader for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(self.path, flags)
        except FileNotFoundError:
            return PageFault.MISSING
        except OSError:
            return PageFault.FOREIGN
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in self._owners:
            os.close(fd)
            return PageFault.FOREIGN
        self._fd, self._inode = fd, status.st_ino
        return None

    def _replaced(self) -> bool:
        try:
            return self.path.lstat().st_ino != self._inode
        except OSError:
            return True

    def _decode(self, page: bytes, now_ns: int) -> Reading[R]:
        for _ in range(_READ_ATTEMPTS):
            sealed = unseal(page, kind=self._kind.KIND, now_ns=now_ns)
            if sealed is not PageFault.TORN:
                break
            # The writer may wait for this very core.
            os.sched_yield()
            page = _copied(self._fd)
        if isinstance(sealed, PageFault):
            return Reading(None, sealed)
        expires_ns = min(sealed.expires_ns, sealed.stamp_ns + self._kind.AGE_MAX_NS)
        if now_ns >= expires_ns:
            return Reading(None, PageFault.EXPIRED)
        record = self._last.record
        if sealed.record != self._raw:  # An idle engine says the same at each beat.
            try:
                record, self._raw = self._decoder.decode(sealed.record), sealed.record
            except UNDECODABLE:
                return Reading(None, PageFault.TORN)
        reading = Reading(record, None, sealed.stamp_ns)
        self._sequence, self._expires_ns, self._last = page[_SEQUENCE], expires_ns, reading
        return reading


def _copied(file: int, size_bytes: int = PAGE_BYTES, offset: int = 0) -> bytes:
    """The bytes of the file; b"" if the file system fails."""
    try:
        return os.pread(file, size_bytes, offset)
    except OSError:
        return b""
