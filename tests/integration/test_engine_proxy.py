"""The engine proxy in front of a fake engine: what passes, what does not, and how requests end."""

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from harvester.contracts.errors import ConfigError
from harvester.platform.bearer import TokenFile
from harvester.platform.keep_alive import end_unreachable
from harvester.platform.tls import ServerTls
from harvester.proxy import engine_proxy
from harvester.proxy.engine_proxy import EngineProxy, ProxySettings
from harvester.proxy.routes import ROUTES
from tests.certificates import token_file
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, Site, continued, gateway_on
from tests.machines import cut_off

CONTROL, DATA = "c" * 20, "d" * 20


@asynccontextmanager
async def proxied(app: web.Application, **settings: Any) -> AsyncIterator[tuple[str, Site]]:
    """URL of a proxy before an engine, and the engine's site."""
    engine, service = Site(), Site()
    await engine.serve(app)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        given = ProxySettings(engine=engine.url, **settings)
        await service.serve(EngineProxy(session, given).app())
        try:
            yield service.url, engine
        finally:
            await service.close()
            await engine.close()


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Callable[[str], bool]]:
    return {
        "control": TokenFile(token_file(tmp_path, "control", CONTROL)).accepts,
        "data": TokenFile(token_file(tmp_path, "data", DATA)).accepts,
    }


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def body(max_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "logprobs": 1, "temperature": 1.0}
    return {"request_id": "r", "token_ids": PROMPT, "stream": True, "sampling_params": sampling}


async def test_a_gateway_serves_and_switches_through_a_proxy() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with proxied(engine.app()) as (url, _), gateway_on(url) as gateway:
        status, choice = await gateway.generate("t1", 20)
        assert (status, choice["token_ids"]) == (
            200,
            continued(PROMPT, 20, version=0),
        )
        assert (await gateway.publish(1))[0] == 200
        status, choice = await gateway.generate("t2", 20)
        assert choice["token_ids"] == continued(PROMPT, 20, version=1)
        assert engine.calls[0] == "/pause?mode=keep"
        assert "/reset_prefix_cache?reset_running_requests=true" in engine.calls


async def test_a_data_token_reaches_no_control_route_and_no_token_reaches_none(
    tokens: dict[str, Callable[[str], bool]],
) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with proxied(engine.app(), **tokens) as (url, _), aiohttp.ClientSession() as session:

        async def status(path: str, headers: dict[str, str]) -> int:
            async with session.post(url + path, json={}, headers=headers) as reply:
                return reply.status

        assert await status("/pause", bearer(DATA)) == 403
        assert await status("/pause", bearer(CONTROL[:-1])) == 401
        assert await status("/pause", {}) == 401
        assert await status("/_fake", bearer(CONTROL)) == 404
        assert engine.calls == []
        assert await status("/pause", bearer(CONTROL)) == 200
        async with session.get(url + "/health", headers=bearer(DATA)) as reply:
            assert reply.status == 200


async def test_a_probe_without_a_token_learns_that_the_proxy_serves_and_nothing_of_the_engine(
    tokens: dict[str, Callable[[str], bool]],
) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with (
        proxied(engine.app(), **tokens) as (url, site),
        aiohttp.ClientSession() as session,
    ):
        await site.close()
        async with session.get(url + "/healthz") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        for path in ("/health", "/rosemux/engine", "/", "/healthz/"):
            async with session.get(url + path) as reply:
                assert (path, reply.status) == (path, 401)
        async with session.post(url + "/healthz") as reply:
            assert reply.status == 401


