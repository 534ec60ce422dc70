"""Connections to an engine, held to a server that writes what it is told to, byte by byte."""

import asyncio
import errno
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from harvester.platform.tls import ServerTls
from scheduler.gateway.engines import engine_connections
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.engine_connections import (
    ConnectionFailed,
    EngineConnections,
    StreamedReply,
)
from scheduler.gateway.policy.turn_ledger import TurnLedger
from tests.certificates import Authority

TWO = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Named: Engine\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Script = Callable[["Server", asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request by the next script."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self._serving: set[asyncio.Task[None]] = set()
        self.left = asyncio.Event()
        """Set when a client has closed its connection."""

    async def start(self, tls: ServerTls | None = None) -> str:
        context = tls.context() if tls else None
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        port = self._server.sockets[0].getsockname()[1]
        return f"http{'s' if tls else ''}://127.0.0.1:{port}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def says(self, *parts: bytes, then_close: bool = False) -> None:
        async def script(_: "Server", writer: asyncio.StreamWriter) -> None:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if then_close:
                writer.close()

        self.scripts.append(script)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if task := asyncio.current_task():
            self._serving.add(task)
        try:
            while self.scripts:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.scripts.pop(0)(self, writer)
            await reader.read()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.left.set()
            writer.transport.abort()
            await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    served = Server()
    yield served
    await served.stop()


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[EngineConnections]:
    with closing(EngineConnections(await server.start(), connect_s=5.0)) as connections:
        yield connections


async def whole(reply: StreamedReply) -> bytes:
    with closing(reply):
        return await reply.read_most(1 << 30)


async def posted(engine: EngineConnections, body: bytes = b"{}") -> bytes:
    return await whole(await engine.post("/generate", body, {"X-Lease-Epoch": "7"}))


async def test_one_connection_carries_request_after_request(
    server: Server, engine: EngineConnections
) -> None:
    for _ in range(3):
        server.says(TWO)
    replies = [await engine.post("/generate", b"[1]", {"X-Lease-Epoch": "7"}) for _ in range(1)]
    assert (replies[0].status, replies[0].headers["x-named"]) == (200, "Engine")
    assert await whole(replies[0]) == b"ok"
    assert [await posted(engine), await posted(engine)] == [b"ok", b"ok"]
    assert server.connections == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"X-Lease-Epoch: 7" in head
    assert b"Content-Length: 3" in head
    assert body == b"[1]"


async def test_a_reply_may_come_byte_by_byte(server: Server, engine: EngineConnections) -> None:
    head = b"HTTP/1.1 100 Continue\r\nX-Of: 100\r\n\r\n" + CHUNKED
    said = head + b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nX-Trailing: 1\r\n\r\n"
    server.says(*(said[at : at + 1] for at in range(len(said))))
    server.says(TWO)
    reply = await engine.post("/generate", b"", {})
    assert await whole(reply) == b"abcd"
    assert reply.headers == {"transfer-encoding": "chunked"}
    assert await posted(engine) == b"ok"
    assert server.connections == 1


async def test_a_reply_without_a_length_ends_with_its_connection(
    server: Server, engine: EngineConnections
) -> None:
    server.says(b"HTTP/1.0 200 OK\r\n\r\n", b"to the ", b"end", then_close=True)
    assert await posted(engine) == b"to the end"


@pytest.mark.parametrize("said", [CHUNKED + b"3\r\nabc\r\n", TWO.replace(b"2", b"9")])
async def test_a_reply_that_breaks_off_is_read_up_to_there(
    server: Server, engine: EngineConnections, said: bytes
) -> None:
    server.says(said, then_close=True)
    reply = await engine.post("/generate", b"", {})
    await server.left.wait()
    with closing(reply):
        assert await reply.read() in (b"abc", b"ok")
        for _ in range(2):
            with pytest.raises(ConnectionError, match="broke off"):
                await reply.read()


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: y\r\n" * (1 << 13) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Encoding: gzip\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    ],
)
async def test_a_reply_that_is_not_plain_http_is_refused_and_its_connection_left(
    server: Server, engine: EngineConnections, said: bytes
) -> None:
    server.says(said)
    server.says(TWO)
    with pytest.raises(PeerProtocolError):
        await posted(engine)
    await server.left.wait()
    assert await posted(engine) == b"ok"
    assert server.connections == 2


async def test_a_body_that_is_no_chunk_ends_the_reply(
    server: Server, engine: EngineConnections
) -> None:
    server.says(CHUNKED + b"3\r\nabc\r\nzz\r\n")
    reply = await engine.post("/generate", b"", {})
    with closing(reply):
        assert await reply.read() == b"abc"
        with pytest.raises(PeerProtocolError):
            await reply.read()


async def test_a_redirection_is_returned_not_followed(
    server: Server, engine: EngineConnections
) -> None:
    server.says(b"HTTP/1.1 307 Moved\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n")
    assert (reply := await engine.post("/generate", b"", {})).status == 307
    assert await whole(reply) == b""
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "said",
    [
        TWO + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno",
        TWO.replace(b"X-Named", b"Connection: close\r\nX-Named"),
    ],
)
async def test_a_connection_that_ends_or_says_more_carries_no_other_request(
    server: Server, engine: EngineConnections, said: bytes
) -> None:
    server.says(said)
    server.says(TWO)
    assert [await posted(engine), await posted(engine)] == [b"ok", b"ok"]
    assert server.connections == 2


