"""HTTP as every RoseMux service speaks it: start and stop, tokens, bodies, errors as replies.

An error reply is `{"error": MESSAGE}`; `STATUSES` apply to every service.
"""

import asyncio
import errno
import logging
import math
import os
import resource
import signal
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import (
    UNDECODABLE,
    Exhausted,
    PeerProtocolError,
    Stale,
    config_error_of,
    message_of,
)
from harvester.contracts.event_limit import EventLimit
from harvester.platform.backoff import Backoff, retry_after_s
from harvester.platform.connection_limit import ConnectionLimit
from harvester.platform.peer import Peer
from harvester.platform.tls import ServerTls

STATUSES: Final[Mapping[type[Exception], int | None]] = {
    PeerProtocolError: 400,
    Stale: 409,
    Exhausted: 503,
}
RETRY_AFTER: Final = {"Retry-After": "1"}
RETRY_AFTER_MAX_S: Final = 1.0
"""Services ask for whole seconds; a place is often free sooner, and back-off doubles by itself."""
PASSING: Final = frozenset({409, 429, 500, 502, 503, 504})
"""Statuses of a call that may succeed when it is repeated."""
SMALL_BODY_BYTES: Final = 64 << 10
BODY_S: Final = 60.0
"""Longest time that a request's body may take: clients have it when they connect."""
IDLE_S: Final = 75.0
"""Longest time of a connection without a whole head of a request, at its beginning and between two
requests: longer than clients and most proxies keep a connection themselves."""
COUNT_READ: Final[web.RequestKey[Callable[[int], None]]] = web.RequestKey("count_read")
"""Called with the number of bytes read so far of a body of unknown length."""
_LIMIT: Final[web.AppKey[ConnectionLimit]] = web.AppKey("limit", ConnectionLimit)
_BOUNDED_BODY: Final = web.RequestKey("bounded_body", bytes)
"""The body once it was counted or bounded part by part; aiohttp itself keeps the others."""
_SHOWN_CHARS: Final = 500
_BACKLOG: Final = 4096
"""Connections that wait to be accepted. A synchronous step opens thousands at once; a connection
without room tries again after 1 s, 2 s, 4 s, ..."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class HttpRefusal(PeerProtocolError):  # noqa: N818 - named for the answer
    """A peer's error reply."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def json_reply(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
        headers=headers,
    )


