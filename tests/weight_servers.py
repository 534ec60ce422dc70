"""Real weight servers and relays on loopback, each in a thread with an event loop of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from harvester.platform.backoff import RetryLimits
from harvester.platform.tenants import Tenants
from weightsync.publish.composing import composed_files
from weightsync.serve.composed_versions import Compose, ComposedVersions
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.object_cache import ObjectCache
from weightsync.serve.relay import RelayedStores
from weightsync.serve.served_stores import ServedStores, SourceStores
from weightsync.serve.server import ServingLimits, WeightServer
from weightsync.transport.access import Access
from weightsync.transport.location import StoreRoot
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import StoreSource, each_span

HASTY = Access(
    streams=3,
    range_bytes=64 << 10,
    stall_s=0.5,
    retries=RetryLimits(give_up_s=10.0, first_wait_s=0.005, wait_max_s=0.05),
)
"""Small ranges and short waits: many of both in a small store."""
OPEN = Tenants()


def fill(source: StoreSource, path: str, into: memoryview) -> None:
    """Reads a whole file as receivers do: several ranges at once."""

    def read(span: ByteSpan) -> None:
        source.read_range(path, span.start, into[span.start : span.stop])

    each_span(source, ByteSpan(0, len(into)).pieces(source.range_bytes), read)


@contextmanager
def running(
    app_of: Callable[[], tuple[web.Application, ServedStores | None]], *, port: int = 0
) -> Iterator[str]:
    """The URL of an application that is made and served in a thread."""
    loop = asyncio.new_event_loop()
    url: list[str] = []
    up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        app, served = app_of()
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        up.set()
        await stop.wait()
        await runner.cleanup()
        if served is not None:
            await served.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(10)
        yield url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
        loop.close()


@contextmanager
def served(
    root: Path | str,
    *,
    tenants: Tenants = OPEN,
    limits: ServingLimits | None = None,
    metrics: TransferMetrics | None = None,
    port: int = 0,
    base_checkpoint: Path | None = None,
    compose: Compose | None = composed_files,
    composed_bytes: int = 1 << 30,
) -> Iterator[str]:
    def app() -> tuple[web.Application, ServedStores]:
        composed = ComposedVersions(compose, kept_bytes=composed_bytes) if compose else None
        served = SourceStores(StoreRoot(root, base_checkpoint=base_checkpoint), composed)
        return WeightServer(served, tenants=tenants, limits=limits, metrics=metrics).app(), served

    with running(app, port=port) as url:
        yield url


@contextmanager
def relayed(
    upstream: str,
    cache: Path,
    *,
    access: Access = HASTY,
    tenants: Tenants = OPEN,
    capacity_bytes: int = 64 << 20,
    limits: ServingLimits | None = None,
    metrics: TransferMetrics | None = None,
) -> Iterator[str]:
    def app() -> tuple[web.Application, ServedStores]:
        counted = metrics or TransferMetrics()
        held = ObjectCache(cache, capacity_bytes, metrics=counted)
        served = RelayedStores(StoreRoot(upstream, access), held, streams=3, metrics=counted)
        return WeightServer(served, tenants=tenants, limits=limits, metrics=counted).app(), served

    with running(app) as url:
        yield url
