"""A follower that keeps up takes a small version by one answer, and believes no more of it than of
files that it asked for."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
import torch
from aiohttp import web

from benchmarks.weightsync.round_trips import delayed
from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import WeightVersion
from tests.weight_servers import HASTY, relayed, running, served
from weightsync.follower import Follower
from weightsync.layout.names import INDEX_FILE, READY_FILE
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.serve import news
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.served_stores import ServedFile, SourceStores
from weightsync.transport.http_source import HttpSource
from weightsync.transport.location import StoreRoot
from weightsync.transport.wire import NEWS_TYPE, News

SHARD = "model-00001-of-00001.safetensors"
TWO = WeightVersion(2)


def _state(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {"a": torch.randn(300, 200).bfloat16(), "b": torch.randn(9)}
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
    monkeypatch.setattr(news, "MAX_NEWS_BYTES", 100)
    following.publisher.publish(_state(2))
    following.take(TWO)
    assert f"GET /stores/job-a/weight_v000002/{SHARD}" in following.requests


def test_wrong_bytes_in_the_news_are_asked_for_again(following: Following) -> None:
    following.publisher.publish(_state(2))
    shard = following.files / "weight_v000002" / SHARD
    raw = shard.read_bytes()
    source = following.receiver._store._source
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
                return await news.news_of(served, "job-a", latest)
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
    monkeypatch.setattr(news, "_WITHIN_S", 0.05)
    failing = Failing(StoreRoot(tmp_path))
    failing.silent = silent
    assert await news.news_of(failing, "job-a", b"weight_v000001\n") is None
    await failing.close()


def test_news_that_cannot_be_read_are_an_error_of_the_server() -> None:
    async def latest(_: web.Request) -> web.Response:
        return web.Response(body=b"\xc1", content_type=NEWS_TYPE)

    def app() -> tuple[web.Application, None]:
        torn = web.Application()
        torn.add_routes([web.get("/stores/job-a/LATEST", latest)])
        return torn, None

    with (
        running(app) as url,
        closing(HttpSource(f"{url}/stores/job-a", HASTY)) as source,
        pytest.raises(PeerProtocolError, match="news that cannot be read"),
    ):
        source.latest(b"weight_v000001\n")


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
