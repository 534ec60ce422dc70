"""Weights over real sockets that break, lie, stall and come back: exact bytes or a clear error."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import aiohttp
import pytest
import torch
from aiohttp import web

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, Exhausted, RoseMuxError
from harvester.contracts.ids import WeightVersion
from harvester.platform.backoff import RetryLimits
from harvester.platform.tenants import Tenants
from tests.certificates import Authority
from tests.weight_servers import HASTY, fill, relayed, running, served
from weightsync.layout.names import INDEX_FILE
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.server import ServingLimits
from weightsync.transport.access import VARIABLES, Access
from weightsync.transport.connections import Connections
from weightsync.transport.http_source import HttpSource

SHARD_FILE = "model-00001-of-00001.safetensors"
SHARD = f"weight_v000001/{SHARD_FILE}"
TOKEN = b"a token of these tests"
State = dict[str, torch.Tensor]


def _state() -> State:
    torch.manual_seed(0)
    return {name: torch.randn(1000, 500).bfloat16() for name in ("a", "b")}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with job-a: version 1 of 2 MB and a delta."""
    root = tmp_path_factory.mktemp("stores")
    state = _state()
    with Publisher(root / "job-a") as publisher:
        publisher.publish(state)
        state["a"][::50] *= 2
        publisher.publish(state)
    return root


def _read(source: HttpSource, path: str = SHARD) -> bytes:
    with closing(source):
        into = bytearray(source.size_bytes(path))
        fill(source, path, memoryview(into))
    return bytes(into)


def _source(url: str, access: Access = HASTY) -> HttpSource:
    return HttpSource(f"{url}/stores/job-a", access)


def _unharmed(piece: bytes) -> bytes:
    return piece


def _damaging(random: Random) -> Callable[[bytes], bytes]:
    """Now and then flips a bit, loses a run of bytes or sends it twice."""

    def damage(piece: bytes) -> bytes:
        if random.random() > 0.003:
            return piece
        at = random.randrange(len(piece))
        end = at + random.randint(1, 40)
        return random.choice(
            (
                piece[:at] + bytes([piece[at] ^ 1 << random.randrange(8)]) + piece[at + 1 :],
                piece[:at] + piece[end:],
                piece[:end] + piece[at:],
            )
        )

    return damage


@contextmanager
def cutting(
    url: str,
    *,
    random: Random,
    mean_bytes: float = 60_000,
    damage: Callable[[bytes], bytes] = _unharmed,
) -> Iterator[tuple[str, Callable[[], int]]]:
    """A proxy that cuts every connection after a random number of the answer's bytes."""
    upstream = ("127.0.0.1", int(url.rpartition(":")[2]))
    listener = socket.create_server(("127.0.0.1", 0))
    cuts = 0

    def serve(near: socket.socket) -> None:
        nonlocal cuts
        left = int(random.expovariate(1 / mean_bytes))
        with near, socket.create_connection(upstream) as far:
            pump = threading.Thread(target=_pump, args=(near, far))
            pump.start()
            with suppress(OSError):
                while left > 0 and (piece := far.recv(min(left, 4096))):
                    near.sendall(damage(piece))
                    left -= len(piece)
            cuts += 1
            for each in (near, far):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            pump.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(near,)))
                threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: cuts
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in list(threads):
            thread.join(10)


def _pump(near: socket.socket, far: socket.socket) -> None:
    with suppress(OSError):
        while piece := near.recv(4096):
            far.sendall(piece)
    with suppress(OSError):
        far.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("seed", range(3))
def test_a_connection_that_is_cut_anywhere_goes_on_from_there(stores: Path, seed: int) -> None:
    metrics = TransferMetrics()
    with (
        served(stores, metrics=metrics) as url,
        cutting(url, random=Random(seed)) as (near, cuts),
    ):
        assert _read(_source(near)) == (stores / "job-a" / SHARD).read_bytes()
        assert cuts() > 10


