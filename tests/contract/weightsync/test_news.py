"""A follower that keeps up takes a small version by one answer, and believes no more of it than of
files that it asked for."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from benchmarks.weightsync.round_trips import delayed
from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import WeightVersion
from tests.weight_servers import HASTY, relayed, running, served
from weightsync.follower import Follower
from weightsync.layout.names import INDEX_FILE, READY_FILE
from weightsync.layout.tables import packed_table
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.serve import server as serving
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.served_stores import ServedFile, SourceStores
from weightsync.serve.server import WeightServer
from weightsync.transport.http_source import HttpSource
from weightsync.transport.location import StoreRoot
from weightsync.transport.wire import NEWS_TYPE, News, StoreVersions, latest_etag

SHARD = "model-00001-of-00001.safetensors"
TWO = WeightVersion(2)
ONE_LINE = b"weight_v000001\n"


def _state(step: int) -> dict[str, torch.Tensor]:
    # Its own: readers in threads would draw from a shared one by turns.
    own = torch.Generator().manual_seed(0)
    a, b = torch.randn(300, 200, generator=own), torch.randn(9, generator=own)
    state = {"a": a.bfloat16(), "b": b}
    state["a"][:step] *= 2
    return state


class Following:
    """A store with version 1, published from step 1, and a receiver that holds it over HTTP."""

    def __init__(self, root: Path, url: str, publisher: Publisher, requests: list[str]) -> None:
        self.files, self.publisher, self.requests = root, publisher, requests
        self.receiver = Receiver(HttpSource(f"{url}/stores/job-a", HASTY))
        self.held = {name: torch.zeros_like(tensor) for name, tensor in _state(1).items()}
        self.receiver.sync(None, WeightVersion(1), TensorTarget(self.held))

    def take(self, version: WeightVersion) -> None:
        found = self.receiver.newer(WeightVersion(version - 1), wait_s=10.0)
        assert found == version
        self.receiver.sync(WeightVersion(version - 1), version, TensorTarget(self.held))
        self.check(version)

    def check(self, step: int) -> None:
        assert all(torch.equal(self.held[name], tensor) for name, tensor in _state(step).items())


@pytest.fixture(params=["server", "relay"])
def following(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Following]:
    root = tmp_path / "stores" / "job-a"
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(root))
        publisher.publish(_state(1))
        url = stack.enter_context(served(root.parent))
        if request.param == "relay":
            url = stack.enter_context(relayed(url, tmp_path / "cache"))
        near, proxy = stack.enter_context(delayed(url))
        found = Following(root, near, publisher, proxy.requests)
        stack.callback(found.receiver.close)
        yield found


def test_a_small_version_takes_one_request(following: Following) -> None:
    for version in (2, 3, 4):
        following.publisher.publish(_state(version))
        before = len(following.requests)
        following.take(WeightVersion(version))
        assert following.requests[before:] == ["GET /stores/job-a/LATEST"]


def test_a_directory_follows_by_one_request_and_a_look(
    following: Following, tmp_path: Path
) -> None:
    with Follower(following.receiver, tmp_path / "held") as follower:
        follower.pull()
        following.publisher.publish(_state(2))
        before = len(following.requests)
        found = follower.newer(wait_s=10.0)
        assert follower.pull(found).version == TWO
        assert following.requests[before:] == ["GET /stores/job-a/LATEST"]


def test_latest_is_asked_for_each_time(following: Following) -> None:
    for version in (2, 3, 4):
        following.publisher.publish(_state(version))
        assert following.receiver.latest() == version


def test_a_version_beyond_the_bound_is_read_by_ranges(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_NEWS_BYTES", 100)
    following.publisher.publish(_state(2))
    following.take(TWO)
    assert f"GET /stores/job-a/weight_v000002/{SHARD}" in following.requests


def test_wrong_bytes_in_the_news_are_asked_for_again(following: Following) -> None:
    following.publisher.publish(_state(2))
    shard = following.files / "weight_v000002" / SHARD
    raw = shard.read_bytes()
    source = following.receiver._store.source
    assert isinstance(source, HttpSource)
    assert following.receiver.newer(WeightVersion(1), wait_s=10.0) == TWO
    path = f"weight_v000002/{SHARD}"
    assert source._news.files[path] == raw
    source._news.files[path] = raw[:-1] + bytes([raw[-1] ^ 1])
    following.receiver.sync(WeightVersion(1), TWO, TensorTarget(following.held))
    following.check(2)
    assert f"GET /stores/job-a/{path}" in following.requests


def test_a_version_that_is_not_ready_is_no_news(tmp_path: Path) -> None:
    with Publisher(tmp_path / "job-a") as publisher:
        publisher.publish(_state(1))
    version = tmp_path / "job-a" / "weight_v000001"

    def news_now(latest: bytes = b"weight_v000001\n") -> bytes | None:
        async def read() -> bytes | None:
            served = SourceStores(StoreRoot(tmp_path))
            try:
                return await serving.news_of(served, "job-a", latest)
            finally:
                await served.close()

        return asyncio.run(read())

    whole = news_now()
    assert whole is not None
    found = msgspec.msgpack.decode(whole, type=News)
    assert found.files == {
        f"weight_v000001/{name}": (version / name).read_bytes()
        for name in (INDEX_FILE, SHARD, READY_FILE)
    }
    assert news_now(b"../other\n") is None
    (version / READY_FILE).unlink()
    assert news_now() is None
    (version / READY_FILE).touch()
    (tmp_path / "secret").write_bytes(b"not served")
    index = json.loads((version / INDEX_FILE).read_bytes())
    index["rosemux"]["files"]["../../secret"] = next(iter(index["rosemux"]["files"].values()))
    (version / INDEX_FILE).write_text(json.dumps(index))
    assert news_now() is None
    index["rosemux"]["files"].pop("../../secret")
    plain = json.dumps(index).encode()
    (version / INDEX_FILE).write_bytes(packed_table(plain))
    assert news_now() is not None
    (version / INDEX_FILE).write_bytes(packed_table(plain + b" " * (16 << 20)))
    assert news_now() is None


class Failing(SourceStores):
    """No file can be read: at once, or ever."""

    silent = False

    @asynccontextmanager
    async def open(self, store: str, path: str, *, doubted: bool) -> AsyncIterator[ServedFile]:
        if not self.silent:
            raise OSError(errno.EIO, "Input/output error")
        await asyncio.sleep(60)
        async with super().open(store, path, doubted=doubted) as file:
            yield file


@pytest.mark.parametrize("silent", [False, True])
async def test_files_that_cannot_be_read_hold_no_news_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(serving, "_NEWS_WITHIN_S", 0.05)
    failing = Failing(StoreRoot(tmp_path))
    failing.silent = silent
    assert await serving.news_of(failing, "job-a", b"weight_v000001\n") is None
    await failing.close()


@contextmanager
def _answering(
    latest: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> Iterator[HttpSource]:
    """A source whose server has this LATEST."""

    def app() -> tuple[web.Application, None]:
        made = web.Application()
        made.add_routes([web.get("/stores/job-a/LATEST", latest)])
        return made, None

    with running(app) as url, closing(HttpSource(f"{url}/stores/job-a", HASTY)) as source:
        yield source


NO_VERSIONS = StoreVersions(())


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"\xc1", "news that cannot be read"),
        (News(b"9" * 65, NO_VERSIONS, {}), "more than one version"),
        (News(b"weight_v000002\n", NO_VERSIONS, {"weight_v000003/READY": b""}), "more than one"),
    ],
)
def test_other_news_are_an_error_of_the_server(body: bytes | News, error: str) -> None:
    async def latest(_: web.Request) -> web.Response:
        sent = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        return web.Response(body=sent, content_type=NEWS_TYPE)

    with _answering(latest) as source, pytest.raises(PeerProtocolError, match=error):
        source.latest(ONE_LINE, wait_s=5.0)


def test_news_that_were_cut_are_not_asked_for_again() -> None:
    accepted: list[bool] = []

    async def latest(request: web.Request) -> web.StreamResponse:
        accepted.append(NEWS_TYPE in request.headers.get("Accept", ""))
        if not accepted[-1]:
            return web.Response(body=b"weight_v000002\n")
        response = web.StreamResponse()
        response.content_type, response.content_length = NEWS_TYPE, 1 << 20
        if len(accepted) > 1:  # Broken before an answer, as an idle connection may be, it is again.
            await response.prepare(request)
            await response.write(bytes(100))
        assert request.transport is not None
        request.transport.abort()
        return response

    with _answering(latest) as source:
        assert source.latest(ONE_LINE, wait_s=5.0) == b"weight_v000002\n"
        assert accepted == [True, True, False]
        # A caller that does not wait may take another version, or a part of one.
        source.latest(ONE_LINE)
        assert accepted == [True, True, False, False]


def test_unread_news_are_dropped(following: Following) -> None:
    following.publisher.publish(_state(2))
    source = following.receiver._store.source
    assert isinstance(source, HttpSource)
    assert following.receiver.newer(WeightVersion(1), wait_s=10.0) == TWO
    assert source._news.files
    source._news_until_s = 0.0
    assert following.receiver.newer(TWO, wait_s=0.05) is None
    assert not source._news.files


class Gathering(SourceStores):
    """Opens no file before `readers` have asked for LATEST."""

    def __init__(self, root: Path, readers: int) -> None:
        super().__init__(StoreRoot(root))
        self._readers, self._gathered = readers, asyncio.Event()
        self.opened: list[str] = []

    async def latest(self, store: str, known: bytes | None, *, wait_s: float) -> bytes | None:
        self._readers -= 1
        if not self._readers:
            self._gathered.set()
        return await super().latest(store, known, wait_s=wait_s)

    @asynccontextmanager
    async def open(self, store: str, path: str, *, doubted: bool) -> AsyncIterator[ServedFile]:
        await self._gathered.wait()
        self.opened.append(path)
        async with super().open(store, path, doubted=doubted) as file:
            yield file


async def test_followers_share_news_in_pieces_that_no_cache_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(tmp_path / "job-a") as publisher:
        publisher.publish({"a": torch.randint(0, 256, (700 << 10,), dtype=torch.uint8)})
    pieces: list[int] = []
    write = web.StreamResponse.write

    async def counted(self: web.StreamResponse, data: bytes) -> None:
        pieces.append(len(data))
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", counted)
    gathering = Gathering(tmp_path, 8)
    asking = {"Accept": NEWS_TYPE}
    async with TestClient(TestServer(WeightServer(gathering).app())) as client:

        async def body() -> bytes:
            async with client.get("/stores/job-a/LATEST", headers=asking) as answer:
                assert answer.content_type == NEWS_TYPE
                assert answer.headers["Vary"] == "Accept"
                assert answer.headers["Cache-Control"] == "no-store"
                assert "ETag" not in answer.headers
                return await answer.read()

        first, *rest = await asyncio.gather(*(body() for _ in range(8)))
        assert all(each == first for each in rest)
        assert len(gathering.opened) == 3
        assert max(pieces) <= 256 << 10
        assert sum(pieces) == 8 * len(first)
        async with client.head("/stores/job-a/LATEST", headers=asking) as answer:
            assert answer.content_type == "text/plain"
        for known, status in ((None, 200), ({"If-None-Match": latest_etag(ONE_LINE)}, 304)):
            async with client.get("/stores/job-a/LATEST", headers=known) as answer:
                assert (answer.status, answer.headers["Vary"]) == (status, "Accept")
    await gathering.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_relay_s_link_carries_a_version_once(tmp_path: Path, waits: bool) -> None:
    root, metrics = tmp_path / "stores" / "job-a", TransferMetrics()
    one = WeightVersion(1)
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(root))
        publisher.publish(_state(1))
        url = stack.enter_context(served(root.parent, metrics=metrics))
        near = stack.enter_context(relayed(url, tmp_path / "cache"))
        pool = stack.enter_context(ThreadPoolExecutor(6))
        readers = [Receiver(HttpSource(f"{near}/stores/job-a", HASTY)) for _ in range(6)]
        for reader in readers:
            stack.callback(reader.close)

        def take(reader: Receiver, held: dict[str, torch.Tensor]) -> None:
            if waits:
                assert reader.newer(one, wait_s=10.0) == TWO
            reader.sync(one, TWO, TensorTarget(held))
            assert all(torch.equal(held[name], tensor) for name, tensor in _state(2).items())

        models = [_state(0) for _ in readers]
        for reader, held in zip(readers, models, strict=True):
            reader.sync(None, one, TensorTarget(held))
        sent = metrics.sent.labels("job-a")
        before = sent._value.get()
        taking = pool.map(take, readers, models) if waits else None
        size = publisher.publish(_state(2)).bytes_sent
        list(taking or pool.map(take, readers, models))
        assert size <= sent._value.get() - before < 3 * size
