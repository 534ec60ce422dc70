"""A tap between the gateway and one engine: passes everything on, records attempts, breaks streams.

It records the engine's own events before the gateway has read them. While its engine is
away it listens to nothing, as a dead engine does.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from benchmarks.migration.records import AttemptRecord, HeldRecord, append
from benchmarks.migration.rollout_plan import POISON_FAILS, POISON_KILLS, FaultKind
from harvester.contracts.clock import Clock
from harvester.contracts.wire.engines import ENGINE_HEADER, ENGINE_ROUTE
from harvester.contracts.wire.leases import EPOCH_HEADER
from harvester.contracts.wire.rollouts import EMITTED_ARGUMENT

_HOP_BY_HOP = frozenset(
    ("connection", "content-encoding", "content-length", "host", "keep-alive", "transfer-encoding")
)


_TICK_S = 0.01
_LOOKED_BACK_S = 0.2
"""Time in which a loop without a core may fail to see that a connection has ended."""


class LoopWatch:
    """How long this event loop has not run of late: on a busy machine it sees later what came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late: deque[tuple[float, float]] = deque()
        self._due_s = clock.now()

    async def run(self) -> None:
        while True:
            self._due_s = self._clock.now() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = self._clock.now()
            self._late.append((now, now - self._due_s))
            while self._late[0][0] < now - _LOOKED_BACK_S:
                self._late.popleft()

    def lost_s(self) -> float:
        now = self._clock.now()
        return max(0.0, now - self._due_s) + sum(
            late_s for at_s, late_s in self._late if at_s >= now - _LOOKED_BACK_S
        )


