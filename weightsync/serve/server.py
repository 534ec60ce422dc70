"""The HTTP server of stores: files by ranges, LATEST as it changes, with small versions as news."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass

import msgspec
from aiohttp import web

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, Exhausted, RoseMuxError
from harvester.contracts.ids import TenantId, checked_name
from harvester.platform import http_kit
from harvester.platform.bearer import is_loopback
from harvester.platform.http_kit import error_reply, errors_as_replies
from harvester.platform.logs import begin_log
from harvester.platform.openapi_document import serve_routes
from harvester.platform.route_table import JSON, TEXT, Callers, Route, metrics_route, routes_of
from harvester.platform.systemd import reporting
from harvester.platform.tenant_shares import Pressure, TenantShares
from harvester.platform.tenants import OPERATOR, TENANT, Tenants, tenant_required
from harvester.platform.tls import ServerTls
from weightsync.layout.names import (
    INDEX_FILE,
    LATEST_FILE,
    MAX_INDEX_BYTES,
    MAX_LATEST_BYTES,
    READY_FILE,
    Kind,
    named_ref,
)
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.published import published_files
from weightsync.serve.served_stores import ServedFile, ServedStores, SharedRequests
from weightsync.transport.ranges import ByteSpan, content_range, requested_span
from weightsync.transport.wire import (
    MAX_NEWS_BYTES,
    NEWS_TYPE,
    News,
    StoreList,
    StoreVersions,
    index_etag,
    latest_etag,
)

_PIECE_BYTES = 1 << 20
_HEAD_PIECE_BYTES = 256 << 10
"""Bytes of a body's head that a slow receiver takes within `stall_s`: news are all head."""
_BURST_S = 0.25
"""Burst after a pause, in seconds of the rate: a few socket buffers."""
_STATUSES = {FileNotFoundError: 404, Corrupt: 409, RoseMuxError: 503, web.HTTPException: None}
_NEWS_WITHIN_S = 5.0
"""A relay's upstream may be silent: LATEST is answered without files then."""
_NEWS_TABLE_BYTES = 8 << 20
"""Bound on an unpacked index: some 28,000 slices. It may have been packed a thousandfold."""
_OPEN = Tenants()
_CONNECTIONS = 1 << 14
"""Some thousand engines have a few each; descriptors beyond belong to files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    transfers_max: int = 64
    """Concurrent transfers; further ones get a retry reply. Each holds about 1 MiB. Tenants share
    them: one within its share gets more while others are beyond theirs."""
    bytes_per_s: float | None = None
    """Rate of all transfers together."""
    stall_s: float = 60.0
    """Seconds without progress after which a receiver is disconnected."""
    wait_max_s: float = 30.0
    """Longest time for which a request for LATEST is held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Address and credentials of a server. Raises ConfigError if it would be open to any client."""

    host: str = "127.0.0.1"
    port: int = 9731
    tenants: Tenants = _OPEN
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        unproven = self.tenants.open_to_all and not (self.tls and self.tls.client_ca_file)
        if unproven and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} is not loopback: give --token-file, --tenants or --client-ca, "
                "or listen on 127.0.0.1"
            )


class TokenBucket:
    """Limits to `bytes_per_s` on average, in request order. Reads no clock."""

    def __init__(self, bytes_per_s: float, *, burst_bytes: float | None = None) -> None:
        if bytes_per_s <= 0:
            raise ConfigError(f"a bandwidth cap of {bytes_per_s:g} bytes/s: use more than 0")
        self._rate = bytes_per_s
        self._burst_bytes = bytes_per_s * _BURST_S if burst_bytes is None else burst_bytes
        self._level_bytes = self._burst_bytes
        self._at_s: float | None = None

    def take(self, size_bytes: int, *, now: float) -> float:
        """Seconds to wait before `size_bytes` may be sent. The bytes count as sent from now on."""
        earned = 0.0 if self._at_s is None else max(0.0, now - self._at_s) * self._rate
        self._at_s = now if self._at_s is None else max(now, self._at_s)
        self._level_bytes = min(self._burst_bytes, self._level_bytes + earned) - size_bytes
        return max(0.0, -self._level_bytes / self._rate)


class WeightServer:
    def __init__(
        self,
        served: ServedStores,
        *,
        tenants: Tenants = _OPEN,
        limits: ServingLimits | None = None,
        metrics: TransferMetrics | None = None,
    ) -> None:
        self._served = served
        self._news = SharedRequests[tuple[str, bytes], bytes | None]()
        self._tenants = tenants
        self._limits = limits or ServingLimits()
        self._metrics = metrics or TransferMetrics()
        self._clock = MonotonicClock()
        rate = self._limits.bytes_per_s
        self._bucket = None if rate is None else TokenBucket(rate)
        self._active = TenantShares(self._limits.transfers_max, name="the bound on transfers")

    def app(self) -> web.Application:
        metrics = metrics_route(self._metrics.render, callers=Callers.OBSERVERS)
        routes = (*routes_of(self), metrics)
        app = web.Application(
            client_max_size=1024,
            middlewares=[
                errors_as_replies(_STATUSES, try_later=(503,)),
                tenant_required(self._tenants, routes),
            ],
        )
        serve_routes(app, "weight server", routes, retried=(503,))
        return app

    @Route("GET /stores", "The caller's stores", refuses=(409, 503), callers=Callers.READERS)
    async def _stores(self, request: web.Request) -> StoreList:
        found = await self._served.names()
        own = tuple(name for name in found if self._tenants.reads(request[TENANT], name))
        return StoreList(stores=own)

    @Route("GET /stores/{store}", "Versions", refuses=(404, 409, 503))
    async def _directories(self, request: web.Request) -> StoreVersions:
        store = self._store(request)
        found, composes = await self._served.directories(store), await self._served.composes(store)
        return StoreVersions(directories=found, composes=composes)

    @Route(
        f"GET /stores/{{store}}/{LATEST_FILE}",
        "The newest version; Prefer: wait=SECONDS waits for another one. With Accept: "
        f"{NEWS_TYPE} the listing and the version's files too, in msgpack, where they are small",
        kinds=(TEXT, NEWS_TYPE),
        headers=("Accept", "If-None-Match", "Prefer"),
        refuses=(304, 404, 409, 503),
    )
    async def _latest(self, request: web.Request) -> web.StreamResponse:
        store, known = self._store(request), _known_latest(request)
        wait_s = min(_wait_s(request), self._limits.wait_max_s)
        raw = await self._served.latest(store, known, wait_s=wait_s)
        if raw is None:
            raise FileNotFoundError(f"store {store} has no version yet")
        headers = {"ETag": latest_etag(raw), "Cache-Control": "no-cache", "Vary": "Accept"}
        if raw == known:
            return web.Response(status=304, headers=headers)
        if request.method == "GET" and NEWS_TYPE in request.headers.get("Accept", ""):
            with suppress(Pressure), self._transfer(request[TENANT]):
                news = await self._news.answer(
                    (store, raw), lambda: news_of(self._served, store, raw)
                )
                if news is not None:
                    # Kept by no cache: the entity tag is that of the plain answer.
                    once = {"Cache-Control": "no-store", "Vary": "Accept"}
                    response = web.StreamResponse(headers=once)
                    response.content_type, response.content_length = NEWS_TYPE, len(news)
                    await response.prepare(request)
                    await self._send(request, response, store, news)
                    return response
        return web.Response(body=raw, headers=headers, content_type="text/plain")

    @Route(
        "GET /stores/{store}/{directory}/{file}",
        "A file or a range of it; an index whole, with an entity tag",
        kinds=("application/octet-stream", JSON),
        headers=("If-None-Match", "Range"),
        refuses=(206, 304, 404, 409, 416, 503),
    )
    async def _file(self, request: web.Request) -> web.StreamResponse:
        store, directory = self._store(request), request.match_info["directory"]
        name = checked_name(request.match_info["file"], what="file")
        ref = named_ref(directory)
        if ref is None:
            raise FileNotFoundError(f"{directory[:80]!r} is no version")
        doubted = "no-cache" in request.headers.get("Cache-Control", "")
        async with AsyncExitStack() as until_sent:
            if ref.kind is not Kind.SKIP:
                until_sent.enter_context(self._transfer(request[TENANT]))
            opening = self._served.open(store, f"{directory}/{name}", doubted=doubted)
            file = await until_sent.enter_async_context(opening)
            if ref.kind is Kind.SKIP:
                # Only now: a reader may have waited until it was composed.
                until_sent.enter_context(self._transfer(request[TENANT]))
            if name == INDEX_FILE:
                return await self._index(request, store, file)
            return await self._answered(request, store, file)

    @contextmanager
    def _transfer(self, tenant: TenantId | None) -> Iterator[None]:
        """Counts as a transfer inside. Raises Pressure."""
        try:
            with self._active.holding(tenant or OPERATOR, 1):
                self._metrics.active.set(self._active.held)
                yield
        except Pressure:
            self._metrics.refused.labels("busy").inc()
            raise
        finally:
            self._metrics.active.set(self._active.held)

    async def _index(self, request: web.Request, store: str, file: ServedFile) -> web.Response:
        """Serve an index; a relay asks again for each of its readers' requests, mostly unchanged
        (304)."""
        if file.size_bytes > MAX_INDEX_BYTES:
            raise Corrupt(f"an index of {file.size_bytes} bytes")
        raw = bytes(await file.read(ByteSpan(0, file.size_bytes)))
        headers = {"ETag": index_etag(raw), "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        self._metrics.sent.labels(store).inc(len(raw))
        return web.Response(body=raw, headers=headers, content_type="application/json")

    async def _answered(
        self, request: web.Request, store: str, file: ServedFile
    ) -> web.StreamResponse:
        ranged = request.headers.get("Range")
        span = requested_span(ranged, file.size_bytes)
        if span is None:
            headers = {"Content-Range": f"bytes */{file.size_bytes}"}
            return error_reply(416, "no such range", headers=headers)
        response = web.StreamResponse(status=200 if ranged is None else 206)
        response.content_type = "application/octet-stream"
        response.content_length = span.size_bytes
        response.headers["Accept-Ranges"] = "bytes"
        if ranged is not None:
            response.headers["Content-Range"] = content_range(span, file.size_bytes)
        if request.method != "HEAD":
            file.expect(span)
            first = next(span.pieces(_PIECE_BYTES), ByteSpan(0, 0))
            # An unreadable file is still answered with an error status.
            head = await file.read(first) if first.size_bytes else b""
            await response.prepare(request)
            rest = map(file.read, ByteSpan(first.stop, span.stop).pieces(_PIECE_BYTES))
            await self._send(request, response, store, head, rest)
        return response

    async def _send(
        self,
        request: web.Request,
        response: web.StreamResponse,
        store: str,
        head: bytes | bytearray,
        rest: Iterable[Awaitable[bytes | bytearray]] = (),
    ) -> None:
        """Send a body. Aborts the connection if the rest cannot be read; the reader retries."""
        outcome = "broken"
        try:
            for span in ByteSpan(0, len(head)).pieces(_HEAD_PIECE_BYTES):
                await self._write(response, store, head[span.start : span.stop])
            for piece in rest:
                await self._write(response, store, await piece)
            outcome = "done"
        except (RoseMuxError, OSError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._metrics.transfers.labels(store, outcome).inc()

    async def _write(
        self, response: web.StreamResponse, store: str, piece: bytes | bytearray
    ) -> None:
        if self._bucket is not None:
            await asyncio.sleep(self._bucket.take(len(piece), now=self._clock.now()))
        async with asyncio.timeout(self._limits.stall_s):
            await response.write(piece)
        self._metrics.sent.labels(store).inc(len(piece))

    def _store(self, request: web.Request) -> str:
        """Raises FileNotFoundError for every name that the caller may not read, there or not."""
        name = checked_name(request.match_info["store"], what="store")
        if not self._tenants.reads(request[TENANT], name):
            raise FileNotFoundError(f"no store {name}")
        return name

    @Route("GET /healthz", "Transfers under way", kinds=(TEXT,), callers=Callers.ANYONE)
    async def _healthz(self) -> web.Response:
        return web.Response(text=f"{self._active.held} transfers\n")


async def news_of(served: ServedStores, store: str, latest: bytes) -> bytes | None:
    """A `News`; None where its files are too many bytes or cannot be read now."""
    directory = latest.decode(errors="replace").strip()
    if named_ref(directory) is None:
        return None
    try:
        async with asyncio.timeout(_NEWS_WITHIN_S):
            files = await _news_files(served, store, directory)
            found, composes = await served.directories(store), await served.composes(store)
    except (OSError, RoseMuxError):
        return None
    versions = StoreVersions(directories=found, composes=composes)
    return msgspec.msgpack.encode(News(latest, versions, files))


async def _news_files(served: ServedStores, store: str, directory: str) -> dict[str, bytes]:
    """The version's files by path; raises Exhausted if they are too large."""
    files: dict[str, bytes] = {}
    names, left_bytes = [INDEX_FILE], MAX_NEWS_BYTES
    for name in names:
        path = f"{directory}/{checked_name(name, what='file')}"
        async with served.open(store, path, doubted=False) as file:
            left_bytes -= file.size_bytes
            if left_bytes < 0:
                raise Exhausted(f"{path} is too large")
            span = ByteSpan(0, file.size_bytes)
            file.expect(span)
            files[path] = bytes(await file.read(span))
        if name == INDEX_FILE:
            # Outside the loop: it may be a large table when it is unpacked.
            shards = await asyncio.to_thread(
                published_files, files[path], table_limit_bytes=_NEWS_TABLE_BYTES
            )
            if sum(each.size_bytes or MAX_NEWS_BYTES for each in shards.values()) > left_bytes:
                raise Exhausted(f"the shards of {directory} are too large")
            names += [*shards, READY_FILE]
    return files


