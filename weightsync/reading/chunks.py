"""State of each chunk of a file: present, in transit, or to be requested next.

A file that N readers want in overlapping ranges, or one reader in parts, is pulled once: every
chunk is claimed by at most one pull at a time. Pure; touches no file and no clock.
"""

from collections import deque
from enum import Enum, auto

from weightsync.transport.ranges import ByteSpan

CHUNK_BYTES = 256 << 10
"""Size of a relay's smallest pull: a header costs one chunk of a slow link, not a shard."""


class _Stage(Enum):
    ABSENT = auto()
    NEEDED = auto()
    COMING = auto()
    HERE = auto()


class ChunkMap:
    """The chunks of one file of `size_bytes`."""

    def __init__(self, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self._states = [_Stage.ABSENT] * -(-size_bytes // chunk_bytes)
        self._missing = len(self._states)
        self._queue: deque[int] = deque()

    @property
    def is_whole(self) -> bool:
        return self._missing == 0

    def has(self, span: ByteSpan) -> bool:
        return all(self._states[at] is _Stage.HERE for at in self._covering(span))

    def want(self, span: ByteSpan) -> None:
        """Request the absent chunks of a span."""
        for at in self._covering(span):
            if self._states[at] is _Stage.ABSENT:
                self._states[at] = _Stage.NEEDED
                self._queue.append(at)

    def claim(self, max_bytes: int) -> ByteSpan | None:
        """The next run to pull, in request order; it counts as in transit until arrived or lost."""
        while self._queue:
            first = self._queue.popleft()
            if self._states[first] is not _Stage.NEEDED:
                continue
            last, most = first, max(1, max_bytes // self._chunk_bytes)
            # A slice, since there may be none behind the last.
            while last - first + 1 < most and self._states[last + 1 : last + 2] == [_Stage.NEEDED]:
                last += 1
            self._mark(range(first, last + 1), _Stage.COMING)
            return ByteSpan(
                first * self._chunk_bytes, min((last + 1) * self._chunk_bytes, self._size_bytes)
            )
        return None

    def arrived(self, run: ByteSpan) -> None:
        """Record that a claimed run is present."""
        chunks = self._covering(run)
        self._missing -= sum(self._states[at] is not _Stage.HERE for at in chunks)
        self._mark(chunks, _Stage.HERE)

    def lost(self, run: ByteSpan) -> None:
        """Record that a claimed run failed; readers that still need it request it again."""
        self._mark(self._covering(run), _Stage.ABSENT)

    def forget(self) -> None:
        """Mark the present chunks as absent; chunks in transit are unaffected."""
        here = [at for at, state in enumerate(self._states) if state is _Stage.HERE]
        self._missing += len(here)
        for at in here:
            self._states[at] = _Stage.ABSENT

    def _covering(self, span: ByteSpan) -> range:
        if span.size_bytes <= 0:
            return range(0)
        return range(span.start // self._chunk_bytes, -(-span.stop // self._chunk_bytes))

    def _mark(self, chunks: range, state: _Stage) -> None:
        for at in chunks:
            self._states[at] = state