class EngineTap:
    def __init__(
        self,
        engine: str,
        session: aiohttp.ClientSession,
        *,
        port: int,
        engine_url: str,
        attempts: Path,
        held: Path,
        clock: Clock,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.armed: Counter[FaultKind] = Counter()
        """Faults that wait for a fitting stream."""
        self.struck: Counter[str] = Counter()
        self.on_poison: Callable[[], None] = lambda: None
        """Called when a request that kills engines has reached this one."""
        self.used = asyncio.Event()
        """Set while turns are on the engine."""
        self._open = 0
        self._engine = engine
        self._session = session
        self._port = port
        self._engine_url = engine_url
        self._attempts = attempts
        self._held = held
        self._clock = clock
        self._identities: set[str] = set()
        self._watch = LoopWatch(clock)
        self._watching: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        if self._runner is not None:
            return
        self._watching = asyncio.create_task(self._watch.run())
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def close(self) -> None:
        """Breaks all connections and listens no more."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._watching is not None:
            self._watching.cancel()

    async def _pass(self, request: web.Request) -> web.Response:
        try:
            async with self._session.request(
                request.method,
                self._engine_url + request.path_qs,
                data=await request.read(),
                headers=_kept(request.headers),
            ) as reply:
                body = await reply.read()
                return web.Response(body=body, status=reply.status, headers=_kept(reply.headers))
        except (aiohttp.ClientError, ConnectionError):
            return _broken(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        record = self._recorded(msgspec.json.decode(body))
        headers = _kept(request.headers)
        if self._strikes(FaultKind.STALE_EPOCH, EPOCH_HEADER in request.headers):
            headers[EPOCH_HEADER] = str(int(headers[EPOCH_HEADER]) - 1)
        poison = record.context[1:2]
        self._open += 1
        self.used.set()
        try:
            if poison == [POISON_FAILS]:
                record.status, record.end = 500, "refused"
                return web.json_response({"error": {"message": "poison"}}, status=500)
            if poison == [POISON_KILLS]:
                record.end = "broken"
                self.on_poison()
                # Until the engine's death breaks the connection.
                await asyncio.sleep(60.0)
            return await self._stream(request, record, body, headers)
        except (aiohttp.ClientError, ConnectionError):
            record.end = record.end or "broken"
            return _broken(request)
        except asyncio.CancelledError:
            record.end = record.end or ("closed" if self._runner is not None else "broken")
            raise
        finally:
            self._open -= 1
            if not self._open:
                self.used.clear()
            record.ended_s, record.late_s = self._clock.now(), self._watch.lost_s()
            append(self._attempts, record)

    async def _stream(
        self, request: web.Request, record: AttemptRecord, body: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        url = f"{self._engine_url}/inference/v1/generate"
        async with self._session.post(url, data=body, headers=headers) as reply:
            record.status = reply.status
            record.identity = reply.headers.get(ENGINE_HEADER, "")
            if reply.status != 200:
                record.end = "refused"
                content = await reply.read()
                return web.Response(body=content, status=reply.status, headers=_kept(reply.headers))
            self._note_weights(record.identity)
            response = web.StreamResponse(headers=_kept(reply.headers))
            await response.prepare(request)
            left, done = b"", False
            async for data in reply.content.iter_any():
                *events, left = (left + data).split(b"\n\n")
                for event in events:
                    done = done or event == b"data: [DONE]"
                    await self._event(response, record, event + b"\n\n")
            record.end = "whole" if done else "ended"
            await response.write_eof()
            return response

    async def _event(
        self,
        response: web.StreamResponse,
        record: AttemptRecord,
        event: bytes,
    ) -> None:
        ids, finish = _parsed(event)
        at_stop = finish == "stop"
        if self._strikes(FaultKind.END_TORN, at_stop):
            await response.write(event[: len(event) // 2])
            raise ConnectionResetError
        await response.write(event)
        if ids:
            record.token_ids += ids
            record.passed.append((self._clock.now(), len(ids)))
        record.finish_reason = finish or record.finish_reason
        if self._strikes(FaultKind.END_THEN_CUT, at_stop):
            raise ConnectionResetError

    def _strikes(self, kind: FaultKind, fits: bool) -> bool:
        if not fits or not self.armed[kind]:
            return False
        self.armed[kind] -= 1
        self.struck[kind] += 1
        return True

    def _recorded(self, sent: dict[str, Any]) -> AttemptRecord:
        name, _, number = sent["request_id"].rpartition(".")
        extra = sent["sampling_params"].get("extra_args") or {}
        return AttemptRecord(
            engine=self._engine,
            request_id=name,
            number=int(number),
            context=sent["token_ids"] + (extra.get(EMITTED_ARGUMENT) or []),
            sampling=sent["sampling_params"],
            began_s=self._clock.now(),
        )

    def _note_weights(self, identity: str) -> None:
        if identity and identity not in self._identities:
            self._identities.add(identity)
            task = asyncio.create_task(self._ask_weights(identity))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask_weights(self, identity: str) -> None:
        """Asks the engine's workers which weights they hold, and that it is the same one still."""
        try:
            call = {"method": "rosemux_weights"}
            async with self._session.post(f"{self._engine_url}/collective_rpc", json=call) as reply:
                workers = (await reply.json())["results"]
            async with self._session.get(self._engine_url + ENGINE_ROUTE) as reply:
                same = (await reply.json())["identity"] == identity
        except (aiohttp.ClientError, ConnectionError, KeyError, ValueError):
            same = False
        if not same:
            # Asked again at its next stream, if there is one.
            self._identities.discard(identity)
            return
        for held in workers:
            append(
                self._held,
                HeldRecord(
                    engine=self._engine,
                    identity=identity,
                    version=held.get("version", 0),
                    state_hash=held.get("state_hash", ""),
                ),
            )


def _parsed(event: bytes) -> tuple[list[int], str | None]:
    """Token ids and finish reason of one event."""
    text = event.strip().removeprefix(b"data: ")
    if not text or text == b"[DONE]":
        return [], None
    choices = msgspec.json.decode(text).get("choices") or [{}]
    return choices[0].get("token_ids") or [], choices[0].get("finish_reason")


def _kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _broken(request: web.Request) -> web.Response:
    """Breaks the connection; nothing of the response is sent."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)