def test_a_relay_behind_a_link_that_is_cut_serves_whole_files(stores: Path, tmp_path: Path) -> None:
    with (
        served(stores) as url,
        cutting(url, random=Random(1)) as (near, _),
        relayed(near, tmp_path / "cache") as relay,
    ):
        assert _read(_source(relay)) == (stores / "job-a" / SHARD).read_bytes()


@pytest.mark.parametrize("through_relay", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_link_that_damages_anything_leads_to_the_published_state_or_an_error(
    stores: Path, tmp_path: Path, seed: int, through_relay: bool
) -> None:
    """Heads of answers, LATEST, listings, indexes and shards are all hit."""
    hasty = replace(HASTY, stall_s=0.3, retries=RetryLimits(give_up_s=1.0, first_wait_s=0.005))
    random = Random(seed)
    held = {name: torch.zeros_like(tensor) for name, tensor in _state().items()}
    with ExitStack() as stack:
        url = stack.enter_context(served(stores))
        link = cutting(url, random=random, mean_bytes=400_000, damage=_damaging(random))
        near, _ = stack.enter_context(link)
        if through_relay:
            near = stack.enter_context(relayed(near, tmp_path / "cache", access=hasty))
        receiver = stack.enter_context(closing(Receiver(_source(near, hasty))))
        for _ in range(4):
            with suppress(RoseMuxError):
                receiver.sync(None, WeightVersion(1), TensorTarget(held))
                assert all(torch.equal(held[name], tensor) for name, tensor in _state().items())
                break
        else:
            assert not any(tensor.any() for tensor in held.values()), "nothing was applied"


Lie = Callable[[web.Request, bytes], web.Response]


def _lies() -> dict[str, tuple[Lie, type[RoseMuxError]]]:
    def ranged(body: bytes, content_range: str, status: int = 206) -> web.Response:
        return web.Response(status=status, body=body, headers={"Content-Range": content_range})

    def span(request: web.Request) -> slice:
        return request.http_range

    def other_place(request: web.Request, raw: bytes) -> web.Response:
        at = span(request)
        return ranged(raw[at], f"bytes {at.start + 1}-{at.stop}/{len(raw)}")

    def shorter(request: web.Request, raw: bytes) -> web.Response:
        at = span(request)
        return ranged(raw[at][:-1], f"bytes {at.start}-{at.stop - 1}/{len(raw)}")

    def no_range(request: web.Request, raw: bytes) -> web.Response:
        return ranged(raw[span(request)], "")

    def whole(_: web.Request, raw: bytes) -> web.Response:
        return web.Response(body=raw)

    def elsewhere(_: web.Request, __: bytes) -> web.Response:
        return web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"})

    def failing(_: web.Request, __: bytes) -> web.Response:
        return web.Response(status=500)

    return {
        "bytes of another place": (other_place, Corrupt),
        "fewer bytes than it says": (shorter, Corrupt),
        "no Content-Range": (no_range, Corrupt),
        "the whole file instead of a range": (whole, Corrupt),
        "a redirect": (elsewhere, RoseMuxError),
        "nothing but errors": (failing, Exhausted),
    }


@pytest.mark.parametrize("lie", _lies().values(), ids=_lies().keys())
def test_a_server_that_answers_something_else_is_not_believed(
    stores: Path, lie: tuple[Lie, type[RoseMuxError]]
) -> None:
    raw = (stores / "job-a" / SHARD).read_bytes()

    async def answer(request: web.Request) -> web.Response:
        if request.method == "HEAD":
            return web.Response(body=raw)
        return lie[0](request, raw)

    def app() -> tuple[web.Application, None]:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", answer)])
        return app, None

    access = Access(
        streams=2,
        range_bytes=1 << 18,
        retries=RetryLimits(give_up_s=5, attempts_max=3, first_wait_s=0.001),
    )
    with running(app) as url, pytest.raises(lie[1]):
        _read(_source(url, access))


def test_an_answer_that_ends_with_its_connection_is_closed_unread() -> None:
    async def last(_: web.Request) -> web.Response:
        return web.Response(body=bytes(1 << 20), headers={"Connection": "close"})

    def app() -> tuple[web.Application, None]:
        app = web.Application()
        app.add_routes([web.get("/", last)])
        return app, None

    with running(app) as url, closing(Connections(urlsplit(url), HASTY)) as connections:
        with connections.answer("GET", "/", {}, timeout_s=5) as answer:
            answer.read(1)
        assert answer.isclosed()


@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize("through_relay", [False, True])
def test_a_damaged_shard_is_refused_and_read_once_it_is_whole(
    stores: Path, tmp_path: Path, how: str, through_relay: bool
) -> None:
    shutil.copytree(stores, tmp_path / "stores")
    path = tmp_path / "stores" / "job-a" / SHARD
    raw = path.read_bytes()
    path.write_bytes(raw[:-9] if how == "cut" else raw[:700_000] + b"\xff\x00" + raw[700_002:])
    held = {name: torch.zeros_like(tensor) for name, tensor in _state().items()}
    with served(tmp_path / "stores") as url, relayed(url, tmp_path / "cache") as relay:
        receiver = Receiver(_source(relay if through_relay else url))
        with closing(receiver):
            with pytest.raises(Corrupt):
                receiver.sync(None, WeightVersion(1), TensorTarget(held))
            assert not any(tensor.any() for tensor in held.values())
            path.write_bytes(raw)
            receiver.sync(None, WeightVersion(1), TensorTarget(held))
    assert all(torch.equal(held[name], tensor) for name, tensor in _state().items())
    assert not list((tmp_path / "cache").glob("*/*.part"))


def _eventually(holds: Callable[[], bool]) -> bool:
    clock = MonotonicClock()
    until_s = clock.now() + 20.0
    while not (held := holds()) and clock.now() < until_s:
        threading.Event().wait(0.01)
    return held


def test_a_relay_s_copy_that_rots_is_dropped_and_pulled_again(stores: Path, tmp_path: Path) -> None:
    raw = (stores / "job-a" / SHARD).read_bytes()
    metrics = TransferMetrics()
    with served(stores) as url, relayed(url, tmp_path / "cache", metrics=metrics) as relay:
        assert _read(_source(relay)) == raw
        (copy,) = (tmp_path / "cache" / "job-a").glob("*-*")
        with copy.open("r+b") as file:
            file.seek(1000)
            file.write(b"rotten")
        receiver = Receiver(_source(relay))
        with closing(receiver):
            held = {name: torch.zeros_like(tensor) for name, tensor in _state().items()}
            receiver.sync(None, WeightVersion(1), TensorTarget(held))
        # Ranges that were under way when the copy was dropped are pulled by the next reader, and
        # readers have them before the copy counts as whole and gets its name back.
        assert _read(_source(relay)) == raw
        assert _eventually(lambda: copy.exists() and copy.read_bytes() == raw)
    dropped = metrics.registry.get_sample_value(
        "weightsync_dropped_objects_total", {"reason": "broken"}
    )
    assert dropped == 1


def test_many_readers_take_one_copy_over_the_link(stores: Path, tmp_path: Path) -> None:
    raw, metrics = (stores / "job-a" / SHARD).read_bytes(), TransferMetrics()
    found: list[bytes] = []
    slow = ServingLimits(bytes_per_s=4e6)
    with (
        served(stores, limits=slow, metrics=metrics) as url,
        relayed(url, tmp_path / "cache") as relay,
    ):
        readers = [
            threading.Thread(target=lambda: found.append(_read(_source(relay)))) for _ in range(6)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(30)
    assert found == [raw] * 6
    sent = metrics.registry.get_sample_value("weightsync_sent_bytes_total", {"store": "job-a"})
    assert sent is not None
    assert len(raw) <= sent < len(raw) + 10_000


def test_ranges_in_any_order_take_every_byte_once(stores: Path, tmp_path: Path) -> None:
    raw, metrics = (stores / "job-a" / SHARD).read_bytes(), TransferMetrics()
    wrong: list[int] = []

    def read(source: HttpSource, random: Random) -> None:
        for _ in range(15):
            start = random.randrange(len(raw))
            into = bytearray(random.randint(1, min(300_000, len(raw) - start)))
            source.read_range(SHARD, start, memoryview(into))
            if into != raw[start : start + len(into)]:
                wrong.append(start)

    with (
        served(stores, metrics=metrics) as url,
        relayed(url, tmp_path / "cache") as relay,
        closing(_source(relay)) as source,
    ):
        readers = [threading.Thread(target=read, args=(source, Random(at))) for at in range(6)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(30)
    sent = metrics.registry.get_sample_value("weightsync_sent_bytes_total", {"store": "job-a"})
    assert not wrong
    assert sent is not None
    assert sent < len(raw) + 10_000


def test_a_relay_reports_a_lost_server_in_time(stores: Path, tmp_path: Path) -> None:
    hasty = Access(connect_s=0.2, retries=RetryLimits(give_up_s=0.3, first_wait_s=0.01))
    with (
        relayed("http://127.0.0.1:9", tmp_path / "cache", access=hasty) as relay,
        closing(_source(relay, hasty)) as source,
        pytest.raises(Exhausted, match="gave up"),
    ):
        source.read_range(SHARD, 0, memoryview(bytearray(10)))


def test_a_relay_without_room_still_answers_with_what_to_do(stores: Path, tmp_path: Path) -> None:
    hasty = Access(retries=RetryLimits(attempts_max=2, first_wait_s=0.001))
    with (
        served(stores) as url,
        relayed(url, tmp_path / "cache", capacity_bytes=1000) as relay,
        pytest.raises(Exhausted),
    ):
        _read(_source(relay, hasty))


def test_a_server_that_gives_nothing_is_given_up_in_bounded_time(stores: Path) -> None:
    never: list[asyncio.Event] = []
    asked: list[int] = []

    async def hang(request: web.Request) -> web.StreamResponse:
        at = request.http_range.start
        asked.append(at)
        response = web.StreamResponse(status=206)
        response.content_length = 1000 - at
        response.headers["Content-Range"] = f"bytes {at}-999/1000"
        await response.prepare(request)
        await response.write(b"x" * 10)
        await never[0].wait()
        return response

    def app() -> tuple[web.Application, None]:
        app = web.Application()
        never.append(asyncio.Event())
        app.add_routes([web.get("/{path:.*}", hang)])
        return app, None

    access = Access(stall_s=0.05, retries=RetryLimits(attempts_max=4, first_wait_s=0.001))
    with (
        running(app) as url,
        closing(_source(url, access)) as source,
        pytest.raises(Exhausted, match="gave up"),
    ):
        source.read_range(SHARD, 0, memoryview(bytearray(1000)))
    assert asked == [0, 10, 20, 30], "each time from where it was"


@pytest.mark.parametrize(
    "read",
    [
        lambda source: source.read_range(SHARD, 0, memoryview(bytearray(1 << 20))),
        lambda source: source.read_small(f"weight_v000001/{INDEX_FILE}", 1 << 20),
    ],
    ids=["range", "index"],
)
def test_a_server_that_trickles_is_given_up_in_bounded_time(
    read: Callable[[HttpSource], object],
) -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=206)
        response.content_length = 1 << 20
        response.headers["Content-Range"] = f"bytes 0-{(1 << 20) - 1}/{1 << 20}"
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x")
            await asyncio.sleep(0.002)
        return response

    def app() -> tuple[web.Application, None]:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", trickle)])
        return app, None

    access = Access(retries=RetryLimits(give_up_s=0.2))
    with (
        running(app) as url,
        closing(_source(url, access)) as source,
        pytest.raises(Exhausted, match="too slowly"),
    ):
        read(source)


def test_a_question_that_is_held_back_for_long_is_no_slow_answer(
    stores: Path, tmp_path: Path
) -> None:
    latest = Path(shutil.copytree(stores, tmp_path / "stores")) / "job-a" / "LATEST"
    access = Access(retries=RetryLimits(give_up_s=0.2))
    with served(tmp_path / "stores") as url, closing(_source(url, access)) as source:
        writing = threading.Timer(0.6, latest.write_bytes, (b"weight_v000001\n",))
        writing.start()
        assert source.latest(b"weight_v000002\n", wait_s=20.0) == b"weight_v000001\n"
        writing.join()


@contextmanager
def in_chunks(status: int, *, chunks: int) -> Iterator[tuple[str, Callable[[], int]]]:
    """A server whose answers have a length of 10 bytes and come in chunks of 1 MiB all the same;
    its URL, and the chunks that it has sent."""
    sent = 0

    def serve(near: socket.socket) -> None:
        nonlocal sent
        with near, suppress(OSError):
            near.recv(1 << 16)
            near.sendall(
                f"HTTP/1.1 {status} OK\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n"
                "Transfer-Encoding: chunked\r\n\r\n".encode()
            )
            for _ in range(chunks):
                near.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                sent += 1
            near.sendall(b"0\r\n\r\n")

    def accept() -> None:
        with suppress(OSError):
            while True:
                serve(listener.accept()[0])

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: sent
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


@pytest.mark.parametrize(
    ("status", "read"),
    [
        (200, lambda source: source.latest()),
        (304, lambda source: source.latest(b"weight_v000001\n")),
        (200, lambda source: source.directories()),
        (200, lambda source: source.read_small(f"weight_v000001/{INDEX_FILE}", 1000)),
        (206, lambda source: source.read_range(SHARD, 0, memoryview(bytearray(10)))),
    ],
    ids=["LATEST", "LATEST is the same", "listing", "index", "range"],
)
def test_an_answer_is_never_longer_than_it_says(
    status: int, read: Callable[[HttpSource], object]
) -> None:
    with (
        in_chunks(status, chunks=64) as (url, sent),
        closing(_source(url)) as source,
        pytest.raises(RoseMuxError, match="sent chunks"),
    ):
        read(source)
    assert sent() < 64


def test_a_busy_server_is_waited_for(stores: Path) -> None:
    metrics = TransferMetrics()
    limits = ServingLimits(transfers_max=1, bytes_per_s=8e6)
    patient = Access(streams=4, range_bytes=1 << 18, retries=RetryLimits(give_up_s=30.0))
    with served(stores, limits=limits, metrics=metrics) as url:
        assert _read(_source(url, patient)) == (stores / "job-a" / SHARD).read_bytes()
    refused = metrics.registry.get_sample_value("weightsync_refused_total", {"reason": "busy"})
    assert refused is not None
    assert refused > 0


def _token_file(folder: Path, token: bytes = TOKEN) -> Path:
    path = folder / token.decode()
    path.touch(mode=0o600)
    path.write_bytes(token)
    return path


def _sending(token_file: Path | None) -> Access:
    return Access(token_file=token_file)


@pytest.mark.parametrize("sent", [None, b"another token entirely"])
def test_a_reader_without_the_token_gets_nothing(
    stores: Path, tmp_path: Path, sent: bytes | None
) -> None:
    given = None if sent is None else _token_file(tmp_path, sent)
    with (
        served(stores, tenants=Tenants.operators(_token_file(tmp_path))) as url,
        closing(_source(url, _sending(given))) as source,
        pytest.raises(ConfigError, match="token file"),
    ):
        source.latest()


def test_with_the_token_all_is_served_through_a_relay_too(stores: Path, tmp_path: Path) -> None:
    file = _token_file(tmp_path)
    with (
        served(stores, tenants=Tenants.operators(file)) as url,
        relayed(url, tmp_path / "cache", access=_sending(file)) as relay,
    ):
        assert _read(_source(url, _sending(file))) == _read(_source(relay))


@pytest.mark.parametrize(
    "path",
    [
        "/stores/..%2f..%2fetc/LATEST",
        "/stores/%2e%2e/LATEST",
        "/stores/.hidden/LATEST",
        "/stores/job-a/%2e%2e/LATEST",
        "/stores/job-a/weight_v000001/..%2f..%2fLATEST",
        "/stores/job-a/weight_v000001%2f../LATEST",
        "/stores/job-a/.tmp-weight_v000001/READY",
        "/stores/job-a/weight_v000001/.publisher-lock",
        "/stores/job-a/weight_v1/READY",
        "/stores/" + "x" * 65 + "/LATEST",
        "/stores/job-a%00/LATEST",
    ],
)
@pytest.mark.parametrize("through_relay", [False, True])
async def test_names_that_are_none_lead_nowhere(
    stores: Path, tmp_path: Path, path: str, through_relay: bool
) -> None:
    with served(stores) as url, relayed(url, tmp_path / "cache") as relay:
        port = int((relay if through_relay else url).rpartition(":")[2])
        # No client library tidies the path up before it is sent.
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            status = connection.recv(64).split()[1]
    assert status in {b"400", b"404"}


class WeightProcess:
    """`rosemux weights ...` in a process of its own."""

    def __init__(self, *arguments: str, descriptors: int = 1024) -> None:
        limited = f'ulimit -n {descriptors}; exec "$@"'
        command = [sys.executable, "-m", "harvester.cli", "weights", *arguments]
        self.process = subprocess.Popen(
            ["bash", "-c", limited, "bash", *command],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def end(self, number: int) -> int:
        os.kill(self.process.pid, number)
        status = self.process.wait(15)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture
def weight_process() -> Iterator[Callable[..., WeightProcess]]:
    started: list[WeightProcess] = []

    def start(*arguments: str, descriptors: int = 1024) -> WeightProcess:
        started.append(WeightProcess(*arguments, descriptors=descriptors))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.end(signal.SIGKILL)


def test_idle_connections_of_strangers_keep_no_reader_out(
    stores: Path, tmp_path: Path, weight_process: Callable[..., WeightProcess]
) -> None:
    """They had every descriptor of a server for over a minute, without a token."""
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    arguments = ("serve", str(stores), "--port", "0", "--token-file", str(token))
    server = weight_process(*arguments, descriptors=128)
    with ExitStack() as strangers:
        for _ in range(200):
            address = ("127.0.0.1", int(server.port))
            strangers.enter_context(socket.create_connection(address, timeout=5))
        assert len(_read(_source(server.url, replace(HASTY, token_file=token)))) > 2_000_000


def test_a_server_that_is_killed_and_started_again_is_read_on(
    stores: Path, weight_process: Callable[..., WeightProcess]
) -> None:
    first = weight_process("serve", str(stores), "--port", "0", "--max-mbit", "8")
    source = _source(first.url, Access(streams=2, range_bytes=1 << 18))
    raw = (stores / "job-a" / SHARD).read_bytes()
    into = bytearray(len(raw))
    reader = threading.Thread(target=fill, args=(source, SHARD, memoryview(into)))
    reader.start()
    while not any(into[-(1 << 18) : -1]) and not any(into[: 1 << 17]):
        reader.join(0.01)
    assert reader.is_alive()
    first.end(signal.SIGKILL)
    weight_process("serve", str(stores), "--port", first.port)
    reader.join(30)
    source.close()
    assert bytes(into) == raw


def test_a_relay_that_is_killed_believes_no_half_file(
    stores: Path, tmp_path: Path, weight_process: Callable[..., WeightProcess]
) -> None:
    raw, cache = (stores / "job-a" / SHARD).read_bytes(), tmp_path / "cache"
    slow = weight_process("serve", str(stores), "--port", "0", "--max-mbit", "8")
    arguments = ("relay", slow.url, "--cache", str(cache), "--port", "0")
    first = weight_process(*arguments)
    with closing(_source(first.url)) as source:
        reader = threading.Thread(target=_swallowing(source), daemon=True)
        reader.start()
        while not list(cache.glob("*/*.part")):
            reader.join(0.01)
        first.end(signal.SIGKILL)
    reader.join(30)
    assert list(cache.glob("*/*.part"))
    second = weight_process(*arguments)
    assert not list(cache.glob("[!.]*/*"))
    assert _read(_source(second.url)) == raw
    slow.end(signal.SIGKILL)
    assert len(list(cache.glob("[!.]*/*-*"))) == 1
    assert second.end(signal.SIGTERM) == 0


def _swallowing(source: HttpSource) -> Callable[[], None]:
    def read() -> None:
        with suppress(RoseMuxError):
            source.read_range(SHARD, 0, memoryview(bytearray(1 << 20)))

    return read


async def test_metrics_say_what_was_sent(stores: Path) -> None:
    with served(stores) as url:
        _read(_source(url))
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url}/metrics") as answer,
        ):
            text = await answer.text()
    size = (stores / "job-a" / SHARD).stat().st_size
    found = re.search(r'weightsync_sent_bytes_total\{store="job-a"\} (\S+)', text)
    assert found is not None
    assert float(found[1]) == size


def test_mutual_tls_serves_readers_and_relays_with_a_certificate_and_no_others(
    stores: Path,
    tmp_path: Path,
    weight_process: Callable[..., WeightProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = Authority(tmp_path)
    server, client = authority.signs("server"), authority.signs("client")
    mutual = (
        *("--host", "0.0.0.0", "--port", "0"),
        *("--cert", str(server.cert_file), "--key", str(server.key_file)),
        *("--client-ca", str(authority.file)),
    )
    first = weight_process("serve", str(stores), *mutual)
    url = f"https://127.0.0.1:{urlsplit(first.url).port}"
    shard = (stores / "job-a" / SHARD).read_bytes()
    files = {"ca_file": authority.file, "cert_file": client.cert_file, "key_file": client.key_file}
    assert _read(_source(url, Access(**files))) == shard
    stranger = Authority(tmp_path, "other").signs("stranger")
    others = {"cert_file": stranger.cert_file, "key_file": stranger.key_file}
    for given, fault, said in (
        ({}, ConfigError, "not trusted"),
        ({"ca_file": authority.file}, Exhausted, "require a client certificate"),
        ({"ca_file": authority.file, **others}, Exhausted, "require a client certificate"),
    ):
        hasty = Access(retries=RetryLimits(give_up_s=0.3), **given)
        with closing(_source(url, hasty)) as source, pytest.raises(fault, match=said):
            source.latest()
    for field, path in files.items():
        monkeypatch.setenv(VARIABLES[field], str(path))
    relay = weight_process("relay", url, "--cache", str(tmp_path / "cache"), "--port", "0")
    assert _read(_source(relay.url)) == shard


def test_a_server_at_an_address_is_known_by_the_name_in_its_certificate(
    stores: Path,
    tmp_path: Path,
    weight_process: Callable[..., WeightProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = Authority(tmp_path)
    server = authority.signs("server", "weights.rosemux.svc")
    tls = ("--cert", str(server.cert_file), "--key", str(server.key_file))
    url = weight_process("serve", str(stores), "--port", "0", *tls).url
    url = f"https://127.0.0.1:{urlsplit(url).port}"
    monkeypatch.setenv(VARIABLES["ca_file"], str(authority.file))
    for name in ("weights.rosemux.svc", "other.rosemux.svc"):
        monkeypatch.setenv(VARIABLES["server_name"], name)
        with closing(_source(url, Access.from_environment())) as source:
            if name.startswith("weights"):
                assert _read(source) == (stores / "job-a" / SHARD).read_bytes()
                continue
            with pytest.raises(ConfigError, match="not trusted"):
                source.latest()
    monkeypatch.setenv(VARIABLES["server_name"], "no/name")
    with pytest.raises(ConfigError, match=f"{VARIABLES['server_name']}: 'no/name'"):
        Access.from_environment()
