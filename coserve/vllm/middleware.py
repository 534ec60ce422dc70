"""ASGI middleware for stock vLLM's `--middleware`: what HTTP knows before the engine does.

coserve.vllm.middleware.PulseMiddleware    production: when requests arrive and end; read-only
coserve.vllm.middleware.EpochMiddleware    guest: refuses stale lease epochs and ends requests
                                           of an older epoch when it rises
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from coserve.vllm.environment import Role, slot_environment
from coserve.vllm.pulse import process_reporter
from harvester.contracts.ids import Epoch
from harvester.contracts.page import Grant, PageDirectory, PageReader
from harvester.contracts.wire.leases import EPOCH_HEADER

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_EPOCH_HEADER = EPOCH_HEADER.lower().encode()
_WATCH_S = 0.1
_PASSES = 4
"""Of the watch, between telling an app that its client is gone and cancelling it. An app of which
only the outer task is cancelled may leave its engine request running: vLLM's handlers do."""
_MAX_DIGITS = 19
_PREFIXES = ("/v1/", "/v2/", "/inference/v1/", "/cohere/v2/")
_ROUTES = frozenset(
    ("/classify", "/generative_scoring", "/invocations", "/pooling", "/rerank", "/score")
)


def is_inference(scope: Scope) -> bool:
    """Whether this is a request that makes the engine step."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    if path.endswith("/abort_requests"):
        return False
    return path.startswith(_PREFIXES) or path in _ROUTES


class PulseMiddleware:
    def __init__(self, app: App) -> None:
        self._app = app
        self._reporter = process_reporter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._reporter is None or not is_inference(scope):
            await self._app(scope, receive, send)
            return
        key = self._reporter.arrive(body_bytes=_content_length(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            self._reporter.finish(key)


class EpochMiddleware:
    def __init__(self, app: App) -> None:
        self._app = app
        environment = slot_environment()
        guest = environment is not None and environment.role is Role.GUEST
        self._grant: PageReader[Grant] | None = None
        if environment is not None and guest:
            self._grant = PageDirectory(environment.directory).grant_reader()
        self._open: dict[asyncio.Task[None], _Reply] = {}
        self._watcher: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._grant is None or not is_inference(scope):
            await self._app(scope, receive, send)
            return
        grant = self._grant.read().record
        if grant is None:
            await _refuse(send, 503, "no grant: the node agent is silent")
            return
        epoch = _epoch(scope)
        if epoch != grant.epoch:
            await _refuse(send, 409, f"lease epoch {epoch}, in force is {grant.epoch}")
            return
        await self._serve(scope, receive, send, Epoch(grant.epoch))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, epoch: Epoch) -> None:
        reply = _Reply(send, epoch)
        task = asyncio.create_task(_run(self._app, scope, _Receive(receive, reply), reply))
        self._open[task] = reply
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
        if not reply.cut.is_set():
            task.result()
        elif not reply.started:
            await _refuse(send, 409, "lease epoch was raised")
        elif not reply.whole:
            # Ends the stream without a final chunk: the gateway keeps what it has.
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self) -> None:
        """End the requests of older epochs; runs only while requests are open."""
        assert self._grant is not None
        while self._open:
            grant = self._grant.read().record
            if grant is not None:
                for task, reply in tuple(self._open.items()):
                    if reply.epoch < grant.epoch:
                        reply.cut.set()
                        reply.passes += 1
                        if reply.passes == _PASSES:
                            task.cancel()
            await asyncio.sleep(_WATCH_S)


class _Reply:
    """Passes an app's messages on and remembers how far the reply is.

    A cancelled app may still have something to say (that its client went away): once the reply is
    `cut`, nothing of that passes, and neither do the app's errors.
    """

    def __init__(self, send: Send, epoch: Epoch) -> None:
        self._send = send
        self.epoch = epoch
        self.started = False
        self.whole = False
        self.cut = asyncio.Event()
        self.passes = 0
        """Of the watch, since it was cut."""

    async def __call__(self, message: Message) -> None:
        if self.cut.is_set():
            return
        self.started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.whole = True
        await self._send(message)


class _Receive:
    """Passes the client's messages on; once the reply is cut it says that the client is gone."""

    def __init__(self, receive: Receive, reply: _Reply) -> None:
        self._receive = receive
        self._cut = reply.cut

    async def __call__(self) -> Message:
        message = asyncio.ensure_future(self._receive())
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({message, cut}, return_when=asyncio.FIRST_COMPLETED)
            if message.done() and not self._cut.is_set():
                return message.result()
            return {"type": "http.disconnect"}
        finally:
            message.cancel()
            cut.cancel()


async def _run(app: App, scope: Scope, receive: Receive, reply: _Reply) -> None:
    try:
        await app(scope, receive, reply)
    except Exception:
        if not reply.cut.is_set():
            raise


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < _MAX_DIGITS:
            return int(value)
    return 0


def _epoch(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == _EPOCH_HEADER:
            return int(value) if value.isdigit() and len(value) < _MAX_DIGITS else None
    return None


async def _refuse(send: Send, status: int, why: str) -> None:
    body = json.dumps({"error": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
