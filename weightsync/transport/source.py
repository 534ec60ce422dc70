"""The source of a store's bytes, on any storage.

    directory.py      a local or shared file system
    objects.py        any file system that fsspec opens
    http_source.py    a RoseMux server or relay

A source returns unverified bytes: `Store` checks sizes, digests and READY. Paths consist of a
version's directory and a file name that the caller has checked.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from weightsync.layout.names import LATEST_FILE, MAX_LATEST_BYTES
from weightsync.transport.ranges import ByteSpan

_POLL_S = 0.1
_REMOTE_POLL_S = 1.0
"""Object stores charge by request."""


class StoreSource(Protocol):
    """One store. Thread-safe.

    Every read raises FileNotFoundError for a missing file or store, Corrupt if the bytes are not
    available as requested, Exhausted if the source did not answer for too long, and ConfigError if
    the user must act (no right to read, an untrusted certificate).
    """

    streams: int
    """Number of ranges worth reading in parallel."""
    range_bytes: int
    """Bytes worth requesting at once."""
    announces: bool = False
    """Whether a waiting `latest` is notified of a change instead of polling."""
    composes: bool = False
    """Whether its server composes skip deltas, by its last listing."""

    def directories(self) -> frozenset[str]:
        """Names in the store."""
        return self.names_in("")

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        """The LATEST file, None without one; waits up to `wait_s` for another than `known`."""
        clock, poll_s = MonotonicClock(), _POLL_S if self.streams == 1 else _REMOTE_POLL_S
        until_s = clock.now() + wait_s
        while (found := _latest(self)) == known and (left_s := until_s - clock.now()) > 0:
            time.sleep(min(poll_s, left_s))
        return found

    def newest(self, expected: bytes) -> tuple[bytes | None, frozenset[str]]:  # noqa: ARG002
        """LATEST and `directories`; those of a moment ago suffice if LATEST was `expected` then."""
        return self.latest(), self.directories()

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """A whole file; raises Corrupt if it is over the limit."""

    def size_bytes(self, path: str) -> int: ...

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        """Fill `into` with the file's bytes from `start` on."""

    def has(self, path: str) -> bool:
        try:
            self.size_bytes(path)
        except FileNotFoundError:
            return False
        return True

    def bytes_at(self, path: str, start: int, size_bytes: int) -> bytearray:
        """A copy of the file's bytes from `start` on."""
        into = bytearray(size_bytes)
        self.read_range(path, start, memoryview(into))
        return into

    def names_in(self, directory: str) -> frozenset[str]:
        """Names in one directory of the store, whose path ends with a slash; "": in the store."""
        raise FileNotFoundError(directory)

    def is_inside(self, path: str) -> bool:  # noqa: ARG002 - most sources have no links
        """Whether no link leads from the path out of the store."""
        return True

    def stamp(self, path: str) -> str:  # noqa: ARG002 - most sources do not know
        """Changes with a file that is replaced under its name; empty if unseen."""
        return ""

    def writer(self) -> str | None:
        """The other systems whose trainer writes this store; None for ours."""
        return None

    def doubt(self, path: str) -> None:  # noqa: ARG002 - most sources have no copies
        """Report that this file's bytes were wrong, so that no cached copy of it is used."""
        return

    def close(self) -> None:
        """Close open files and connections."""
        return


def no_store(location: object) -> ConfigError:
    """The error for a missing store; the path in it is hidden in a gateway's replies."""
    return ConfigError(
        f"no weight store at {location}: publish a version there first, or look elsewhere (an "
        "engine looks under its ROSEMUX_WEIGHT_ROOT)"
    )


def each_span(
    source: StoreSource, spans: Iterable[ByteSpan], read: Callable[[ByteSpan], None]
) -> None:
    """Read every span, with the source's parallelism."""
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


def _latest(source: StoreSource) -> bytes | None:
    try:
        return source.read_small(LATEST_FILE, MAX_LATEST_BYTES)
    except FileNotFoundError:
        return None