async def test_leaving_a_reply_ends_its_connection(
    server: Server, engine: EngineConnections
) -> None:
    server.says(CHUNKED + b"3\r\nabc\r\n")
    reply = await engine.post("/generate", b"", {})
    assert await reply.read() == b"abc"
    reply.close()
    await asyncio.wait_for(server.left.wait(), 30.0)
    server.says(TWO)
    fresh = await engine.post("/generate", b"", {})
    reply.close()
    assert await whole(fresh) == b"ok", "closed again, it is another's connection"


async def test_a_call_that_is_given_up_ends_its_connection(
    server: Server, engine: EngineConnections
) -> None:
    server.says()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(posted(engine), 0.1)
    await asyncio.wait_for(server.left.wait(), 30.0)


async def test_a_connection_that_was_closed_while_idle_is_not_used(
    server: Server, engine: EngineConnections
) -> None:
    server.says(TWO, then_close=True)
    assert await posted(engine) == b"ok"
    await server.left.wait()
    await asyncio.sleep(0.05)
    server.says(TWO)
    assert await posted(engine) == b"ok"


async def test_an_idle_connection_is_closed_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_connections, "KEEP_S", 0.05)
    with closing(EngineConnections(await server.start(), connect_s=5.0)) as engine:
        server.says(TWO)
        assert await posted(engine) == b"ok"
        await asyncio.wait_for(server.left.wait(), 30.0)


async def test_an_unread_reply_does_not_fill_memory(
    server: Server, engine: EngineConnections
) -> None:
    sent, size = 0, 64 << 20

    async def script(_: Server, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * (1 << 16))
            sent += 1 << 16
            await writer.drain()

    server.scripts.append(script)
    reply = await engine.post("/generate", b"", {})
    for _ in range(50):
        before = sent
        await asyncio.sleep(0.02)
        if sent == before > 0:
            break
    assert sent < size // 2
    assert len(await whole(reply)) == size


async def test_a_reader_that_can_wait_gets_more_at_once_and_the_end_at_once(
    server: Server, engine: EngineConnections
) -> None:
    more = asyncio.Event()

    async def script(_: Server, writer: asyncio.StreamWriter) -> None:
        for part in (CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        await more.wait()
        writer.write(b"1\r\nc\r\n0\r\n\r\n")

    server.scripts.append(script)
    with closing(await engine.post("/generate", b"", {})) as reply:
        assert await reply.read(0.2) == b"ab"
        asyncio.get_running_loop().call_later(0.05, more.set)
        assert await asyncio.wait_for(reply.read(60.0), 30.0) == b"c"
        assert await asyncio.wait_for(reply.read(60.0), 30.0) == b""


def event(**choice: object) -> bytes:
    said = b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(said), said)


