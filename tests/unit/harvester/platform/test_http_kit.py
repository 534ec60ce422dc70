"""Every service replies to errors, tokens and malformed bodies alike."""

import asyncio
import errno
import logging
import resource
import signal
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import DeflateBuffer
from aiohttp.test_utils import TestClient, TestServer

from harvester.contracts.errors import (
    ConfigError,
    Corrupt,
    Exhausted,
    NotYet,
    PeerProtocolError,
    RoseMuxError,
    Stale,
    message_of,
)
from harvester.platform import http_kit
from harvester.platform.bearer import is_sent
from harvester.platform.http_kit import (
    decoded_body,
    errors_as_replies,
    json_reply,
    listen,
    raise_descriptor_limit,
    run_until,
    serving,
    token_required,
)


async def test_a_service_without_a_terminal_goes_on_at_sighup(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for on_terminal in (False, True):
        monkeypatch.setattr(http_kit.os, "isatty", lambda _fd, here=on_terminal: here)
        stop = http_kit.stop_event()
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert stop.is_set() is on_terminal
    assert "restart to apply them" in caplog.text
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


class TeapotError(RoseMuxError):
    status = 418


async def test_an_error_that_no_retry_changes_says_no_time_for_one() -> None:
    class Taken(Stale):
        is_final = True

    for error, later in ((Stale("old"), "1"), (Taken("taken"), None)):
        assert (await _reply(error, try_later=(409,)))[2] == later


def test_a_wall_clock_that_is_set_back_silences_no_line_of_malformed_requests() -> None:
    lines = http_kit._WithoutSentLines()
    fault = HttpProcessingError(message="bad")
    admitted = []
    for created_s in (1e9, 1e9 - 86400, 1e9 - 86400):
        record = logging.makeLogRecord({"msg": "error", "exc_info": (None, fault, None)})
        record.created = created_s
        admitted.append(lines.filter(record))
    assert admitted == [True] * 3


async def _reply(error: Exception, **options: Any) -> tuple[int, Any, str | None]:
    async def fail(_: web.Request) -> web.Response:
        raise error

    app = web.Application(middlewares=[errors_as_replies(**options)])
    app.add_routes([web.get("/", fail)])
    async with TestClient(TestServer(app)) as client, client.get("/") as reply:
        return reply.status, await reply.json(), reply.headers.get("Retry-After")


@pytest.mark.parametrize(
    ("error", "status"), [(PeerProtocolError("x"), 400), (Stale("x"), 409), (Exhausted("x"), 503)]
)
async def test_an_error_has_one_status_in_every_service(error: Exception, status: int) -> None:
    assert await _reply(error) == (status, {"error": "x"}, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"Invalid grammar","type":"BadRequestError","code":400}}', "Invalid"),
        (b'{"object":"error","message":"Invalid grammar","code":400}', "Invalid grammar"),
        (b'{"error":"Invalid grammar"}', "Invalid grammar"),
        (b'{"error":{"code":400}}', '{"error":{"code":400}}'),
        (b'{"detail":[1]}', '{"detail":[1]}'),
        (b"Invalid \xff", "Invalid \ufffd"),
    ],
)
def test_the_message_of_an_error_is_its_words_alone(body: bytes, message: str) -> None:
    assert message_of(body).startswith(message)
    assert (message_of(body)[0] == "{") == (message[0] == "{")


async def test_a_service_adds_statuses_and_the_closest_class_wins() -> None:
    own = {RoseMuxError: 503, Corrupt: 409, TeapotError: None, FileNotFoundError: 404}
    assert await _reply(ConfigError("x"), own=own, try_later=(503,)) == (503, {"error": "x"}, "1")
    assert await _reply(Corrupt("x"), own=own, try_later=(503,)) == (409, {"error": "x"}, None)
    assert await _reply(TeapotError("x"), own=own) == (418, {"error": "x"}, None)
    assert await _reply(FileNotFoundError("no a"), own=own) == (404, {"error": "no a"}, None)


async def test_no_reply_names_a_path_of_the_machine() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/secret/place")
    assert await _reply(error, own={FileNotFoundError: 404}) == (
        404,
        {"error": "no such file"},
        None,
    )


async def test_all_paths_but_probes_need_the_token() -> None:
    async def ok(_: web.Request) -> web.Response:
        return json_reply({})

    app = web.Application(middlewares=[token_required(partial(is_sent, b"t" * 16), of="agent")])
    app.add_routes([web.get("/healthz", ok), web.get("/x", ok)])
    async with TestClient(TestServer(app)) as client:
        good = {"Authorization": "Bearer " + "t" * 16}
        statuses = [
            (await client.get(path, headers=headers)).status
            for path, headers in (("/healthz", {}), ("/x", {}), ("/x", good))
        ]
    assert statuses == [200, 401, 200]


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"a": "b"}'])
async def test_a_malformed_body_is_the_peers_fault(body: bytes) -> None:
    async def take(request: web.Request) -> web.Response:
        return json_reply(await decoded_body(request, Value))

    app = web.Application(middlewares=[errors_as_replies()])
    app.add_routes([web.post("/", take)])
    async with TestClient(TestServer(app)) as client, client.post("/", data=body) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]


