"""One page as its one writer sees it.

Nothing here touches mapped memory: a full file system and a page that is cut short are errors of a
call (`Exhausted`), never a signal that ends the process.
"""

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from harvester.contracts.bell import FileWord, ring
from harvester.contracts.page.records import Record
from harvester.contracts.page.seal import (
    BODY_OFFSET,
    PAGE_BYTES,
    SEQUENCE_OFFSET,
    pack_body,
    pack_head,
    sequence_of,
)
from harvester.contracts.page.writer_lock import WriterLock, is_same_file, open_own, refusal

R = TypeVar("R", bound=Record)

# Each writer counts in its own range, above the range of the writer before it.
_TERM = 1 << 32
_TERMS = 1 << 31


class PageWriter(Generic[R]):
    """Creates the page, or takes over a page that an earlier process of the same user left."""

    def __init__(self, path: Path, kind: type[R], *, lock: WriterLock | None = None) -> None:
        """A `lock` of the caller's stays held if this fails, so that the page's writer sees the
        refusal. Raises PageHeld, ConfigError for faults that the user must fix, and Exhausted.
        """
        self.path = path
        self.contested = False
        """Whether another process tried to write the page too: readers then believe neither."""
        self._kind = kind
        self._encoder = msgspec.msgpack.Encoder()
        self._fd = -1
        self._lock = WriterLock(path) if lock is None else lock
        self._lock.take(claim=lock is not None)
        try:
            self._fd, new = _opened(path)
            # Allocates the whole page: it can be written until its file system is unmounted.
            self._opened = os.fstat(self._fd)
            os.posix_fallocate(self._fd, 0, PAGE_BYTES)
            self._sequence = _TERM if new else _next_term(os.pread(self._fd, BODY_OFFSET, 0))
            os.pwrite(self._fd, pack_head(kind=kind.KIND, sequence=self._sequence + 1), 0)
        except OSError as error:
            self._give_up(lock)
            raise refusal(path, error) from error
        except BaseException:
            self._give_up(lock)
            raise
        self.contested = self._lock.contested()
        self._bell = FileWord(self._fd, offset=SEQUENCE_OFFSET, rings=True)

    def write(self, record: R, *, now_ns: int, ttl_ns: int) -> None:
        """Write a record; no-op once closed, and in a forked child. Raises Exhausted without disk
        space, and ValueError for a record that does not fit; the page then keeps its content.
        """
        if not self._lock.held:
            return
        sequence = self._sequence + 2
        head = pack_head(kind=self._kind.KIND, sequence=sequence, contested=self.contested)
        body = pack_body(
            self._encoder.encode(record),
            sequence=sequence,
            stamp_ns=now_ns,
            expires_ns=now_ns + ttl_ns,
        )
        try:
            os.pwrite(self._fd, head + body, 0)
        except OSError as error:
            raise refusal(self.path, error) from error
        self._sequence = sequence
        if self._bell.address:
            ring(self._bell.address)

    def check(self) -> bool:
        """Whether this is still the page: neither page nor lock was deleted, recreated or cut
        short. Also learns whether another process wants the page; an occasional call is enough."""
        if not self._lock.in_place():
            return False
        self.contested = self._lock.contested()
        return self._fd >= 0 and is_same_file(self.path, self._opened, least_bytes=PAGE_BYTES)

    def close(self, *, unlink: bool = False) -> None:
        """`unlink` removes the page, unless a successor has recreated it."""
        if self._fd < 0:
            return
        if unlink and self._lock.held and is_same_file(self.path, self._opened):
            self.path.unlink(missing_ok=True)
        self._bell.close()
        os.close(self._fd)
        self._fd = -1
        self._lock.close()

    def __del__(self) -> None:
        self.close()

    def _give_up(self, callers: WriterLock | None) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if callers is None:
            self._lock.close()


def _next_term(head: bytes) -> int:
    """The lower half goes on counting: it is what a sleeping reader sees of the sequence."""
    count = sequence_of(head) if len(head) == BODY_OFFSET else 0
    if count == 0:
        # Cut short: a number that was used before would make an old record of a new one.
        count = int.from_bytes(os.urandom(8), "little")
    return (count // _TERM + 1) % _TERMS * _TERM + (count % _TERM & ~1)


def _opened(path: Path) -> tuple[int, bool]:
    """The page, readable by other users, and whether it was made just now."""
    try:
        return open_own(path, flags=os.O_CREAT | os.O_EXCL, mode=0o644), True
    except FileExistsError:
        return open_own(path, flags=0, mode=0o644), False
