"""One shard in a relay's cache while in use: pulled once, read by all readers as it grows."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress

from harvester.contracts.errors import Corrupt
from weightsync.serve.object_cache import CachedObject, ObjectCache, digest_on_disk
from weightsync.transport.ranges import ByteSpan

_RUN_BYTES = 2 << 20
"""Bytes of one pull; readers see them once the whole pull has arrived."""

Pull = Callable[[ByteSpan], Awaitable[None]]
"""Write a span of the shard into its file; raises the source's errors."""


class RelayedFile:
    """Shared by all its readers. Belongs to one event loop."""

    def __init__(
        self,
        held: CachedObject,
        cache: ObjectCache,
        *,
        xxh3_128: str | None,
        pull: Pull,
        streams: int,
        disk: Executor,
        on_end: Callable[["RelayedFile"], None],
    ) -> None:
        """`on_end` is called once it is broken, and once it has no reader and no pull any more."""
        self._held = held
        self.size_bytes = held.size_bytes
        self._cache = cache
        self._xxh3_128 = xxh3_128
        self._pull = pull
        self._streams = streams
        self._disk = disk
        self._on_end = on_end
        self._waiting: list[asyncio.Future[None]] = []
        self._pulls: set[asyncio.Task[None]] = set()
        self._proving = asyncio.Lock()
        self._failure: Exception | None = None
        self._readers = 0
        self._has_ended = False

    @contextmanager
    def reader(self) -> Iterator["RelayedFile"]:
        """Kept for one reader more inside."""
        self._readers += 1
        try:
            yield self
        finally:
            self._readers -= 1
            self._end_if_idle()

    async def is_sound(self, *, again: bool) -> bool:
        """Whether it may be served. A copy from before this process is verified first.

        `again` means that a reader received wrong bytes. A growing copy cannot be verified, and may
        never be whole if its readers need parts only: its present bytes are pulled again. A copy
        without a published digest is not sound then.
        """
        async with self._proving:
            if again and self._held.is_whole and self._xxh3_128 is None:
                self._fail(Corrupt(f"{self._held.path.name}: a reader found it wrong"))
            elif self._held.is_whole and (again or not self._held.proved):
                await self._prove()
            elif again and self._held.chunks is not None:
                self._held.chunks.forget()
        return self._failure is None

    def expect(self, span: ByteSpan) -> None:
        if self._held.chunks is not None:
            self._held.chunks.want(span)
            self._start_pulls()

    async def read(self, span: ByteSpan) -> bytes:
        while not (self._held.chunks is None or self._held.chunks.has(span)):
            self.expect(span)
            await self._news()
        if self._failure is not None:
            raise self._failure
        assert self._held.handle is not None
        raw = await asyncio.get_running_loop().run_in_executor(
            self._disk, os.pread, self._held.handle, span.size_bytes, span.start
        )
        if len(raw) != span.size_bytes:
            raise Corrupt(f"{self._held.path.name}: the relay's copy was cut")
        return raw

    def close(self) -> None:
        for pull in self._pulls:
            pull.cancel()

    def _start_pulls(self) -> None:
        chunks = self._held.chunks
        while chunks is not None and len(self._pulls) < self._streams:
            run = chunks.claim(_RUN_BYTES)
            if run is None:
                return
            task = asyncio.create_task(self._pulled(run))
            self._pulls.add(task)
            task.add_done_callback(self._ended)

    async def _pulled(self, run: ByteSpan) -> None:
        chunks = self._held.chunks
        assert chunks is not None
        try:
            await self._pull(run)
        except Exception as error:
            # Readers of the run retry and request these bytes again.
            chunks.lost(run)
            if isinstance(error, Corrupt):
                self._fail(error)
            self._tell(error)
            return
        chunks.arrived(run)
        if chunks.is_whole:
            async with self._proving:
                await self._prove()
        self._tell(None)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._pulls.discard(task)
        if not task.cancelled() and self._failure is None:
            self._start_pulls()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        """Give its cache entry back, which may be evicted from then on."""
        if not (self._readers or self._pulls or self._has_ended):
            self._has_ended = True
            self._cache.leave(self._held)
            self._on_end(self)

    async def _prove(self) -> None:
        handle, size = self._held.handle, self._held.size_bytes
        assert handle is not None
        try:
            found = self._xxh3_128 and await asyncio.get_running_loop().run_in_executor(
                self._disk, digest_on_disk, handle, size
            )
            if found != self._xxh3_128:
                name = self._held.path.name
                self._fail(Corrupt(f"{name}: upstream's file has hash {found}; retry pulls again"))
            elif not self._held.is_whole:
                self._cache.settle(self._held)
            else:
                self._held.proved = True
        except Exception as error:
            self._fail(Corrupt(f"{self._held.path.name}: the copy cannot be verified: {error}"))

    def _fail(self, error: Exception) -> None:
        """Withdraw this copy from readers and the cache."""
        if self._failure is None:
            self._failure = error
            self._on_end(self)
            # A copy on a failing disk is never served again.
            with suppress(OSError):
                self._cache.drop(self._held, reason="broken")

    async def _news(self) -> None:
        """Wait for the next arrival; raises if a pull failed."""
        if self._failure is not None:
            raise self._failure
        news = asyncio.get_running_loop().create_future()
        self._waiting.append(news)
        await news

    def _tell(self, error: Exception | None) -> None:
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None) if error is None else news.set_exception(error)
