"""Where a store's bytes come from, whatever it is kept in.

    directory.py      a local or shared file system
    object_store.py   whatever fsspec opens
    http_source.py    a server or a relay of ours

A source gives bytes and believes nothing about them: sizes, digests and READY are `Store`'s affair.
Paths are names of a version's directory and of a file in it that their caller has checked.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from harvester.contracts.clock import Clock
from weightsync.transport.ranges import Span


class StoreSource(Protocol):
    """One store. Thread-safe.

    Every read raises FileNotFoundError where there is no such file or store, Corrupt where its
    bytes are not to be had as asked, Exhausted where the source did not answer for too long, and
    ConfigError where the user must act (no right to read, a certificate that is not trusted).
    """

    @property
    def streams(self) -> int:
        """How many ranges are worth reading at once."""
        ...

    @property
    def range_bytes(self) -> int:
        """How many bytes are worth asking for at once."""
        ...

    @property
    def announces(self) -> bool:
        """Whether `latest` that waits is told of a change, and need not look again and again."""
        ...

    def directories(self) -> frozenset[str]:
        """Names of what is in the store."""
        ...

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        """The LATEST file; None where there is none yet.

        Waits up to `wait_s` for it to be something else than `known`.
        """
        ...

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """A whole file; raises Corrupt where it is over the limit."""
        ...

    def size_bytes(self, path: str) -> int: ...

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        """Fills `into` with the file's bytes from `start` on."""
        ...

    def doubt(self, path: str) -> None:
        """What was read of this file is not what was published: believe no copy of it."""
        ...

    def close(self) -> None: ...


def each_span(source: StoreSource, spans: Iterable[Span], read: Callable[[Span], None]) -> None:
    """Reads every span, as many at once as the source likes."""
    listed = list(spans)
    if source.streams == 1 or len(listed) <= 1:
        for span in listed:
            read(span)
        return
    streams = ThreadPoolExecutor(min(source.streams, len(listed)), thread_name_prefix="weight-read")
    try:
        for _ in streams.map(read, listed):
            pass
    finally:
        streams.shutdown(cancel_futures=True)


def watched(
    read: Callable[[], bytes | None],
    known: bytes | None,
    *,
    wait_s: float,
    poll_s: float,
    clock: Clock,
) -> bytes | None:
    """`latest` of a source that nobody tells of changes: looks again every `poll_s`."""
    until_s = clock.now() + wait_s
    while (found := read()) == known and (left_s := until_s - clock.now()) > 0:
        time.sleep(min(poll_s, left_s))
    return found
