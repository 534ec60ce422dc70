"""Connections to one vLLM server that are kept between its replies, each read as it comes.

Turns and their texts use them: each token is a segment, and aiohttp's client costs twice as much
for each as a parser that calls back (decision 122).
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit

import aiohappyeyeballs
import httptools
from aiohappyeyeballs import AddrInfoType

from harvester.contracts.errors import PeerProtocolError
from harvester.platform.tls import NO_CREDENTIALS, Credentials

KEEP_S = 2.0
"""Time for which an idle connection is kept. Shorter than the 5 s after which an engine closes it:
a request that meets the closing would look like a lost engine."""
_EYEBALLS_S = 0.25
"""Lead of an address over the next one of the same host, in s, as RFC 8305 has it."""
_LOOKUP_KEPT_S = 10.0
_MAX_HEAD_BYTES = 64 << 10
"""Bound of headers, and of bytes between two parts of a body."""
_MAX_UNREAD_BYTES = 1 << 18
"""Bytes of a reply that wait to be read; the engine waits with more."""


class ConnectionFailed(ConnectionError):  # noqa: N818 - named for the state
    """No connection was made: the engine never saw the request. `errno`: of the failed call."""


class StreamedReply:
    """One reply while it comes. `close` ends it, and with it an unfinished request."""

    def __init__(self, connection: "_Connection") -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Names are in lower case; the last of repeated fields counts."""
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._head_bytes = self._framing_bytes = self._unread_bytes = 0
        self._ended = self._keeps = self._paused = self._for_end = self._is_closed = False
        self._fault: Exception | None = None
        self._came: asyncio.Future[None] | None = None

    async def read(self, wait_s: float = 0.0) -> bytes:
        """Waits for the next bytes of the body; b"" at its end. Raises ConnectionError if the reply
        breaks off and PeerProtocolError if it is not HTTP, after the bytes received before.

        `wait_s`: time to wait for further bytes, in s; the end is reported at once.
        """
        if wait_s and not self._is_over:
            await self._more(wait_s)
        while not self._parts:
            if self._fault is not None:
                raise self._fault
            if self._ended:
                return b""
            await self._more()
        return self.unread()

    def unread(self) -> bytes:
        """The bytes that have come since the last read."""
        parts, self._parts, self._unread_bytes = self._parts, [], 0
        if self._paused:
            self._paused = False
            self._connection.transport.resume_reading()
        return b"".join(parts)

    async def read_most(
        self, most_bytes: int, hold: Callable[[int], Awaitable[None]] | None = None
    ) -> bytes:
        """The body from here on, cut at `most_bytes`. Raises as read.

        `hold`: awaited with the bytes held so far after each read."""
        body = bytearray()
        while len(body) < most_bytes and (part := await self.read()):
            body += part
            if hold is not None:
                await hold(len(body))
        return bytes(body[:most_bytes])

    async def drain(self, within_s: float) -> None:
        """Drops the rest of the body, so that its connection can be used again."""
        if not self._is_over:
            await self._more(within_s)
        self.unread()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.left(self, keep=self._ended and self._keeps)
        # They refer back to the reply: without this all would wait for the garbage collector.
        del self._parser
        self._fault = None
        self.unread()

    async def head(self) -> None:
        """Waits for status and headers. Raises as read."""
        while not self.status:
            if self._fault is not None:
                raise self._fault
            await self._more()
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise PeerProtocolError("a compressed reply to a request for a plain one")

    async def _more(self, wait_s: float = 0.0) -> None:
        """Waits for more bytes; with `wait_s`, at most that long for the end."""
        loop = asyncio.get_running_loop()
        self._came, self._for_end = loop.create_future(), wait_s > 0
        due = loop.call_later(wait_s, self._waited) if wait_s else None
        try:
            await self._came
        finally:
            self._came = None
            if due is not None:
                due.cancel()

    @property
    def _is_over(self) -> bool:
        return self._ended or self._fault is not None

    def feed(self, data: bytes) -> None:
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(PeerProtocolError(f"no HTTP reply: {error}"))
        if max(self._head_bytes, self._framing_bytes) > _MAX_HEAD_BYTES:
            self._fail(PeerProtocolError(f"headers of more than {_MAX_HEAD_BYTES} bytes"))
        if self._unread_bytes > _MAX_UNREAD_BYTES and not self._paused:
            self._paused = True
            self._connection.transport.pause_reading()
        self._wake()

    def lost(self, error: Exception | None) -> None:
        """The connection has ended, which ends a reply without a length."""
        measured = {"content-length", "transfer-encoding"} & self.headers.keys()
        if error is None and self.status and not measured:
            self._ended = True
        elif not self._ended and self._fault is None:
            self._fault = ConnectionError(f"the reply broke off: {error or 'connection closed'}")
        self._wake()

    def _fail(self, fault: Exception) -> None:
        self._fault = self._fault or fault
        self._connection.transport.abort()

    def _wake(self) -> None:
        if not self._for_end or self._paused or self._is_over:
            self._waited()

    def _waited(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        if self._ended:
            # No request awaits this reply.
            self._keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        # Ignores headers of a trailer or of another reply.
        if not self.status:
            self._head_bytes += len(name) + len(value) + 4
            text = value.strip(b" \t").decode(errors="replace")
            self.headers[name.decode("latin-1").lower()] = text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
        elif not self._ended:
            self.status, self._framing_bytes = status, 0

    def on_body(self, body: bytes) -> None:
        if not self._ended:
            self._parts.append(body)
            self._unread_bytes += len(body)
            self._framing_bytes = 0

    def on_message_complete(self) -> None:
        # An informational reply, 100 for one, ends nothing.
        if self.status and not self._ended:
            self._ended, self._keeps = True, self._parser.should_keep_alive()


class _Connection(asyncio.Protocol):
    """Carries one request after another."""

    transport: asyncio.Transport

    def __init__(self, pool: "EngineConnections", tls: ssl.SSLContext | None) -> None:
        self._pool = pool
        self.tls = tls
        self.idle_since_s = 0.0
        self._reply: StreamedReply | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.transport.abort()
        else:
            self._reply.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None:
            self._reply.lost(exc)

    def send(self, request: bytes) -> StreamedReply:
        self._reply = reply = StreamedReply(self)
        self.transport.write(request)
        return reply

    def left(self, reply: StreamedReply, *, keep: bool) -> None:
        """The reply is read no further."""
        if self._reply is not reply:
            return
        self._reply = None
        if keep and not self.transport.is_closing():
            self._pool.keep(self)
        else:
            # Not `close`, which waits for a peer that reads the rest of the request.
            self.transport.abort()


class EngineConnections:
    """`url`: scheme, host and port."""

    def __init__(
        self, url: str, *, connect_s: float, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self.url = url
        self._secure = url.startswith("https:")
        self._credentials = credentials
        self._lookup: asyncio.Task[Sequence[AddrInfoType]] | None = None
        self._looked_up_s = 0.0
        self._connect_s = connect_s
        self._idle: list[_Connection] = []
        """The one used last is taken first."""
        self._closing: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> StreamedReply:
        """The reply to a request for which it asks once, from its headers on; to be closed.

        Raises ConnectionFailed, ConnectionError (the engine may have seen the request),
        PeerProtocolError.
        """
        request = self._head(path, len(body), headers) + body
        tls = self._credentials.tls() if self._secure else None
        connection = self._kept(tls) or await self._connected(tls)
        reply = connection.send(request)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    async def addresses(self) -> list[str]:
        """Host and port, by number. Raises ConnectionError if the host is not known."""
        try:
            return [f"{at[0]}:{at[1]}" for *_, at in await self._looked_up()]
        except OSError as error:
            raise ConnectionError(f"{self.url}: {error}") from error

    def close(self) -> None:
        """Closes idle connections now and the others once they become idle."""
        self._closed = True
        self._close_idle(kept_s=0.0)

    def keep(self, connection: _Connection) -> None:
        if self._closed:
            connection.transport.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._closing is None:
            self._closing = loop.call_later(KEEP_S, self._close_idle)

    def _kept(self, tls: ssl.SSLContext | None) -> _Connection | None:
        least_s = asyncio.get_running_loop().time() - KEEP_S
        while self._idle:
            connection = self._idle.pop()
            if connection.transport.is_closing():
                continue
            # Renewed certificates are for new connections.
            if connection.idle_since_s > least_s and connection.tls is tls:
                return connection
            connection.transport.abort()
        return None

    def _close_idle(self, kept_s: float = KEEP_S) -> None:
        loop = asyncio.get_running_loop()
        least_s = loop.time() - kept_s
        for connection in self._idle:
            if connection.idle_since_s <= least_s:
                connection.transport.abort()
        self._idle = [each for each in self._idle if not each.transport.is_closing()]
        if self._closing is not None:
            self._closing.cancel()
        self._closing = loop.call_later(KEEP_S, self._close_idle) if self._idle else None

    async def _connected(self, tls: ssl.SSLContext | None) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            addresses = await self._looked_up()
            name = self._credentials.server_name or urlsplit(self.url).hostname
            async with asyncio.timeout(self._connect_s):
                found = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=_EYEBALLS_S
                )
                try:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self, tls),
                        sock=found,
                        ssl=tls,
                        server_hostname=name if tls else None,
                    )
                except BaseException:
                    found.close()
                    raise
        except (OSError, RuntimeError, ValueError) as error:
            # uvloop's connect raises RuntimeError too, a URL without a port's number ValueError.
            number = getattr(error, "errno", None) or 0
            raise ConnectionFailed(number, f"{type(error).__name__}: {error}") from error
        return connection

    async def _looked_up(self) -> Sequence[AddrInfoType]:
        """The host's addresses, by one lookup for all turns that want to connect meanwhile."""
        loop, parts = asyncio.get_running_loop(), urlsplit(self.url)
        last, kept = self._lookup, loop.time() - self._looked_up_s < _LOOKUP_KEPT_S
        if last is None or (last.done() and (not kept or last.exception() is not None)):
            port = parts.port or (443 if self._secure else 80)
            lookup = loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
            self._lookup = last = loop.create_task(lookup)
            self._looked_up_s = loop.time()
            # Without this, asyncio logs the error of a lookup whose turns have all gone.
            last.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(last)

    def _head(self, path: str, length: int, headers: Mapping[str, str]) -> bytes:
        given = {
            "Host": self.url.partition("//")[2],
            "User-Agent": "rosemux",
            "Content-Type": "application/json",
            "Content-Length": str(length),
            **self._credentials.headers(),
            **headers,
        }
        if any(not (name + value).isprintable() for name, value in given.items()):
            raise ValueError(f"headers of more than one line: {sorted(given)}")
        fields = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode()
