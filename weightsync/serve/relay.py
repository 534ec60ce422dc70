"""Stores with copies: every file crosses the slow link once, then serves many.

Readers of a file that is still arriving get its present bytes as it grows; its digest is checked
before it counts as whole, and a file that fails is dropped and pulled again for the next reader.
LATEST and the index of each version are requested upstream. While upstream does not answer, only
versions whose files are all cached are served.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.layout.names import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_INDEX_BYTES,
    READY_FILE,
    latest_line,
    refs_in,
)
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.object_cache import ObjectCache
from weightsync.serve.outage import CachedReplies, UpstreamOutage
from weightsync.serve.published import PublishedFile, published_files
from weightsync.serve.relayed_file import RelayedFile
from weightsync.serve.served_stores import OpenFile, ServedFile, SharedRequests, SourceStores
from weightsync.transport.location import StoreRoot
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import StoreSource

_INDEXES = 256


class RelayedStores:
    """Stores of another server, relayed. Belongs to one event loop."""

    def __init__(
        self,
        upstream: StoreRoot,
        cache: ObjectCache,
        *,
        streams: int = 4,
        metrics: TransferMetrics | None = None,
    ) -> None:
        self._clock = MonotonicClock()
        self._upstream = SourceStores(upstream)
        self._cache = cache
        self._metrics = metrics or TransferMetrics()
        self._streams = streams
        self._link = ThreadPoolExecutor(streams, thread_name_prefix="weight-pull")
        self._disk = ThreadPoolExecutor(4, thread_name_prefix="weight-disk")
        self._indexes: dict[tuple[str, str], Mapping[str, PublishedFile]] = {}
        self._reading = SharedRequests[tuple[str, str], bytes]()
        self._parsing = asyncio.Lock()
        self._files: dict[str, RelayedFile] = {}
        self._replies = CachedReplies(cache.root)
        self._outage = UpstreamOutage()

    async def names(self) -> tuple[str, ...]:
        return await self._outage.request(
            self._upstream.names, lambda: self._replies.stores() or None
        )

    async def directories(self, store: str) -> tuple[str, ...]:
        return await self._outage.request(
            lambda: self._upstream.directories(store),
            lambda: self._whole_versions(store) or None,
        )

    async def composes(self, store: str) -> bool:  # noqa: ARG002 - its readers share files
        return False

    async def latest(self, store: str, known: bytes | None, *, wait_s: float) -> bytes | None:
        until_s = self._clock.now() + wait_s
        while True:
            left_s = max(0.0, until_s - self._clock.now())
            found = await self._request_latest(store, known, left_s)
            # In an outage no newer version can appear: wait for its end.
            if found != known or not self._outage.is_on or not await self._outage.over(left_s):
                return found

    async def _request_latest(self, store: str, known: bytes | None, wait_s: float) -> bytes | None:
        async def ask() -> bytes | None:
            raw = await self._upstream.latest(store, known, wait_s=wait_s)
            if raw is not None:
                self._replies.keep_latest(store, raw)
            return raw

        return await self._outage.request(
            ask,
            lambda: self._newest_here(store),
            lambda: self._upstream.latest(store, None, wait_s=0.0),
            wait_s=wait_s,
        )

    def _newest_here(self, store: str) -> bytes | None:
        """The newest version that can be served, among versions that upstream named in LATEST:
        readers may have reached it by an anchor, or a skip delta on such a version, alone."""
        latest = self._replies.latest(store)
        refs = refs_in(self._whole_versions(store))
        here: set[WeightVersion] = set()
        for ref in sorted(refs, key=lambda ref: ref.version):
            if latest and ref.version <= latest.version and (ref.base is None or ref.base in here):
                here.add(ref.version)
        return latest_line(max(here)) if here else None

    def _whole_versions(self, store: str) -> tuple[str, ...]:
        """Versions that can be served without upstream."""
        return tuple(
            sorted(
                version
                for version, files in self._replies.files(store).items()
                if all(self._cache.holds(store, file.key) for file in files.values())
            )
        )

    @asynccontextmanager
    async def open(self, store: str, path: str, *, doubted: bool) -> AsyncIterator[ServedFile]:
        directory, _, name = path.partition("/")
        if name in {READY_FILE, CONFIG_FILE, INDEX_FILE}:
            raw = await self._small_file(store, directory, name)
            yield OpenFile(len(raw), lambda span: raw[span.start : span.stop], self._upstream)
            return
        published = await self._published_file(store, directory, name, fresh=doubted)
        source = self._upstream.store(store).source
        if doubted:
            # Upstream may be a relay with a copy that still grows.
            source.doubt(path)
        size = published.size_bytes
        if size is None:
            size = await self._upstream.threaded(lambda: source.size_bytes(path))
        # A copy that turns out to be broken is replaced once.
        for _ in range(2):
            with self._file(source, store, path, published, size).reader() as file:
                if await file.is_sound(again=doubted):
                    yield file
                    return
        raise Corrupt(f"{path} differs from the published file")

    async def close(self) -> None:
        self._outage.close()
        for file in self._files.values():
            file.close()
        await self._upstream.close()
        self._link.shutdown(wait=False, cancel_futures=True)
        self._disk.shutdown(wait=False, cancel_futures=True)
        self._cache.close()

    async def _published_file(
        self, store: str, directory: str, name: str, *, fresh: bool
    ) -> PublishedFile:
        """A shard's record from the index last served: its readers have seen that index."""
        known = (store, directory)
        if fresh or known not in self._indexes:
            await self._read_index(store, directory)
        published = self._indexes[known].get(name)
        if published is None:
            raise FileNotFoundError(f"{directory} has no file {name}")
        return published

    async def _small_file(self, store: str, directory: str, name: str) -> bytes:
        if name == INDEX_FILE:
            return await self._read_index(store, directory)
        path = f"{directory}/{name}"
        if name == CONFIG_FILE:
            return await self._read_small(store, path)
        # A version whose files are all cached was ready when they were pulled.
        return await self._outage.request(
            lambda: self._read_small(store, path),
            lambda: b"" if directory in self._whole_versions(store) else None,
            lambda: self._upstream.latest(store, None, wait_s=0.0),
        )

    async def _read_index(self, store: str, directory: str) -> bytes:
        raw = await self._outage.request(
            lambda: self._read_small(store, f"{directory}/{INDEX_FILE}"),
            lambda: self._replies.index(store, directory),
            lambda: self._upstream.latest(store, None, wait_s=0.0),
        )
        # One index at a time and outside the loop: a large index takes seconds.
        async with self._parsing:
            files = self._indexes.get((store, directory))
            if files is None or self._replies.index(store, directory) != raw:
                files = await asyncio.to_thread(published_files, raw)
                self._replies.keep_index(store, directory, raw, files)
        self._indexes.pop((store, directory), None)
        self._indexes[store, directory] = files
        if len(self._indexes) > _INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return raw

    def _file(
        self, source: StoreSource, store: str, path: str, published: PublishedFile, size: int
    ) -> RelayedFile:
        name = f"{store}/{published.key}"
        if name in self._files:
            return self._files[name]
        held = self._cache.take(store, published.key, size)

        async def pull(span: ByteSpan) -> None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._link, _fetch, source, path, span, held.part)
            self._metrics.pulled.labels(store).inc(span.size_bytes)

        file = RelayedFile(
            held,
            self._cache,
            xxh3_128=published.xxh3_128,
            pull=pull,
            streams=self._streams,
            disk=self._disk,
            on_end=lambda file: self._ended(name, file),
        )
        self._files[name] = file
        return file

    def _ended(self, name: str, file: RelayedFile) -> None:
        if self._files.get(name) is file:
            del self._files[name]

    async def _read_small(self, store: str, path: str) -> bytes:
        """A small upstream file, read once for all concurrent requests."""
        source = self._upstream.store(store).source
        return await self._reading.answer(
            (store, path),
            lambda: self._upstream.threaded(lambda: source.read_small(path, MAX_INDEX_BYTES)),
        )


def _fetch(source: StoreSource, path: str, span: ByteSpan, into: Path) -> None:
    """Reads a span and writes it in its place. The file is reopened: this runs in a thread that may
    outlive the object."""
    data = memoryview(bytearray(span.size_bytes))
    source.read_range(path, span.start, data)
    with into.open("r+b", buffering=0) as file:
        file.seek(span.start)
        while data:
            data = data[file.write(data) :]