async def listen(
    served_with: Callable[[TransferMetrics], ServedStores],
    listening: ListenSettings,
    limits: ServingLimits,
    *,
    started: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; `started` is called with the URL. Raises ConfigError."""
    begin_log()
    stop = http_kit.stop_event()
    metrics = TransferMetrics()
    served = served_with(metrics)
    server = WeightServer(served, tenants=listening.tenants, limits=limits, metrics=metrics)
    try:
        async with http_kit.serving(server.app(), connections=_CONNECTIONS) as runner:
            remedy = "choose another --port, 0 takes a free one"
            host, port, tls = listening.host, listening.port, listening.tls
            started(await http_kit.listen(runner, host, port, remedy=remedy, tls=tls))
            async with reporting():
                await stop.wait()
    finally:
        await served.close()


def _known_latest(request: web.Request) -> bytes | None:
    sent = request.headers.get("If-None-Match", "").strip('"')
    if len(sent) <= 2 * MAX_LATEST_BYTES and "If-None-Match" in request.headers:
        with suppress(ValueError):
            return bytes.fromhex(sent)
    return None


def _wait_s(request: web.Request) -> float:
    """The seconds of `Prefer: wait=SECONDS` (RFC 7240), fractions included; 0 without it."""
    name, _, value = request.headers.get("Prefer", "").partition("=")
    with suppress(ValueError):
        if name.strip().lower() == "wait" and 0 < float(value) < float("inf"):
            return float(value)
    return 0.0