def raw_event(said: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(said) + 2, said + b"\n\n")


class Attempting:
    """Takes the choices of one attempt at a server, which may wait from the first on."""

    def __init__(self, client: EngineClient) -> None:
        request = GenerateRequest(
            request_id="r", token_ids=(1,), sampling_params=SamplingParams(max_tokens=9)
        )
        turn = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
        assert turn is not None
        self.attempt = turn.begin(engine="e0", version=WeightVersion(0), numerics="")
        self.client = client
        self.tokens: list[int] = []

    async def take(self) -> None:
        choices = self.client.generate(
            self.attempt,
            request_id="r",
            epoch=None,
            wait_s=lambda: 60.0 if self.tokens else 0.0,
        )
        async with aclosing(choices):
            async for choice in choices:
                self.tokens.extend(choice.token_ids or ())


@pytest.fixture
async def attempting(server: Server) -> AsyncIterator[Attempting]:
    async with aiohttp.ClientSession() as session:
        client = EngineClient(session, await server.start(), connect_s=5.0)
        with closing(client):
            yield Attempting(client)


@pytest.mark.parametrize(
    ("last", "tokens"),
    [
        (event(token_ids=[2]) + event(token_ids=[3]), [1, 2, 3]),
        (event(token_ids=[2], finish_reason="length"), [1, 2]),
        (event(token_ids=[2]) + raw_event(b'data: {"error": {"code": 500}}'), [1, 2]),
        (event(token_ids=[2]) + raw_event(b"data: rubbish"), [1, 2]),
        (b"zz\r\n", [1]),
    ],
)
async def test_a_turn_that_is_taken_off_has_every_token_that_its_engine_sent(
    server: Server, attempting: Attempting, last: bytes, tokens: list[int]
) -> None:
    sent = asyncio.Event()

    async def script(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + event(token_ids=[1]))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(last)
        sent.set()

    server.scripts.append(script)
    taking = asyncio.create_task(attempting.take())
    await sent.wait()
    if last != b"zz\r\n":
        await asyncio.sleep(0.05)
        assert attempting.tokens == [1]
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert attempting.tokens == tokens


@pytest.mark.parametrize("more", [b'data: {"error": {"code": 500}}', b"data: rubbish"])
async def test_bytes_behind_the_end_of_a_turn_change_nothing(
    server: Server, attempting: Attempting, more: bytes
) -> None:
    end = event(token_ids=[1, 2], finish_reason="stop") + raw_event(more) + b"0\r\n\r\n"
    server.says(CHUNKED + end)
    server.says(TWO)
    await attempting.take()
    assert attempting.tokens == [1, 2]


