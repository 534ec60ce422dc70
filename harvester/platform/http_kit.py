"""HTTP as every RoseMux service speaks it: start and stop, tokens, bodies, errors as replies.

An error reply is `{"error": MESSAGE}`; `STATUSES` are those of every service.
"""

import asyncio
import errno
import signal
import ssl
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from harvester.contracts.errors import (
    UNDECODABLE,
    ConfigError,
    Exhausted,
    PeerProtocolError,
    Stale,
)
from harvester.platform.bearer import is_sent

STATUSES: Final[Mapping[type[Exception], int | None]] = {
    PeerProtocolError: 400,
    Stale: 409,
    Exhausted: 503,
}
RETRY_AFTER: Final = {"Retry-After": "1"}
SMALL_BODY_BYTES: Final = 64 << 10

T = TypeVar("T")


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

    None stands for the error's own `status`. Replies of a `try_later` status say when to retry.
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
            headers = RETRY_AFTER if status in try_later else None
            return error_reply(status, message, headers=headers)

    return middleware


def token_required(
    token: bytes | None, *, of: str, probes: Collection[str] = ("/healthz",)
) -> Middleware:
    """Refuses requests without the token, if there is one. Probes carry none: health reveals no
    secret.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "")
        if token is not None and request.path not in probes and not is_sent(token, sent):
            return error_reply(401, f"send the {of}'s token as Authorization: Bearer ...")
        return await handler(request)

    return middleware


async def decoded_body(
    request: web.Request,
    kind: type[T],
    *,
    most_bytes: int | None = None,
    empty: bytes = b"",
    name: str = "",
) -> T:
    """The JSON body; `empty` stands for one without bytes. Raises PeerProtocolError, which begins
    with `name`.
    """
    if most_bytes is not None and (request.content_length or 0) > most_bytes:
        raise PeerProtocolError(f"body of more than {most_bytes} bytes")
    try:
        return msgspec.json.decode(await request.read() or empty, type=kind)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"{name}: {error}" if name else str(error)) from error


async def body_of(reply: aiohttp.ClientResponse, *, most_bytes: int) -> bytes:
    """Body of a peer's reply, cut at `most_bytes`; a cut JSON body fails in its reader's decoder.

    `reply.content.read(most_bytes)` differs: it returns the bytes received so far, on a network one
    or two segments.
    """
    body = bytearray()
    while len(body) < most_bytes:
        part = await reply.content.read(most_bytes - len(body))
        if not part:
            break
        body += part
    return bytes(body)


@asynccontextmanager
async def serving(
    app: web.Application, *, shutdown_s: float = 2.0
) -> AsyncGenerator[web.AppRunner, None]:
    """Runs an application, which listens nowhere yet; ends it with `shutdown_s` for open requests.

    A handler is cancelled when its client leaves.
    """
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


async def listen(
    runner: web.AppRunner, host: str, port: int, *, remedy: str, tls: ssl.SSLContext | None = None
) -> str:
    """Listens, and returns the URL; port 0 takes a free one. Raises ConfigError with `remedy`."""
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as error:
        why = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; {remedy}") from error
    found, taken = runner.addresses[0][:2]
    shown = f"[{found}]" if ":" in found else found
    return f"{'http' if tls is None else 'https'}://{shown}:{taken}"


def stop_event() -> asyncio.Event:
    """Set by SIGTERM or SIGINT; for the running event loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
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