async def test_the_document_has_the_routes_of_the_table_and_needs_no_token(
    tokens: dict[str, Callable[[str], bool]],
) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with (
        proxied(engine.app(), **tokens) as (url, _),
        aiohttp.ClientSession() as session,
        session.get(url + "/openapi.json") as reply,
    ):
        document = await reply.json()
    described = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    own = {("GET", "/healthz"), ("GET", "/openapi.json")}
    assert set(described) == {*ROUTES, *own}
    for key, operation in described.items():
        statuses, parameters = operation["responses"], operation["parameters"]
        assert ("default" in statuses) == (key not in own)
        assert ("401" in statuses) == (key not in own)
        if key not in own:
            queried = {each["name"] for each in parameters if each["in"] == "query"}
            assert queried == ROUTES[key].parameters
    body = described["POST", "/collective_rpc"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/WorkerCall"}


async def test_an_engine_that_begins_to_refuse_the_gateway_costs_no_turn(tmp_path: Path) -> None:
    accepted, sent = token_file(tmp_path, "server", CONTROL), token_file(tmp_path, "own", CONTROL)
    first, second = (FakeEngine(step_s=0.001, epoch=None) for _ in range(2))
    async with (
        proxied(first.app(), control=TokenFile(accepted).accepts) as (url, _),
        proxied(second.app()) as (other, _),
    ):
        engines = [
            {"id": "strict", "url": url, "token_file": str(sent)},
            {"id": "open", "url": other},
        ]
        async with gateway_on(engines=engines) as gateway:

            async def turns_pass(name: str) -> set[str]:
                turns = await asyncio.gather(*(gateway.generate(f"{name}{n}", 9) for n in range(8)))
                assert [status for status, _ in turns] == [200] * 8
                return {span["engine"] for _, turn in turns for span in turn["spans"]}

            policy = gateway.scheduler.fleet.policy

            def serving() -> set[str]:
                return {each for each in ("strict", "open") if policy.state(each) == "serving"}

            await gateway.until(lambda: serving() == {"strict", "open"})
            accepted.write_text(DATA)
            async with asyncio.timeout(30):
                # A gateway that was late itself takes a refusal for no fault of the engine's.
                for wave in itertools.count():
                    assert await turns_pass(f"refused{wave}.") == {"open"}
                    if serving() == {"open"}:
                        break
            assert "401" in (await gateway.status())["engines"]["strict"]["fault"]
            sent.write_text(DATA)
            await gateway.until(lambda: serving() == {"strict", "open"})


async def test_headers_pass_only_where_both_sides_need_them() -> None:
    seen: dict[str, str] = {}

    async def answer(request: web.Request) -> web.Response:
        seen.update({name.lower(): value for name, value in request.headers.items()})
        headers = {"Retry-After": "3", "X-RoseMux-Engine": "e.1", "Set-Cookie": "a=b", "X-Own": "x"}
        return web.json_response({}, status=503, headers=headers)

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", answer)])
    async with proxied(app) as (url, _), aiohttp.ClientSession() as session:
        sent = {"X-RoseMux-Epoch": "4", "X-RoseMux-Engine": "e.0", "Cookie": "c=d", "X-Own": "y"}
        async with session.post(
            url + "/inference/v1/generate", json={}, headers=sent | bearer(CONTROL)
        ) as reply:
            passed = {name.lower() for name in reply.headers}
            assert (reply.status, reply.headers["Retry-After"]) == (503, "3")
    assert (seen["x-rosemux-epoch"], seen["x-rosemux-engine"]) == ("4", "e.0")
    assert not seen.keys() & {"authorization", "cookie", "x-own"}
    assert not passed & {"set-cookie", "x-own"}


async def test_an_engine_notices_at_once_when_the_caller_goes() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    gone = asyncio.Event()

    @web.middleware
    async def watch(request: web.Request, handler: Any) -> Any:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            gone.set()
            raise

    app = engine.app()
    app.middlewares.append(watch)
    async with proxied(app) as (url, _), aiohttp.ClientSession() as session:
        async with session.post(url + "/inference/v1/generate", json=body(100_000)) as reply:
            await reply.content.readany()
        async with asyncio.timeout(30):
            await gone.wait()
    assert engine.open == 0


STREAM_BYTES = 1 << 26
"""More than all buffers on the way, which grow to 32 MiB on Linux where a reader is fast."""


class Streams:
    """An engine that streams without end, or to `STREAM_BYTES`; and one caller with a small buffer
    that reads nothing of its own accord."""

    def __init__(self, *, part: bytes, most: int = 1 << 62) -> None:
        self._part, self._most = part, most
        self.ended = asyncio.Event()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        try:
            await reply.prepare(request)
            for _ in range(self._most // len(self._part)):
                await reply.write(self._part)
                await asyncio.sleep(0 if len(self._part) > 100 else 0.01)
            return reply
        finally:
            self.ended.set()

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[socket.socket]:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", self._stream)])
        async with proxied(app) as (url, _):
            with socket.socket() as caller:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                caller.connect(("127.0.0.1", int(url.rpartition(":")[2])))
                caller.sendall(b"POST /inference/v1/generate HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
                caller.setblocking(False)
                yield caller


async def test_a_caller_that_lives_may_leave_its_stream_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the event loop of a trainer does in a training step; a second stands for ten."""
    monkeypatch.setattr(engine_proxy, "_UNREACHABLE_S", 1.0)
    engine = Streams(part=b"x" * (1 << 16), most=STREAM_BYTES)
    loop = asyncio.get_running_loop()
    async with engine.caller() as caller, asyncio.timeout(30):
        await asyncio.sleep(5.0)
        assert not engine.ended.is_set()
        read = 0
        while part := await loop.sock_recv(caller, 1 << 16):
            read += len(part)
        assert read > STREAM_BYTES


@pytest.mark.parametrize("part_bytes", [10, 1 << 16], ids=["slow stream", "full buffers"])
async def test_a_caller_that_is_cut_off_in_its_stream_ends_its_request(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(engine_proxy, "_UNREACHABLE_S", 1.0)
    engine = Streams(part=b"x" * part_bytes)
    loop = asyncio.get_running_loop()
    async with engine.caller() as caller, asyncio.timeout(30):
        assert await loop.sock_recv(caller, 100)
        cut_off(caller)
        await engine.ended.wait()


async def test_the_watch_over_a_caller_that_has_just_gone_ends_without_an_error() -> None:
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    async with await asyncio.start_server(
        lambda _, writer: accepted.set_result(writer), "127.0.0.1", 0
    ) as server:
        _, caller = await asyncio.open_connection(*server.sockets[0].getsockname())
        transport = (await accepted).transport
        transport.abort()
        await asyncio.sleep(0.01)
        assert transport.get_extra_info("socket").fileno() < 0
        await end_unreachable(cast(asyncio.Transport, transport))
        caller.close()


async def test_a_stream_that_the_engine_breaks_is_broken_for_the_caller_too() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    engine.breaks_after = 3
    async with proxied(engine.app()) as (url, _), aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.post(url + "/inference/v1/generate", json=body(10)) as reply:
                await reply.read()


async def test_tokens_pass_one_by_one_as_they_come() -> None:
    """The engine sends the next piece only after the caller has the one before."""
    had = asyncio.Event()

    async def pieces(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for number in range(5):
            await reply.write(b"%d" % number)
            async with asyncio.timeout(30):
                await had.wait()
            had.clear()
        return reply

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", pieces)])
    async with (
        proxied(app) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(url + "/inference/v1/generate", json={}) as reply,
    ):
        for number in range(5):
            assert await reply.content.readany() == b"%d" % number
            had.set()


async def test_bodies_and_requests_are_bounded() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    engine.stalled = True
    async with (
        proxied(engine.app(), max_body_bytes=2000, max_requests=1) as (url, _),
        aiohttp.ClientSession() as session,
    ):
        path = url + "/inference/v1/generate"
        async with session.post(path, data=b"x" * 3000) as reply:
            assert reply.status == 413
        async with session.post(path, json=body(5)), session.post(path, json=body(5)) as second:
            assert (second.status, second.headers["Retry-After"]) == (503, "1")


async def test_calls_of_workers_are_small_and_bounded_for_each_role(
    tokens: dict[str, Callable[[str], bool]],
) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()
        await ended.wait()
        yield b'"method": "rosemux_weights"}'

    async with (
        proxied(engine.app(), max_requests=1, **tokens) as (url, _),
        aiohttp.ClientSession() as session,
        asyncio.timeout(30),
    ):

        async def status(data: Any, token: str) -> int:
            sent = session.post(url + "/collective_rpc", data=data, headers=bearer(token))
            async with sent as reply:
                return reply.status

        asks = b'{"method": "rosemux_weights"}'
        assert await status(asks + b" " * (64 << 10), CONTROL) == 413
        first = asyncio.create_task(status(slow(), DATA))
        await begun.wait()
        assert await status(asks, DATA) == 503
        assert await status(asks, CONTROL) == 200
        ended.set()
        assert await first == 200
        assert await status(asks, DATA) == 200


async def test_an_engine_that_is_gone_is_a_bad_gateway() -> None:
    async with proxied(web.Application()) as (url, engine), aiohttp.ClientSession() as session:
        await engine.close()
        async with session.get(url + "/health") as reply:
            assert reply.status == 502
            assert "does not answer" in json.loads(await reply.text())["error"]


async def test_an_engine_that_breaks_the_connection_is_not_taken_for_gone() -> None:
    async def breaks(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", breaks)
    async with (
        proxied(app) as (url, _),
        aiohttp.ClientSession() as session,
        session.get(url + "/health") as reply,
    ):
        assert reply.status == 504


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine": "http://10.0.0.1:8000"}, "--host 127.0.0.1"),
        ({"engine": "https://127.0.0.1:8000"}, "loopback"),
        ({"host": "10.0.0.1", "control": str.isascii}, "--cert and --key"),
        ({"host": "0.0.0.0", "tls": ServerTls(cert_file="c", key_file="k")}, "--token-file"),
    ],
)
def test_other_machines_need_tls_and_a_token(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ProxySettings(**given)
