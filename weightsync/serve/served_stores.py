"""A weight server's source of files: stores by name, on any storage.

`SourceStores` reads every file in place; relay.py's stores keep copies. Both belong to one event
loop and read in threads.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError
from weightsync.layout.names import Kind, named_ref
from weightsync.serve.composed_versions import ComposedVersions
from weightsync.transport.location import StoreRoot
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import StoreSource

_TURN_S = 2.0
"""Longest duration of one request, and so of a shutdown's wait for it."""

Ask = Callable[[bytes | None, float], Awaitable[bytes | None]]
"""`known`, seconds to wait; see `StoreSource.latest`."""
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_THREADS = 16
_WAITS = 64
"""Stores whose next LATEST is waited for at a time; more take turns. No read waits for them."""
_MAX_STORES = 1024
"""Bound on open stores, since their names come from clients."""


class LatestWatch:
    """Readers that wait for a store's next LATEST share one upstream request."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._turn: asyncio.Future[bytes | None] | None = None
        self._turn_knew: bytes | None = None

    async def after(self, known: bytes | None, wait_s: float) -> bytes | None:
        """LATEST once it differs from `known`, or as it is after `wait_s`. Raises the errors of
        `ask`."""
        found = await self._ask(None, 0.0)
        until_s = self._clock.now() + wait_s
        while (left_s := until_s - self._clock.now()) > 0:
            if self._turn is None or self._turn.done() or self._turn_knew != known:
                if found != known:
                    break
                self._turn_knew = known
                self._turn = asyncio.ensure_future(self._ask(known, _TURN_S))
                # Fetches the exception: asyncio would log it if all readers have left by then.
                self._turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())
            done, _ = await asyncio.wait({self._turn}, timeout=left_s)
            # Also where LATEST is known to differ: the turn may bring the version's files with it.
            if done and (found == known or self._turn.exception() is None):
                found = self._turn.result()
        return found


class SharedRequests(Generic[K, T]):
    """Callers that request the same at the same time share one answer."""

    def __init__(self) -> None:
        self._open: dict[K, asyncio.Task[T]] = {}

    async def answer(self, key: K, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of `ask`, called unless a request for `key` is open. Raises its errors."""
        if key not in self._open:
            self._open[key] = asyncio.create_task(ask())
            self._open[key].add_done_callback(lambda asking: self._ended(key, asking))
        # A caller that leaves does not end it for the others.
        return await asyncio.shield(self._open[key])

    def _ended(self, key: K, asking: "asyncio.Task[T]") -> None:
        del self._open[key]
        # All callers may have left by the time it fails.
        if not asking.cancelled():
            asking.exception()


class ServedFile(Protocol):
    """One file while it is open."""

    @property
    def size_bytes(self) -> int: ...

    def expect(self, span: ByteSpan) -> None:
        """Announce that all of a span will be read."""

    async def read(self, span: ByteSpan) -> bytes | bytearray:
        """The bytes of a span, once they are available; raises Corrupt or Exhausted."""


class ServedStores(Protocol):
    """Raises FileNotFoundError for unknown stores and files."""

    async def composes(self, store: str) -> bool:
        """Whether it has a skip delta between any two versions."""

    async def names(self) -> tuple[str, ...]: ...

    async def directories(self, store: str) -> tuple[str, ...]: ...

    async def latest(self, store: str, known: bytes | None, *, wait_s: float) -> bytes | None: ...

    def open(
        self, store: str, path: str, *, doubted: bool
    ) -> AbstractAsyncContextManager[ServedFile]:
        """A file of a version; `doubted` if a reader received wrong bytes."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenStore:
    source: StoreSource
    watch: LatestWatch


class SourceStores:
    """Serves stores directly from a root, and what `composed` adds to them."""

    def __init__(self, root: StoreRoot, composed: ComposedVersions | None = None) -> None:
        self._root = root
        self._composed = composed
        self._clock = MonotonicClock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weight-serve")
        self._waits = ThreadPoolExecutor(_WAITS, thread_name_prefix="weight-wait")
        self._open: dict[str, OpenStore] = {}

    async def composes(self, store: str) -> bool:
        if self._composed is None or not self._composed.composes(store):
            return False
        # Deltas of other systems do not add up.
        return await self.threaded(self.store(store).source.writer) is None

    async def names(self) -> tuple[str, ...]:
        return await self.threaded(self._root.names)

    async def directories(self, store: str) -> tuple[str, ...]:
        found = await self.threaded(self.store(store).source.directories)
        return tuple(sorted(name for name in found if named_ref(name) is not None))

    async def latest(self, store: str, known: bytes | None, *, wait_s: float) -> bytes | None:
        return await self.store(store).watch.after(known, wait_s)

    @asynccontextmanager
    async def open(self, store: str, path: str, *, doubted: bool) -> AsyncIterator[ServedFile]:
        source = self.store(store).source
        if doubted:
            source.doubt(path)
        try:
            size = await self.threaded(lambda: source.size_bytes(path))
        except FileNotFoundError:
            directory, _, name = path.partition("/")
            ref = named_ref(directory)
            if self._composed is None or ref is None or ref.kind is not Kind.SKIP:
                raise
            file = await self._composed.file(store, source, ref, name, doubted=doubted)
            yield OpenFile(file.size_bytes, lambda span: file.read(span).tobytes(), self)
        else:
            yield OpenFile(
                size, lambda span: source.bytes_at(path, span.start, span.size_bytes), self
            )

    async def close(self) -> None:
        if self._composed is not None:
            self._composed.close()
        for store in self._open.values():
            store.source.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._waits.shutdown(wait=False, cancel_futures=True)

    def store(self, name: str) -> OpenStore:
        """An open store; raises FileNotFoundError for an unknown name."""
        if name not in self._open:
            if len(self._open) >= _MAX_STORES:
                # Not closed: it may be in use, and its connections end with its last reader.
                del self._open[next(iter(self._open))]
            try:
                source = self._root.store(name)
            except ConfigError as error:
                raise FileNotFoundError(f"no store {name}") from error

            async def ask(known: bytes | None, wait_s: float) -> bytes | None:
                pool = self._waits if wait_s else self._threads
                return await asyncio.get_running_loop().run_in_executor(
                    pool, lambda: source.latest(known, wait_s=wait_s)
                )

            self._open[name] = OpenStore(source, LatestWatch(ask, self._clock))
        return self._open[name]

    async def threaded(self, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of which every span can be read at once, by `content` in a thread of the stores."""

    size_bytes: int
    content: Callable[[ByteSpan], bytes | bytearray]
    stores: SourceStores

    def expect(self, span: ByteSpan) -> None:
        """No-op: nothing has to be brought first."""

    async def read(self, span: ByteSpan) -> bytes | bytearray:
        return await self.stores.threaded(lambda: self.content(span))