async def test_turns_that_connect_at_once_look_their_host_up_once(
    server: Server, engine: EngineConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, lookups = asyncio.get_running_loop(), 0
    look_up = loop.getaddrinfo

    async def slow(*given: Any, **more: Any) -> Any:
        nonlocal lookups
        lookups += 1
        await asyncio.sleep(0.2)
        return await look_up(*given, **more)

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    for _ in range(21):
        server.says(TWO)
    given_up = asyncio.create_task(posted(engine))
    others = [asyncio.create_task(posted(engine)) for _ in range(20)]
    await asyncio.sleep(0.1)
    given_up.cancel()
    assert await asyncio.gather(*others) == [b"ok"] * 20
    assert lookups == 1


async def test_a_lookup_that_failed_is_tried_again(
    server: Server, engine: EngineConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    look_up = loop.getaddrinfo

    async def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(loop, "getaddrinfo", fails)
    with pytest.raises(ConnectionFailed, match="try again"):
        await posted(engine)
    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    server.says(TWO)
    assert await posted(engine) == b"ok"


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1:80", "http://h:a"])
async def test_a_url_without_a_port_is_no_connection(url: str) -> None:
    engine = EngineConnections(url, connect_s=5.0)
    with closing(engine), pytest.raises(ConnectionFailed):
        await posted(engine)


async def test_white_space_around_a_header_is_no_part_of_it(
    server: Server, engine: EngineConnections
) -> None:
    told = b"X-Named:\t Engine \t\r\nContent-Encoding: Identity \r\n"
    server.says(TWO.replace(b"X-Named: Engine\r\n", told))
    reply = await engine.post("/generate", b"", {})
    assert (reply.headers["x-named"], await whole(reply)) == ("Engine", b"ok")


async def test_a_head_is_not_long_by_the_chunks_behind_it(
    server: Server, engine: EngineConnections
) -> None:
    tiny = (1 << 16) // 5
    server.says(CHUNKED + b"1\r\nx\r\n" * tiny + b"0\r\n\r\n")
    assert await posted(engine) == b"x" * tiny


@pytest.mark.parametrize("endless", [b"X-Of: it\r\n", b"x"])
async def test_a_trailer_without_end_ends_the_reply(
    server: Server, engine: EngineConnections, endless: bytes
) -> None:
    server.says(CHUNKED + b"1\r\nx\r\n0\r\n", *[endless * (1 << 12)] * 40)
    with pytest.raises(PeerProtocolError, match="headers of more"):
        await posted(engine)


async def test_a_closed_reply_is_no_garbage(server: Server, engine: EngineConnections) -> None:
    server.says(CHUNKED + b"3\r\nabc\r\n")
    reply = await engine.post("/generate", b"", {})
    gone = weakref.ref(reply)
    gc.disable()
    try:
        reply.close()
        del reply
        assert gone() is None
    finally:
        gc.enable()


async def test_no_connection_says_why(engine: EngineConnections, server: Server) -> None:
    await server.stop()
    with pytest.raises(ConnectionFailed) as raised:
        await posted(engine)
    assert raised.value.errno == errno.ECONNREFUSED


async def test_a_peer_that_says_nothing_is_waited_for_no_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        engine = EngineConnections(url, connect_s=0.2)
        with closing(engine), pytest.raises(ConnectionFailed, match="TimeoutError"):
            await posted(engine)


async def test_no_header_says_more_than_one_line(engine: EngineConnections) -> None:
    with pytest.raises(ValueError, match="one line"):
        await engine.post("/generate", b"", {"X-Epoch": "1\r\nX-Other: 2"})


async def test_renewed_certificates_are_for_the_next_request(
    server: Server, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    url = await server.start(authority.server("engine"))
    trusted, stranger = authority.trusted(), Authority(tmp_path, "other").trusted()
    engine = EngineConnections(url, connect_s=5.0, credentials=stranger)
    with closing(engine), pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
        await posted(engine)
    with closing(EngineConnections(url, connect_s=5.0, credentials=trusted)) as engine:
        for _ in range(3):
            server.says(TWO)
        before = server.connections
        assert [await posted(engine), await posted(engine)] == [b"ok", b"ok"]
        assert server.connections == before + 1
        authority.file.write_bytes(authority.file.read_bytes() + b"\n")
        assert await posted(engine) == b"ok"
        assert server.connections == before + 2


async def test_an_engine_at_an_address_is_known_by_the_name_in_its_certificate(
    server: Server, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    url = await server.start(authority.server("engine", "guests.rosemux.svc"))
    for name, known in (("guests.rosemux.svc", True), ("other.rosemux.svc", False), (None, False)):
        given = authority.trusted(server_name=name)
        with closing(EngineConnections(url, connect_s=5.0, credentials=given)) as engine:
            if known:
                server.says(TWO)
                assert await posted(engine) == b"ok"
                continue
            with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
                await posted(engine)
