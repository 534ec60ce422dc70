"""ASGI middleware for stock vLLM's `--middleware`: facts that HTTP knows before the engine.

coserve.vllm.middleware.PulseMiddleware    production: when requests arrive and end; read-only
coserve.vllm.middleware.EpochMiddleware    guest: refuses stale lease epochs and ends requests
                                           of an older epoch when it rises

vLLM imports this module without a guard, so other imports stay in the functions that need them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from harvester.contracts.stock_fallback import guarded

if TYPE_CHECKING:
    from coserve.vllm.pulse_reporter import PulseReporter
    from harvester.contracts.page import Grant, PageReader

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_WATCH_S = 0.1
_PASSES = 4
"""Passes of the watch between telling an app that its client is gone and cancelling the app. If
only its outer task is cancelled, an app may leave its engine request running: vLLM's handlers do.
"""
_MAX_DIGITS = 19
_PREFIXES = ("/v1/", "/v2/", "/inference/v1/", "/cohere/v2/")
_ROUTES = frozenset(
    ("/classify", "/generative_scoring", "/invocations", "/pooling", "/rerank", "/score")
)
_STEPLESS = ("_lora_adapter", "/cancel", "/render", "/derender")
"""Ends of control and text routes beside them: an adapter that loads for seconds is no request that
waits for its first token."""
_OUTLIVING = "/v1/responses"
"""A path whose reply may end long before its request does: `"background": true`."""
_POLICY_VIOLATION = 1008


def is_inference(scope: Scope) -> bool:
    """Whether this is a request that makes the engine step, or a WebSocket that carries them."""
    return is_fenced(scope) and not _path(scope).endswith(_STEPLESS)


def is_fenced(scope: Scope) -> bool:
    """Whether a guest serves it only under its lease: it steps, or has a lease's work to do."""
    kind = scope["type"]
    if kind != "websocket" and (kind != "http" or scope["method"] != "POST"):
        return False
    path = _path(scope)
    if path.endswith("/abort_requests"):
        return False
    return path.startswith(_PREFIXES) or path in _ROUTES


def _path(scope: Scope) -> str:
    """The path as the router sees it: without the `--root-path` that a proxy leaves in front.

    vLLM's own middlewares cut the root path off anywhere, and so lose the slash if it is "/".
    """
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path") or "")
    return rest if rest.startswith("/") else path


