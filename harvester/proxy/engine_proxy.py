"""The engine proxy: beside an engine that stays on loopback, TLS and tokens for other machines.

Passes bytes on as they come, in both directions. When a caller goes, the engine's connection is
closed at once, so that vLLM aborts the request; when the engine breaks a reply, so does the proxy.
"""

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs, web

from harvester.contracts.errors import ConfigError
from harvester.platform.bearer import is_loopback
from harvester.platform.http_kit import (
    RETRY_AFTER,
    SMALL_BODY_BYTES,
    error_reply,
    errors_as_replies,
    json_reply,
    listen,
    serving,
    stop_event,
    whole_body,
)
from harvester.platform.keep_alive import end_unreachable
from harvester.platform.logs import begin_log
from harvester.platform.openapi_document import DOCUMENT, serve_routes
from harvester.platform.route_table import Callers, Route
from harvester.platform.systemd import reporting
from harvester.platform.tls import ServerTls
from harvester.proxy.routes import (
    REPLY_HEADERS,
    REQUEST_HEADERS,
    ROUTES,
    WORKER_CALLS,
    CallerRole,
    Refused,
    WorkerCall,
    route_for,
    worker_call,
)

_CONNECT_S = 2.0
_KEEPALIVE_S = 2.0
"""Shorter than the 5 s after which vLLM closes an idle connection."""
_UNREACHABLE_S = 10.0
"""A caller that acknowledges nothing for this long has gone: its machine was cut off."""

Accepts = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Raises ConfigError if other machines could use the engine without TLS or as any caller."""

    engine: str = "http://127.0.0.1:8000"
    host: str = "127.0.0.1"
    port: int = 8443
    tls: ServerTls | None = None
    control: Accepts | None = field(default=None, repr=False)
    """Judges Authorization headers of callers with all roles."""
    data: Accepts | None = field(default=None, repr=False)
    """Judges Authorization headers of callers with the data role."""
    max_body_bytes: int = 64 << 20
    max_requests: int = 1024
    """Turns and texts at once; a further one is answered with 503. Each role may make as many calls
    to workers besides."""

    def __post_init__(self) -> None:
        engine = urlsplit(self.engine)
        if engine.scheme != "http" or not is_loopback(engine.hostname or ""):
            raise ConfigError(
                f"--engine {self.engine}: the engine listens on loopback, as "
                "http://127.0.0.1:8000; start vLLM with --host 127.0.0.1"
            )
        if is_loopback(self.host):
            return
        if self.tls is None:
            raise ConfigError(f"host {self.host} is not loopback: give --cert and --key")
        if self.control is None and self.data is None and self.tls.client_ca_file is None:
            raise ConfigError(
                f"host {self.host} is not loopback: give --token-file, --client-ca, or both"
            )

    def role_of(self, authorization: str) -> CallerRole | None:
        """The caller's role; without tokens, callers have a certificate or are on this machine."""
        if self.control is None and self.data is None:
            return CallerRole.CONTROL
        if self.control is not None and self.control(authorization):
            return CallerRole.CONTROL
        return CallerRole.DATA if self.data is not None and self.data(authorization) else None


class EngineProxy:
    def __init__(self, session: aiohttp.ClientSession, settings: ProxySettings) -> None:
        self._session = session
        self._settings = settings
        self._engine = settings.engine.rstrip("/")
        self._open: Counter[str] = Counter()

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._settings.max_body_bytes,
            middlewares=[errors_as_replies({web.HTTPException: None})],
        )
        health = Route("GET /healthz", "200 while the proxy serves", callers=Callers.ANYONE)
        routes = [replace(health, handler=self._healthz), *self._engine_routes()]
        serve_routes(app, "engine proxy", routes, readers=Callers.ANYONE, retried=(503,))
        for method, path in ROUTES:
            described = app[DOCUMENT]["paths"][path][method.lower()]
            described["responses"]["default"] = {"description": "the engine's own reply"}
        # Unknown callers learn of no route.
        app.router.add_route("*", "/{path:.*}", self._serve)
        return app

    def _engine_routes(self) -> Iterator[Route]:
        for (method, path), route in ROUTES.items():
            posts = method == hdrs.METH_POST
            yield Route(
                f"{method} {path}",
                f"The engine's, for the role {route.role}",
                takes=(WorkerCall if path == WORKER_CALLS else Any) if posts else None,
                kinds=(),
                query=tuple(sorted(route.parameters)),
                headers=REQUEST_HEADERS[1:],
                refuses=(400, 404, 413, 415, 502, 503, 504),
                handler=self._serve,
            )

    async def _healthz(self) -> web.Response:
        return json_reply({"status": "ok"})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        role = self._settings.role_of(request.headers.get(hdrs.AUTHORIZATION, ""))
        route = route_for(request.method, request.path, request.query.keys(), role=role)
        if isinstance(route, Refused):
            return error_reply(route.status, route.reason)
        worker = request.path == WORKER_CALLS
        control = route.role is CallerRole.CONTROL or worker
        # Health, descriptions and weights are let through whatever is open: without them the engine
        # would look down. Calls to workers by the data role therefore use none of control's room.
        room = f"workers for {role}" if worker else "turns"
        counted = route.role is CallerRole.DATA and request.method == hdrs.METH_POST
        if counted and self._open[room] >= self._settings.max_requests:
            return error_reply(503, "too many requests at once", headers=RETRY_AFTER)
        self._open[room] += counted
        try:
            body = await whole_body(request, most_bytes=SMALL_BODY_BYTES if worker else None)
            if worker:
                checked = worker_call(body, role=role or CallerRole.DATA)
                if isinstance(checked, Refused):
                    return error_reply(checked.status, checked.reason)
                body = checked
            return await self._pass_on(request, body, once=control)
        finally:
            self._open[room] -= counted

    async def _pass_on(
        self, request: web.Request, body: bytes, *, once: bool
    ) -> web.StreamResponse:
        """`once`: over a separate connection, because vLLM drops a connection after an error."""
        watch = asyncio.create_task(end_unreachable(request.transport, within_s=_UNREACHABLE_S))
        headers = _passed(request.headers, REQUEST_HEADERS) | {hdrs.ACCEPT_ENCODING: "identity"}
        if once:
            headers[hdrs.CONNECTION] = "close"
        reply: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                self._engine + request.path,
                params=request.query,
                data=body or None,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                reply = web.StreamResponse(
                    status=answer.status, headers=_passed(answer.headers, REPLY_HEADERS)
                )
                reply.content_length = answer.content_length
                await reply.prepare(request)
                async for part in answer.content.iter_any():
                    await reply.write(part)
                await reply.write_eof()
                return reply
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            if reply is None or not reply.prepared:
                # The gateway takes only a refused connection for the end of the engine's process.
                gone = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
                return error_reply(502 if gone else 504, f"the engine does not answer: {error!r}")
            # A regular end of the stream would make the partial reply look whole.
            if request.transport is not None:
                request.transport.abort()
            return reply
        finally:
            watch.cancel()


def _passed(headers: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


async def run_proxy(settings: ProxySettings, *, started: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `started` is called with the URL. Raises ConfigError."""
    begin_log()
    stop = stop_event()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False
    ) as session:
        app = EngineProxy(session, settings).app()
        async with serving(app, shutdown_s=5.0) as runner:
            host, port, tls = settings.host, settings.port, settings.tls
            remedy = "choose another --port, 0 takes a free one"
            started(await listen(runner, host, port, remedy=remedy, tls=tls))
            async with reporting():
                await stop.wait()