@pytest.mark.parametrize("path", ["/", "/no-such-route"])
async def test_a_compressed_body_is_refused_and_never_inflated(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inflated: list[int] = []
    feed = DeflateBuffer.feed_data

    def seen(buffer: DeflateBuffer, chunk: bytes) -> bool:
        inflated.append(len(chunk))
        return feed(buffer, chunk)

    monkeypatch.setattr(DeflateBuffer, "feed_data", seen)
    app = _taking(None)
    body = zlib.compress(bytes(8 << 20))
    async with serving(app) as runner, aiohttp.ClientSession() as session:
        url = await listen(runner, "127.0.0.1", 0, remedy="")
        for encoding in ("deflate", "gzip", "br", "identity, deflate"):
            headers = {"Content-Encoding": encoding}
            async with session.post(url + path, data=body, headers=headers) as reply:
                assert (reply.status, reply.headers["Connection"]) == (415, "close")
                assert "Content-Encoding" in (await reply.json())["error"]
        headers = {"Content-Encoding": "identity"}
        async with session.post(url, data=b'{"a": 1}', headers=headers) as reply:
            assert (reply.status, await reply.json()) == (200, {"a": 1})
    assert inflated == []


async def test_no_log_quotes_a_malformed_request_and_few_records_tell_of_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(_: web.Request) -> web.Response:
        raise ValueError("of the service's own")

    app = _taking(None)
    app.add_routes([web.get("/fails", fails)])
    async with serving(app) as runner, aiohttp.ClientSession() as session:
        url = await listen(runner, "127.0.0.1", 0, remedy="")
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\r\n\r\n")
            async with asyncio.timeout(30):
                assert b" 400 " in await reader.readuntil(b"\r\n")
            writer.close()
        assert "secret" not in caplog.text
        assert len(caplog.records) <= 6
        async with session.get(url + "/fails") as reply:
            assert reply.status == 500
    assert "of the service's own" in caplog.text


async def test_a_body_is_read_no_further_than_its_bound() -> None:
    ended = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"a": 1' + b" " * 2000
        await ended.wait()
        yield b"}"

    async with (
        TestClient(TestServer(_taking(1000))) as client,
        asyncio.timeout(30),
    ):
        for body in (parts(), b"1" * 2000):
            async with client.post("/", data=body) as reply:
                assert (reply.status, "1000 bytes" in (await reply.json())["error"]) == (413, True)
            ended.set()


def _taking(most_bytes: int | None) -> web.Application:
    async def take(request: web.Request) -> web.Response:
        return json_reply(await decoded_body(request, Value, most_bytes=most_bytes))

    app = web.Application(middlewares=[errors_as_replies({web.HTTPException: None})])
    app.add_routes([web.post("/", take)])
    return app


class Value(msgspec.Struct):
    a: int


async def test_a_body_that_comes_slowly_is_refused_and_its_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_kit, "BODY_S", 0.05)

    async def take(request: web.Request) -> web.Response:
        return json_reply(await decoded_body(request, Value))

    own = {web.HTTPException: None}
    app = web.Application(middlewares=[errors_as_replies(own)])
    app.add_routes([web.post("/", take)])
    async with serving(app) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{")
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n")
            rest = await reader.readuntil(b"}")
        assert b"408" in head
        assert b"not whole within 0.05 s" in rest
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost: a\r\n"])
async def test_a_head_that_does_not_come_ends_its_connection(sent: bytes) -> None:
    async with serving(web.Application(), idle_s=0.05) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_a_service_may_have_as_many_connections_as_the_hard_limit_of_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 512), hard))
    try:
        async with serving(web.Application()):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_soft_limit_of_descriptors_is_raised_to_a_bound_and_never_lowered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        for most, found in ((512, 512), (300, 512)):
            raise_descriptor_limit(most)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (found, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connections_that_prove_nothing_make_room_and_a_proven_one_stays() -> None:
    async def empty(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(
        middlewares=[token_required(lambda sent: sent == "Bearer good", of="agent")]
    )
    app.add_routes([web.get("/", empty), web.get("/healthz", empty)])
    async with serving(app, connections=4) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="")

        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> int:
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: {token}\r\n\r\n".encode()
            )
            return int((await reader.readuntil(b"\r\n\r\n")).split()[1])

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))

        async with asyncio.timeout(30):
            token = "Bearer good"
            proven = await connect()
            assert await ask(*proven, "/") == 200
            token, others = "Bearer bad", [await connect() for _ in range(8)]
            others.append(await connect())
            assert await ask(*others[-1], "/healthz") == 200
            assert await ask(*others[-1], "/") == 401
            others += [await connect() for _ in range(8)]
            for reader, writer in others[:-4]:
                with suppress(ConnectionError):
                    await reader.read()
                writer.close()
            token = "Bearer good"
            assert await ask(*proven, "/") == 200
            assert await ask(*others[-1], "/") == 200
            for _, writer in (proven, *others):
                writer.close()


async def test_a_taken_port_is_a_clear_error_with_its_remedy() -> None:
    async with serving(web.Application()) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="")
        port = int(url.rpartition(":")[2])
        async with serving(web.Application()) as second:
            with pytest.raises(NotYet, match=f":{port}: the port is taken; take another"):
                await listen(second, "127.0.0.1", port, remedy="take another")


async def test_work_runs_until_the_stop_and_its_error_is_raised() -> None:
    stop, cancelled = asyncio.Event(), []

    async def work() -> None:
        try:
            stop.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    await run_until(stop, work())
    await asyncio.sleep(0)
    assert cancelled == [True]

    async def fail() -> None:
        raise Exhausted("x")

    with pytest.raises(Exhausted):
        await run_until(asyncio.Event(), fail())