class PulseMiddleware:
    def __init__(self, app: App) -> None:
        self._app = app
        self._reporter = guarded(_attached_reporter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._reporter is None or not is_inference(scope):
            await self._app(scope, receive, send)
            return
        socket = scope["type"] == "websocket"
        request = _Arrival(self._reporter, receive, socket=socket)
        try:
            await self._app(
                scope,
                request,
                _recording_websocket_messages(self._reporter, send) if socket else send,
            )
        finally:
            request.end(outlived=_path(scope) == _OUTLIVING)


def _attached_reporter() -> "PulseReporter | None":
    from coserve.vllm.pulse_reporter import process_reporter

    reporter = process_reporter()
    if reporter is not None:
        reporter.attach_middleware()
    return reporter


def _recording_websocket_messages(reporter: "PulseReporter", send: Send) -> Send:
    async def record_and_send(message: Message) -> None:
        reporter.record_websocket_message()
        await send(message)

    return record_and_send


class _Arrival:
    """Passes the client's messages on, and reports the request once its body is complete.

    Until then the engine has no work for it, and its latency has not begun.
    """

    def __init__(self, reporter: "PulseReporter", receive: Receive, *, socket: bool) -> None:
        self._reporter = reporter
        self._receive = receive
        self._body_bytes = 0
        self._socket = socket
        self._key = reporter.connect() if socket else None
        self._complete = socket

    async def __call__(self) -> Message:
        message = await self._receive()
        if self._socket:
            self._reporter.record_websocket_message()
        if not self._complete and message["type"] == "http.request":
            self._body_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                self._complete = True
                self._key = self._reporter.arrive(body_bytes=self._body_bytes)
        return message

    def end(self, *, outlived: bool) -> None:
        """Report the end of the reply, or of the client. Later messages start no request."""
        self._complete = True
        if self._key is not None:
            self._reporter.finish(self._key, outlived=outlived)


class EpochMiddleware:
    def __init__(self, app: App) -> None:
        from coserve.vllm.environment import Role, slot_environment
        from harvester.contracts.page import PageDirectory
        from harvester.contracts.wire.leases import EPOCH_HEADER

        self._app = app
        self._header = EPOCH_HEADER.lower().encode()
        environment = slot_environment()
        guest = environment is not None and environment.role is Role.GUEST
        self._grant: PageReader[Grant] | None = None
        if environment is not None and guest:
            self._grant = PageDirectory(environment.directory, environment.owners).grant_reader()
        self._open: dict[asyncio.Task[None], _Exchange] = {}
        self._watcher: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._grant is None or not is_fenced(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            # Closed before it is accepted: its later messages would carry no epoch.
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        if _path(scope) == _OUTLIVING:
            await _refuse(send, 403, "a guest serves no responses that may outlive their request")
            return
        grant = self._grant.read().record
        if grant is None:
            await _refuse(send, 503, "no grant: the node agent is silent")
            return
        epoch = _epoch(scope, self._header)
        if epoch != grant.epoch:
            await _refuse(send, 409, f"lease epoch {epoch} is not the one in force, {grant.epoch}")
            return
        if grant.held:
            await _refuse(
                send, 503, f"no new turns: {grant.reason or 'an operator holds the slot'}"
            )
            return
        await self._serve(scope, receive, send, grant.epoch)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, epoch: int) -> None:
        exchange = _Exchange(receive, send, epoch)
        task = asyncio.create_task(exchange.run(self._app, scope))
        self._open[task] = exchange
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._open.pop(task, None)
        if not exchange.cut.is_set():
            task.result()
        elif not exchange.started:
            await _refuse(send, 409, "a newer lease epoch is in force")
        elif not exchange.whole:
            # End the stream without a final chunk: the gateway keeps the tokens received.
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self) -> None:
        """End the requests of older epochs; runs only while requests are open."""
        assert self._grant is not None
        while self._open:
            grant = self._grant.read().record
            if grant is not None:
                for task, exchange in tuple(self._open.items()):
                    if exchange.epoch < grant.epoch:
                        exchange.cut.set()
                        exchange.passes += 1
                        if exchange.passes == _PASSES:
                            task.cancel()
            await asyncio.sleep(_WATCH_S)


class _Exchange:
    """Passes the messages of an app and its client on, and tracks the progress of the reply.

    Once the exchange is `cut` the client counts as disconnected. A cancelled app may still send
    messages or raise: both are dropped.
    """

    def __init__(self, receive: Receive, send: Send, epoch: int) -> None:
        self._receive, self._send = receive, send
        self.epoch = epoch
        self.started = False
        self.whole = False
        self.cut = asyncio.Event()
        self.passes = 0
        """Passes of the watch since the cut."""

    async def run(self, app: App, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if not self.cut.is_set():
                raise

    async def send(self, message: Message) -> None:
        if self.cut.is_set():
            return
        self.started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.whole = True
        await self._send(message)

    async def receive(self) -> Message:
        message = asyncio.ensure_future(self._receive())
        cut = asyncio.ensure_future(self.cut.wait())
        try:
            await asyncio.wait({message, cut}, return_when=asyncio.FIRST_COMPLETED)
            if message.done() and not self.cut.is_set():
                return message.result()
            return {"type": "http.disconnect"}
        finally:
            message.cancel()
            cut.cancel()


def _epoch(scope: Scope, header: bytes) -> int | None:
    for name, value in scope["headers"]:
        if name == header:
            return int(value) if value.isdigit() and len(value) < _MAX_DIGITS else None
    return None


async def _refuse(send: Send, status: int, why: str) -> None:
    await reply_json(send, status, json.dumps({"error": why}).encode())


async def reply_json(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Sends a whole reply; `headers` follow the headers of the content."""
    content = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": [*content, *headers]})
    await send({"type": "http.response.body", "body": body})
