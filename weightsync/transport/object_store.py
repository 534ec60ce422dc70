"""A store in whatever fsspec opens: S3, GCS, HDFS, its own memory.

There a directory cannot be renamed in one piece, so files of an unfinished version may be seen:
that READY is written after them and LATEST after READY is all that a reader goes by.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, TypeVar

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt
from weightsync.names import LATEST_FILE, MAX_LATEST_BYTES
from weightsync.transport.patience import Interrupted, Patience, RetryLimits, persist
from weightsync.transport.ranges import Span
from weightsync.transport.source import watched

T = TypeVar("T")
_POLL_S = 1.0
"""Object stores charge by request."""


class ObjectStoreSource:
    """Reads by ranges. Credentials and endpoints come from fsspec's own configuration."""

    range_bytes = 8 << 20

    def __init__(
        self,
        url: str,
        *,
        streams: int = 4,
        retries: RetryLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._fs, self._root = _opened(url)
        self._url = url.rstrip("/")
        self.streams = streams
        self._retries = retries or RetryLimits()
        self._clock = clock or MonotonicClock()
        self._random = Random()

    def __str__(self) -> str:
        return self._url

    def directories(self) -> frozenset[str]:
        found = self._ask(lambda: self._fs.ls(self._root, detail=False))
        return frozenset(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        return watched(self._latest, known, wait_s=wait_s, poll_s=_POLL_S, clock=self._clock)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        if self.size_bytes(path) > limit_bytes:
            raise Corrupt(f"{self._url}/{path} is over the limit of {limit_bytes} bytes")
        raw = self._ask(lambda: self._fs.cat_file(self._full(path), start=0, end=limit_bytes))
        return bytes(raw)

    def size_bytes(self, path: str) -> int:
        return int(self._ask(lambda: self._fs.info(self._full(path)))["size"])

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        at = 0
        for piece in Span(start, start + len(into)).pieces(self.range_bytes):
            raw = self._ask(partial(self._range, path, piece))
            if len(raw) != piece.size_bytes:
                raise Corrupt(f"{self._url}/{path} ends before byte {piece.stop}")
            into[at : at + len(raw)] = raw
            at += len(raw)

    def doubt(self, path: str) -> None:
        """There is no copy: the next read asks the object store."""

    def close(self) -> None:
        """fsspec closes its sessions itself."""

    def _range(self, path: str, span: Span) -> bytes:
        return bytes(self._fs.cat_file(self._full(path), start=span.start, end=span.stop))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _latest(self) -> bytes | None:
        try:
            return self.read_small(LATEST_FILE, MAX_LATEST_BYTES)
        except FileNotFoundError:
            return None

    def _ask(self, call: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return call()
            except FileNotFoundError:
                raise
            except PermissionError as error:
                raise ConfigError(f"no right to read {self._url}: {error}") from error
            except Exception as error:
                # Each implementation raises what its own client library does.
                raise Interrupted(f"{self._url}: {type(error).__name__}: {error}") from error

        patience = Patience(self._retries, now=self._clock.now(), random=self._random)
        return persist(attempt, patience, clock=self._clock)


def _opened(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(f"{url} needs fsspec: pip install fsspec") from error
    try:
        fs, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(f"cannot open {url}: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"cannot open {url}: {error}; give a directory, http(s)://HOST:PORT/stores/NAME or "
            "a URL that fsspec knows"
        ) from error
    return fs, str(root).rstrip("/")