def error_reply(
    status: int, message: str, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    return json_reply({"error": message}, status=status, headers=headers)


def errors_as_replies(
    own: Mapping[type[Exception], int | None] | None = None, *, try_later: Collection[int] = ()
) -> Middleware:
    """Replies to errors with `STATUSES` and a service's `own`, the closest base class first.

    None stands for the error's own `status`. Replies of a `try_later` status say when to retry,
    unless the error `is_final`.
    """
    statuses = {**STATUSES, **(own or {})}
    caught = tuple(statuses)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except caught as error:
            kind = next(kind for kind in type(error).__mro__ if kind in statuses)
            status = statuses[kind] or int(getattr(error, "status"))  # noqa: B009 - of any class
            # An error of the operating system names paths of this machine.
            hidden = isinstance(error, OSError) and len(error.args) != 1
            message = "no such file" if hidden else str(error)
            later = status in try_later and not getattr(error, "is_final", False)
            return error_reply(status, message, headers=RETRY_AFTER if later else None)

    return middleware


def token_required(
    accepts: Callable[[str], bool] | None,
    *,
    of: str,
    probes: Collection[str] = ("/healthz",),
    observes: Callable[[str], bool] | None = None,
) -> Middleware:
    """Refuses requests whose Authorization header is not accepted; None accepts all. Probes carry
    no token: health reveals no secret. A header that `observes` reads, and does nothing else even
    if it is accepted too, so that a token in two files by mistake has the fewer rights."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in probes:
            return await handler(request)
        if accepts is not None:
            sent = request.headers.get("Authorization", "")
            known, observer = accepts(sent), observes is not None and observes(sent)
            if not known and not observer:
                return error_reply(401, f"send the {of}'s token as Authorization: Bearer ...")
            if observer and request.method not in ("GET", "HEAD"):
                return error_reply(403, "the token of observer reads status and metrics")
        prove_connection(request)
        return await handler(request)

    return middleware


def prove_connection(request: web.Request) -> None:
    """The request had what it needs: no newer connection takes the place of its own."""
    if (limit := request.app.get(_LIMIT)) is not None:
        limit.prove(request.transport)


async def whole_body(request: web.Request, *, most_bytes: int | None = None) -> bytes:
    """Raises HTTPRequestTimeout for a body that takes longer than `BODY_S`, PeerProtocolError for
    one that is not framed as its headers say, HTTPRequestEntityTooLarge as soon as more than
    `most_bytes` have come."""
    _check_size(request.content_length or 0, most_bytes)
    try:
        if request.content.is_eof() and COUNT_READ not in request:
            return await request.read()  # The body has come whole and needs no timer.
        async with asyncio.timeout(BODY_S):
            if _BOUNDED_BODY in request:
                return request[_BOUNDED_BODY]
            count = request.get(COUNT_READ)
            if count is None and most_bytes is None:
                return await request.read()
            body = bytearray()
            while part := await request.content.readany():
                body += part
                _check_size(len(body), most_bytes)
                if count is not None:
                    count(len(body))
            request[_BOUNDED_BODY] = bytes(body)
            return request[_BOUNDED_BODY]
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise PeerProtocolError(f"body: {error}") from error
    except TimeoutError as error:
        reason = f"the body was not whole within {BODY_S:g} s; send it at once"
        raise web.HTTPRequestTimeout(reason=reason) from error


def _check_size(size_bytes: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size_bytes > most_bytes:
        reason = f"body of more than {most_bytes} bytes"
        raise web.HTTPRequestEntityTooLarge(most_bytes, size_bytes, reason=reason)


async def decoded_body(
    request: web.Request,
    kind: type[T],
    *,
    most_bytes: int | None = None,
    empty: bytes = b"",
    name: str = "",
) -> T:
    """The JSON body; `empty` stands for an empty body. Raises PeerProtocolError, which begins with
    `name`, HTTPRequestTimeout and HTTPRequestEntityTooLarge.
    """
    body = await whole_body(request, most_bytes=most_bytes)
    _check_size(len(body), most_bytes)
    try:
        return msgspec.json.decode(body or empty, type=kind)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"{name}: {error}" if name else str(error)) from error


async def body_of(reply: aiohttp.ClientResponse, *, most_bytes: int) -> bytes:
    """Body of a peer's reply, cut at `most_bytes`; a cut JSON body fails in its reader's decoder.

    `reply.content.read(most_bytes)` differs: it returns the bytes received so far, on a network one
    or two segments.
    """
    body = bytearray()
    while part := await reply.content.read(most_bytes - len(body)):
        body += part
    return bytes(body)


async def posted(
    peer: Peer,
    path: str,
    body: bytes,
    backoff: Backoff,
    *,
    headers: dict[str, str],
    timeout_s: float,
    passing: Collection[int] = PASSING,
    on_repeat: Callable[[str], None] = lambda _why: None,
) -> bytes:
    """The reply's body. Repeats what may pass by itself: `passing` statuses, no connection.

    Raises Exhausted after the last one and at a timeout, HttpRefusal for any other status.
    """
    what, timeout = f"POST {peer.url}{path}", aiohttp.ClientTimeout(total=timeout_s)
    while True:
        pause_s = 0.0
        try:
            async with peer.post(path, data=body, headers=headers, timeout=timeout) as reply:
                content = await body_of(reply, most_bytes=SMALL_BODY_BYTES)
                if reply.status == 200:
                    return content
                problem = refusal_of(reply, content)
                if reply.status not in passing:
                    raise problem
                pause_s = retry_after_s(reply.headers.get("Retry-After"), most_s=RETRY_AFTER_MAX_S)
        except TimeoutError as error:
            raise Exhausted(f"{what} had no answer within {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            problem = HttpRefusal(f"{type(error).__name__} {error}".strip())
        wait_s = backoff.wait_s(retry_after_s=pause_s)
        if wait_s is None:
            raise backoff.exhausted(f"{what}: {problem}")
        on_repeat(str(problem))
        await asyncio.sleep(wait_s)


def refusal_of(reply: aiohttp.ClientResponse, content: bytes) -> "HttpRefusal":
    shown = message_of(content)[:_SHOWN_CHARS]
    return HttpRefusal(f"{reply.method} {reply.url.path}: {reply.status}: {shown}", reply.status)


@web.middleware
async def _refuse_encoded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No client of RoseMux compresses, and 1 MB of a compressed body may be 1 GiB inflated."""
    if all(each.lower() == "identity" for each in request.headers.getall("Content-Encoding", ())):
        return await handler(request)
    reply = error_reply(
        415, "send the body without Content-Encoding", headers={"Accept-Encoding": "identity"}
    )
    reply.force_close()
    return reply


class _WithoutSentLines(logging.Filter):
    """Cuts the traceback from aiohttp's records of malformed requests, and bounds their number.

    The traceback quotes the line, which may hold a token, and its sender needs none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = EventLimit.of_lines()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        while error and not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            error = error.__cause__ or error.__context__
        if error is None:
            return True
        if not self._limit.admits(now=MonotonicClock().now()):
            return False
        before = self._limit.taken()
        summary = f"{record.getMessage()}: malformed ({type(error).__name__}); {before} before it"
        record.msg, record.args, record.exc_info = summary, None, None
        return True


_log.addFilter(_WithoutSentLines())


def raise_descriptor_limit(most: float = math.inf) -> None:
    """Raise the process's soft limit to the hard one, or to `most` if that is less."""
    with suppress(OSError, ValueError):
        soft, hard = (
            math.inf if limit == resource.RLIM_INFINITY else limit
            for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        if soft < (wanted := min(most, hard)):
            limits = [resource.RLIM_INFINITY if x == math.inf else int(x) for x in (wanted, hard)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0], limits[1]))


