"""An engine without a model: tokens at a given pace, at the least cost. Prints its addresses.

Speaks the routes of `dialects.py`, whole and streamed, what the routers ask of an engine before
they use it, and the renderer's routes. `POST /pace` sets the time between tokens (JSON, s; 0: a
reply is one segment). `GET /times` gives, by the number of each request since the last call, when
it had come and when its first and last token went, in ns of CLOCK_MONOTONIC.
"""

import argparse
import asyncio
import gc
from functools import cache
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.gateway.dialects import (
    COMPLETIONS,
    MODEL,
    ROUTES,
    AnyRequest,
    TurnRoute,
    prompt_ids,
)
from benchmarks.gateway.http_messages import RequestReader
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.wire.engines import (
    ENGINE_HEADER,
    ENGINE_ROUTE,
    EngineDescription,
    EngineReport,
)

IDENTITY = "57ab0e09.0"
_STAMP = f"{ENGINE_HEADER}: {IDENTITY}\r\n".encode()
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    + _STAMP
    + b"\r\n"
)
_STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_encode = msgspec.json.encode

_FACTS: dict[bytes, Any] = {
    b"/version": {"version": "0.32.0+stub"},
    b"/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "max_model_len": 1 << 17}],
    },
    ENGINE_ROUTE.encode(): EngineReport(
        identity=IDENTITY,
        description=EngineDescription(
            model=MODEL, context_tokens=1 << 17, vocabulary=1 << 19, dtype="bfloat16"
        ),
    ),
    b"/get_model_info": {"is_generation": True},
    b"/model_info": {"is_generation": True},
    b"/get_server_info": {"served_model_name": MODEL},
    b"/server_info": {"served_model_name": MODEL},
}


@cache
def chunk(route: TurnRoute, place: int, tokens: int) -> bytes:
    event = b"data: " + _encode(route.event(place, tokens)) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


@cache
def whole(route: TurnRoute, tokens: int) -> bytes:
    return _reply(_encode(route.whole(tokens)))


@cache
def streamed(route: TurnRoute, tokens: int) -> bytes:
    events = (chunk(route, place, tokens) for place in range(1, tokens + 1))
    return _STREAM_HEAD + b"".join(events) + _STREAM_END


def _reply(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    return head % len(body) + _STAMP + b"\r\n" + body


class _RenderedBack(msgspec.Struct):
    """Fields of a derender request, whole or of one chunk."""

    stream: bool = False
    generate_chunk: dict[str, Any] = {}
    generate_responses: list[dict[str, Any]] = []


def _rendered(request: AnyRequest) -> bytes:
    sampling = {"max_tokens": request.max_tokens, "temperature": 1.0}
    prompt = {"token_ids": prompt_ids(request.number), "sampling_params": sampling}
    return _encode([prompt])


def _derendered(body: bytes) -> bytes:
    given = msgspec.json.decode(body, type=_RenderedBack)
    replies = [given.generate_chunk] if given.stream else given.generate_responses
    reply = COMPLETIONS.whole(0)
    reply["choices"] = [
        {
            "index": choice["index"],
            "text": "".join(f" {token}" for token in choice["token_ids"]),
            "logprobs": None,
            "finish_reason": choice["finish_reason"],
        }
        for event in replies
        for choice in event["choices"]
    ]
    return _encode({"chunk": reply, "stream_state": {}} if given.stream else reply)


class StubEngine:
    def __init__(self) -> None:
        self.step_s = 0.0
        self.times: dict[int, list[int]] = {}

    def take_times(self) -> dict[int, list[int]]:
        times, self.times = self.times, {}
        return times


class _StubConnection(asyncio.Protocol):
    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine
        self._reader = RequestReader()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            requests = list(self._reader.feed(data))
        except ValueError:
            # A router tries HTTP/2 first.
            self._transport.close()
            return
        for path, body in requests:
            if (route := ROUTES.get(path.decode())) is not None:
                self._generate(route, AnyRequest.of(body))
            else:
                self._transport.write(_reply(self._fact(path, body)))

    def _fact(self, path: bytes, body: bytes) -> bytes:
        if path.endswith(b"/render"):
            return _rendered(AnyRequest.of(body))
        if path.endswith(b"/derender"):
            return _derendered(body)
        if path == b"/times":
            return _encode(self._engine.take_times())
        if path == b"/pace":
            self._engine.step_s = msgspec.json.decode(body, type=float)
        return _encode(_FACTS.get(path, {}))

    def _generate(self, route: TurnRoute, request: AnyRequest) -> None:
        now_ns, step_s, tokens = monotonic_ns(), self._engine.step_s, request.tokens
        self._engine.times[request.number] = times = [now_ns, now_ns, now_ns]
        if not step_s:
            self._transport.write((streamed if request.stream else whole)(route, tokens))
            return
        began_s = self._loop.time()
        if request.stream:
            self._transport.write(_STREAM_HEAD)
            pace = (route, tokens, times, began_s, step_s)
            self._loop.call_at(began_s + step_s, self._step, *pace, 1)
        else:
            self._loop.call_at(began_s + tokens * step_s, self._end, route, tokens, times)

    def _step(
        self,
        route: TurnRoute,
        tokens: int,
        times: list[int],
        began_s: float,
        step_s: float,
        place: int,
    ) -> None:
        if self._transport.is_closing():
            return
        times[2] = monotonic_ns()
        if place == 1:
            times[1] = times[2]
        event = chunk(route, place, tokens)
        if place == tokens:
            self._transport.write(event + _STREAM_END)
            return
        self._transport.write(event)
        pace = (route, tokens, times, began_s, step_s)
        self._loop.call_at(began_s + (place + 1) * step_s, self._step, *pace, place + 1)

    def _end(self, route: TurnRoute, tokens: int, times: list[int]) -> None:
        times[1] = times[2] = monotonic_ns()
        self._transport.write(whole(route, tokens))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    given = parser.parse_args()
    engine, loop = StubEngine(), asyncio.get_running_loop()
    for port in given.ports:
        await loop.create_server(lambda: _StubConnection(engine), "127.0.0.1", port, backlog=8192)
    gc.disable()  # Nothing here is cyclic but ended connections, and a pause would be a latency.
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
