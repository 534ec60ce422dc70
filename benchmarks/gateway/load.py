"""The load on one port: Poisson arrivals, a closed loop, or streams held open.

An open loop sends at its scheduled times, whatever has come back, and measures from them: a router
that falls behind shows it in every later request. Runs in the event loop of the measuring process.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import cast

from benchmarks.gateway.dialects import TurnRoute, ids_of_reply, request_bytes
from benchmarks.gateway.http_messages import ReplyReader
from harvester.contracts.clock import monotonic_ns

_LATE_S = 60.0
_NS = 1e9


@dataclass(slots=True)
class Exchange:
    """One request and its reply, in ns of CLOCK_MONOTONIC."""

    number: int
    scheduled_ns: int
    first_ns: int = 0
    """First byte of the reply's body."""
    last_ns: int = 0
    reply: ReplyReader = field(default_factory=ReplyReader.empty)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one route and size to one port; their numbers count up."""

    route: TurnRoute
    port: int
    tokens: int
    stream: bool
    numbers: Iterator[int]

    def next(self) -> tuple[int, bytes]:
        number = next(self.numbers)
        return number, request_bytes(
            self.route, number=number, tokens=self.tokens, stream=self.stream, port=self.port
        )

    def check(self, exchange: Exchange) -> None:
        """Raises ValueError unless all tokens came once and in order."""
        ids = ids_of_reply(self.route, exchange.reply, stream=self.stream)
        if ids != list(range(1, self.tokens + 1)):
            raise ValueError(f"{self.route.path}: {len(ids)} of {self.tokens} tokens: {ids[:20]}")


class _LoadConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._exchange: Exchange | None = None
        self._on_end: Callable[[_LoadConnection], None] = lambda _connection: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(
        self, exchange: Exchange, request: bytes, on_end: "Callable[[_LoadConnection], None]"
    ) -> None:
        self._exchange, self._on_end = exchange, on_end
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        exchange.reply.feed(data)
        if not exchange.first_ns and exchange.reply.body:
            exchange.first_ns = monotonic_ns()
        if exchange.reply.whole:
            self._end(exchange)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._exchange is not None:
            self._end(self._exchange)

    def _end(self, exchange: Exchange) -> None:
        exchange.last_ns = monotonic_ns()
        self._exchange = None
        self._on_end(self)


class ConnectionPool:
    """Connections to one port that are kept between requests. Use as `async with`."""

    def __init__(self, port: int, *, kept: int) -> None:
        self._port = port
        self._kept = kept
        self.free: deque[_LoadConnection] = deque()
        self._all: list[_LoadConnection] = []
        self._opening: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ConnectionPool":
        for _ in range(self._kept):
            self.free.append(await self._open())
        return self

    async def __aexit__(self, *_error: object) -> None:
        for connection in self._all:
            connection.transport.close()
        await asyncio.sleep(0)

    def send(self, exchange: Exchange, request: bytes, on_end: Callable[[], None]) -> None:
        def ended(connection: _LoadConnection) -> None:
            if not connection.transport.is_closing():
                self.free.append(connection)
            on_end()

        while self.free:
            connection = self.free.popleft()
            if not connection.transport.is_closing():
                connection.send(exchange, request, ended)
                return
        task = asyncio.ensure_future(self._send_anew(exchange, request, ended))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _send_anew(
        self, exchange: Exchange, request: bytes, ended: Callable[[_LoadConnection], None]
    ) -> None:
        (await self._open()).send(exchange, request, ended)

    async def _open(self) -> _LoadConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_LoadConnection, "127.0.0.1", self._port)
        self._all.append(connection)
        return connection


async def open_loop(
    requests: Requests, connections: ConnectionPool, *, rate: float, seconds: float, random: Random
) -> list[Exchange]:
    """Poisson arrivals for `seconds`; returns when the last reply has ended."""
    loop = asyncio.get_running_loop()
    sent: list[Exchange] = []
    arrivals: deque[tuple[int, int, bytes]] = deque()
    at_ns = monotonic_ns() + int(0.02 * _NS)
    end_ns = at_ns + int(seconds * _NS)
    while (at_ns := at_ns + int(random.expovariate(rate) * _NS)) < end_ns:
        arrivals.append((at_ns, *requests.next()))
    left, done = len(arrivals), asyncio.Event()

    def one_ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    def send_due() -> None:
        while arrivals and arrivals[0][0] <= monotonic_ns():
            scheduled_ns, number, request = arrivals.popleft()
            exchange = Exchange(number, scheduled_ns)
            sent.append(exchange)
            connections.send(exchange, request, one_ended)
        if arrivals:
            # An event loop's own timers round to milliseconds.
            ahead_s = max(1e-6, (arrivals[0][0] - monotonic_ns()) / _NS)
            signal.setitimer(signal.ITIMER_REAL, ahead_s)

    loop.add_signal_handler(signal.SIGALRM, send_due)
    try:
        send_due()
        async with asyncio.timeout(seconds + _LATE_S):
            await done.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        loop.remove_signal_handler(signal.SIGALRM)
    return sent


async def closed_loop(
    requests: Requests, connections: ConnectionPool, *, clients: int, seconds: float
) -> list[Exchange]:
    """`clients` that each send their next request when a reply ends, for `seconds`."""
    ended: list[Exchange] = []
    running, done = clients, asyncio.Event()
    end_ns = monotonic_ns() + int(seconds * _NS)

    def send() -> None:
        nonlocal running
        if monotonic_ns() >= end_ns:
            running -= 1
            if not running:
                done.set()
            return
        number, request = requests.next()
        exchange = Exchange(number, monotonic_ns())
        ended.append(exchange)
        connections.send(exchange, request, send)

    for _ in range(clients):
        send()
    async with asyncio.timeout(seconds + _LATE_S):
        await done.wait()
    return ended


async def held_streams(
    requests: Requests,
    connections: ConnectionPool,
    *,
    streams: int,
    opened_per_s: float,
    on_open: Callable[[], None],
) -> list[Exchange]:
    """All streams to their ends, or to a minute after the last has been sent, at which `on_open` is
    called: streams without an end are counted, and the rest of the run is not lost."""
    sent: list[Exchange] = []
    left, done = streams, asyncio.Event()

    def one_ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    began_ns, period_ns = monotonic_ns(), round(1e9 / opened_per_s)
    while len(sent) < streams:
        while (
            len(sent) < streams and (due_ns := began_ns + len(sent) * period_ns) <= monotonic_ns()
        ):
            number, request = requests.next()
            exchange = Exchange(number, due_ns)
            sent.append(exchange)
            connections.send(exchange, request, one_ended)
        await asyncio.sleep(0.005)
    on_open()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LATE_S):
            await done.wait()
    return sent