@asynccontextmanager
async def serving(
    app: web.Application,
    *,
    shutdown_s: float = 2.0,
    idle_s: float = IDLE_S,
    connections: int | None = None,
) -> AsyncGenerator[web.AppRunner, None]:
    """Runs an application, which listens nowhere yet; ends it with `shutdown_s` for open requests.

    A handler is cancelled when its client leaves. A connection without a whole head of a request
    for `idle_s` is closed. Connections are bounded by the hard limit of descriptors, not the soft
    one, and by `connections` (`ConnectionLimit`) if given. No body is inflated, even where aiohttp
    drains that of a refused request: a request with a Content-Encoding is refused with 415.
    """
    raise_descriptor_limit()
    if connections is not None:
        app[_LIMIT] = ConnectionLimit(connections)
    app.middlewares.insert(0, _refuse_encoded)
    runner = web.AppRunner(
        app,
        auto_decompress=False,
        logger=_log,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=idle_s,
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


async def listen(
    runner: web.AppRunner, host: str, port: int, *, remedy: str, tls: ServerTls | None = None
) -> str:
    """Listens, and returns the URL; port 0 takes a free one. Raises ConfigError with `remedy`."""
    context = None if tls is None else tls.context()
    limit = runner.app.get(_LIMIT)
    try:
        if limit is None:
            await web.TCPSite(runner, host, port, ssl_context=context, backlog=_BACKLOG).start()
        else:
            for each in limit.listeners(host, port, backlog=_BACKLOG):
                await web.SockSite(runner, each, ssl_context=context, backlog=_BACKLOG).start()
    except OSError as error:
        why = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror
        raise config_error_of(error)(f"cannot listen on {host}:{port}: {why}; {remedy}") from error
    found, taken = runner.addresses[0][:2]
    shown = f"[{found}]" if ":" in found else found
    return f"{'http' if tls is None else 'https'}://{shown}:{taken}"


def stop_event() -> asyncio.Event:
    """Set by SIGTERM or SIGINT, and by SIGHUP if the process began on a terminal, which has then
    gone; else SIGHUP changes nothing. For the running event loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    # A terminal that has gone is none any more.
    on_terminal = os.isatty(0)

    def hang_up() -> None:
        if on_terminal:
            stop.set()
        else:
            _log.warning("SIGHUP: settings are read at the start alone; restart to apply them")

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    return stop


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, which is cancelled at the stop; raises its error."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        stopping.cancel()
