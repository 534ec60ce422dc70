"""A store in whatever fsspec opens: S3, GCS, HDFS, its own memory.

There a directory cannot be renamed in one piece, so files of an unfinished version may be seen:
that its index is put after them and LATEST after the index is all that a reader goes by.
"""

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import Corrupt
from harvester.platform.backoff import RetryLimits
from weightsync.layout.names import LATEST_FILE, MAX_LATEST_BYTES
from weightsync.transport.objects import Objects
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import watched

_POLL_S = 1.0
"""Object stores charge by request."""


class ObjectStoreSource:
    """Reads by ranges."""

    announces = False
    range_bytes = 8 << 20

    def __init__(
        self,
        url: str,
        *,
        streams: int = 4,
        retries: RetryLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._objects = Objects(url, retries=retries, clock=self._clock)
        self.streams = streams

    def __str__(self) -> str:
        return str(self._objects)

    def directories(self) -> frozenset[str]:
        return self._objects.names()

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        return watched(self._latest, known, wait_s=wait_s, poll_s=_POLL_S, clock=self._clock)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        if self.size_bytes(path) > limit_bytes:
            raise Corrupt(f"{self}/{path} is over the limit of {limit_bytes} bytes")
        return self._objects.read(path, 0, limit_bytes)

    def size_bytes(self, path: str) -> int:
        return self._objects.size_bytes(path)

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        at = 0
        for piece in ByteSpan(start, start + len(into)).pieces(self.range_bytes):
            raw = self._objects.read(path, piece.start, piece.stop)
            if len(raw) != piece.size_bytes:
                raise Corrupt(f"{self}/{path} ends before byte {piece.stop}")
            into[at : at + len(raw)] = raw
            at += len(raw)

    def doubt(self, path: str) -> None:
        """No-op: there is no copy, and the next read asks the object store."""

    def close(self) -> None:
        """fsspec closes its sessions itself."""

    def _latest(self) -> bytes | None:
        try:
            return self.read_small(LATEST_FILE, MAX_LATEST_BYTES)
        except FileNotFoundError:
            return None
