"""One prefix of an object store: reads and puts objects by name, as a weight store's source too.

Every call is repeated while its fault may pass. A directory cannot be renamed in one piece there,
so files of an unfinished version may be seen: its index is put after them and LATEST after the
index, and readers go by these alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError
from harvester.platform.backoff import Backoff, Interrupted, RetryLimits
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import StoreSource

T = TypeVar("T")

PART_BYTES = 16 << 20
"""Part size of a multipart upload. S3 allows 10 000 parts: 156 GiB in one object."""
_PIECE_BYTES = 4 << 20
"""Bytes handed over at a time, so that a part's buffer never holds much more than a part."""
_DELETES_AT_ONCE = 8
_STAMPS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime")
"""Keys of fsspec's implementations."""


class ObjectStore(StoreSource):
    """Credentials and endpoints come from fsspec's own configuration. Writes raise the errors of
    reads, and ConfigError without a bucket."""

    streams = 4
    range_bytes = 8 << 20

    def __init__(self, url: str, *, streams: int = 4, retries: RetryLimits | None = None) -> None:
        self.streams = streams
        self._fs, self._root = _opened(url)
        self._url = url.rstrip("/")
        self._retries = retries or RetryLimits()
        self._clock = MonotonicClock()
        self._random = Random()

    def __str__(self) -> str:
        return self._url

    def names_in(self, directory: str) -> frozenset[str]:
        prefix = self._full(directory).rstrip("/")
        found = self._ask(lambda _: self._fs.ls(prefix, detail=False))
        return frozenset(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        size = self.size_bytes(path)
        if size > limit_bytes:
            raise Corrupt(f"{self}/{path} is over the limit of {limit_bytes} bytes")
        # S3, GCS and Azure refuse any range of an empty object (416), READY's too.
        return self.read(path, 0, limit_bytes) if size else b""

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        at = 0
        for piece in ByteSpan(start, start + len(into)).pieces(self.range_bytes):
            raw = self.read(path, piece.start, piece.stop)
            if len(raw) != piece.size_bytes:
                raise Corrupt(f"{self}/{path} ends before byte {piece.stop}")
            into[at : at + len(raw)] = raw
            at += len(raw)

    def sizes(self, below: str = "") -> Mapping[str, int]:
        """Size of every object below a name, as the store lists it; empty without any."""
        prefix = self._full(below) if below else self._root
        try:
            found = self._ask(lambda _: self._fs.find(prefix, detail=True))
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {str(path)[start:]: int(entry["size"]) for path, entry in found.items()}

    def size_bytes(self, path: str) -> int:
        return int(self._ask(lambda _: self._fs.info(self._full(path)))["size"])

    def stamp(self, path: str) -> str:
        """The object's entity tag or time; empty if the store has neither."""
        info = self._ask(lambda _: self._fs.info(self._full(path)))
        return "-".join(str(info[key]) for key in _STAMPS if info.get(key))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, fewer if the object ends before."""
        raw = self._ask(lambda _: self._fs.cat_file(self._full(path), start=start, end=stop))
        return bytes(raw)

    def put(self, path: str, data: bytes) -> None:
        """Write an object in one request, replacing any present one."""
        self._ask(lambda _: self._fs.pipe_file(self._full(path), data), writes=True)

    def create(self, path: str, data: bytes) -> None:
        """`put` after a check, conditional where the store can; raises FileExistsError if there are
        other bytes."""

        def attempt(_: Backoff) -> None:
            try:
                self._put_new(path, data)
            except FileExistsError:
                # An earlier attempt may have succeeded without its reply arriving.
                if bytes(self._fs.cat_file(self._full(path))) != data:
                    raise

        self._ask(attempt, writes=True)

    def upload(self, path: str, read: Callable[[], Iterable[Any]]) -> int:
        """Stream an object in parts and return its size; each attempt calls `read` again.

        The object exists on return; before that the store shows nothing, or a prefix of the bytes.
        """

        def attempt(backoff: Backoff) -> int:
            file = self._fs.open(self._full(path), "wb", block_size=PART_BYTES)
            done = 0
            try:
                for piece in _pieces(read()):
                    file.write(piece)
                    done += len(piece)
                    backoff.received(done)
                file.close()
            except BaseException:
                _discard(file)
                raise
            return done

        return self._ask(attempt, writes=True)

    def copy(self, path: str, to: str) -> None:
        self._ask(lambda _: self._fs.cp_file(self._full(path), self._full(to)), writes=True)

    def remove(self, paths: Iterable[str]) -> None:
        """Delete objects, in any order; a missing object is no error."""

        def gone(path: str) -> None:
            with suppress(FileNotFoundError):
                self._ask(lambda _: self._fs.rm_file(self._full(path)))

        with ThreadPoolExecutor(_DELETES_AT_ONCE, thread_name_prefix="weight-delete") as pool:
            list(pool.map(gone, paths))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _put_new(self, path: str, data: bytes) -> None:
        # Some stores that speak S3 ignore the condition, and answer as if they had kept it.
        if self._fs.exists(self._full(path)):
            raise FileExistsError(path)
        try:
            self._fs.pipe_file(self._full(path), data, mode="create")
        except (NotImplementedError, TypeError):
            self._fs.pipe_file(self._full(path), data)

    def _ask(self, call: Callable[[Backoff], T], *, writes: bool = False) -> T:
        backoff = Backoff(self._retries, self._clock, random=self._random)

        def attempt() -> T:
            try:
                return call(backoff)
            except (FileExistsError, RoseMuxError):
                raise
            except FileNotFoundError as error:
                if writes:
                    raise ConfigError(f"cannot write to {self._url}: no such bucket") from error
                raise
            except PermissionError as error:
                right = "write to" if writes else "read"
                raise ConfigError(f"no right to {right} {self._url}: {error}") from error
            except Exception as error:
                # Each implementation raises its own client library's exceptions.
                if "Credentials" in type(error).__name__:
                    raise ConfigError(f"no credentials for {self._url}: {error}") from error
                raise Interrupted(f"{self._url}: {type(error).__name__}: {error}") from error

        return backoff.persist(attempt)


def _pieces(chunks: Iterable[Any]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk)
        if not view.nbytes:
            continue
        view = view.cast("B")
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at : at + _PIECE_BYTES]


def _discard(file: Any) -> None:
    """Abort an upload. Closing it instead would publish the bytes so far."""
    with suppress(Exception):
        file.discard()
    # Otherwise it would close itself when garbage-collected.
    with suppress(AttributeError):
        file.closed = True


def _opened(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(f"{url} needs fsspec: pip install 'rosemux[weights]'") from error
    try:
        fs, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(f"cannot open {url}: {error}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"cannot open {url}: {error}; give a directory, http(s)://HOST:PORT/stores/NAME or "
            "a URL that fsspec knows"
        ) from error
    return fs, str(root).rstrip("/")
