"""Whatever keeps a store, it is read alike: one suite for every source."""

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from aiohttp import web
from fsspec.implementations.local import LocalFileSystem

from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion
from harvester.platform.backoff import RetryLimits
from tests.weight_servers import HASTY, fill, relayed, running, served
from weightsync.follower import Follower
from weightsync.layout.names import INDEX_FILE, READY_FILE
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.reading.spool import Spool
from weightsync.reading.store import Store
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.directory import DirectorySource
from weightsync.transport.http_source import HttpSource
from weightsync.transport.location import StoreRoot, source_at
from weightsync.transport.objects import ObjectStore
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import StoreSource

SHARD_FILE = "model-00001-of-00001.safetensors"
SHARD = f"weight_v000001/{SHARD_FILE}"
State = dict[str, torch.Tensor]


def _states() -> list[State]:
    torch.manual_seed(0)
    first = {"a": torch.randn(500, 700).bfloat16(), "b": torch.randn(9), "c": torch.ones(4)}
    run = [first]
    for step in range(1, 4):
        changed = {name: tensor.clone() for name, tensor in run[-1].items()}
        changed["a"][step::17] *= 1.5
        run.append(changed)
    return run


@dataclass(frozen=True, slots=True)
class Place:
    """A store that some source reads, and how its files are changed behind it."""

    source: StoreSource
    write: Callable[[str, bytes | None], None]
    """Replaces a file at once, or removes it."""
    files: Path
    """The same store as a directory, as it was published."""

    def raw(self, path: str) -> bytes:
        return (self.files / path).read_bytes()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 to 4, anchors beside 3."""
    root = tmp_path_factory.mktemp("published") / "job-a"
    with Publisher(root, versions=VersionSettings(anchor_every=2)) as publisher:
        for state in _states():
            publisher.publish(state)
    return root


KINDS = ["directory", "memory", "file", "http", "relay", "relay of a relay"]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, published: Path, tmp_path: Path) -> Iterator[Place]:
    files = tmp_path / "stores" / "job-a"
    shutil.copytree(published, files)

    def write(path: str, raw: bytes | None) -> None:
        if raw is None:
            (files / path).unlink()
        else:
            (tmp_path / "new").write_bytes(raw)
            (tmp_path / "new").replace(files / path)

    with ExitStack() as stack:
        if request.param == "directory":
            source: StoreSource = DirectorySource(files)
        elif request.param == "file":
            source = ObjectStore(f"file://{files}")
        elif request.param == "memory":
            memory = fsspec.filesystem("memory")
            memory.put(str(files), "/bucket/job-a", recursive=True)
            stack.callback(memory.rm, "/bucket", recursive=True)
            source = ObjectStore("memory://bucket/job-a")

            def write(path: str, raw: bytes | None) -> None:
                if raw is None:
                    memory.rm(f"/bucket/job-a/{path}")
                else:
                    memory.pipe_file(f"/bucket/job-a/{path}", raw)

        else:
            url = stack.enter_context(served(files.parent))
            for hop in range(request.param.count("relay")):
                url = stack.enter_context(relayed(url, tmp_path / f"cache{hop}"))
            source = HttpSource(f"{url}/stores/job-a", HASTY)
        stack.callback(source.close)
        yield Place(source, write, published)


def test_every_version_is_listed(place: Place) -> None:
    names = {name for name in place.source.directories() if "_v" in name}
    assert names == {path.name for path in place.files.iterdir() if path.is_dir()}


def test_latest_is_the_file_as_it_is_now(place: Place) -> None:
    assert place.source.latest() == b"weight_v000004\n"
    place.write("LATEST", b"weight_v000003\n")
    assert place.source.latest() == b"weight_v000003\n"


def test_waiting_for_a_newer_version_ends_when_there_is_one(place: Place) -> None:
    found: list[bytes | None] = []
    waiter = threading.Thread(
        target=lambda: found.append(place.source.latest(b"weight_v000004\n", wait_s=20.0))
    )
    waiter.start()
    place.write("LATEST", b"weight_v000005\n")
    waiter.join(15)
    assert found == [b"weight_v000005\n"]


def test_waiting_ends_without_a_newer_version(place: Place) -> None:
    assert place.source.latest(b"weight_v000004\n", wait_s=0.05) == b"weight_v000004\n"


def test_small_files_are_whole_or_refused(place: Place) -> None:
    path = f"weight_v000002/{INDEX_FILE}"
    raw = place.raw(path)
    assert place.source.read_small(path, len(raw)) == raw
    assert place.source.read_small(f"weight_v000002/{READY_FILE}", 10) == b""
    with pytest.raises(Corrupt, match="over the limit"):
        place.source.read_small(path, len(raw) - 1)


@pytest.mark.parametrize("start", [0, 1, 100_000, 699_000])
@pytest.mark.parametrize("size", [1, 8, 1000])
def test_a_range_holds_the_file_s_bytes(place: Place, start: int, size: int) -> None:
    into = bytearray(size)
    place.source.read_range(SHARD, start, memoryview(into))
    assert bytes(into) == place.raw(SHARD)[start : start + size]


def test_a_whole_file_is_read_by_several_at_once(place: Place) -> None:
    raw = place.raw(SHARD)
    assert place.source.size_bytes(SHARD) == len(raw)

    def read(_: int) -> bytes:
        into = bytearray(len(raw))
        fill(place.source, SHARD, memoryview(into))
        return bytes(into)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(read, range(4))) == {raw}


def test_a_range_beyond_the_end_is_corrupt(place: Place) -> None:
    size = place.source.size_bytes(SHARD)
    for start in (size - 1, size, size + 10):
        with pytest.raises(Corrupt):
            place.source.read_range(SHARD, start, memoryview(bytearray(2)))


def test_a_missing_file_is_not_found(place: Place) -> None:
    with pytest.raises(FileNotFoundError):
        place.source.size_bytes("weight_v000009/READY")
    with pytest.raises(FileNotFoundError):
        place.source.read_small(f"weight_v000009/{INDEX_FILE}", 1000)
    with pytest.raises(FileNotFoundError):
        place.source.read_range(f"weight_v000009/{SHARD_FILE}", 0, memoryview(bytearray(8)))


@pytest.mark.parametrize("start", [None, 1, 3])
def test_a_receiver_ends_on_the_published_state(place: Place, start: int | None) -> None:
    states = _states()
    held = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    receiver = Receiver(place.source)
    assert receiver.latest() == 4
    current = None
    if start is not None:
        current = receiver.sync(None, WeightVersion(start), TensorTarget(held)).version
    receiver.sync(current, WeightVersion(4), TensorTarget(held))
    assert all(torch.equal(held[name], states[3][name]) for name in held)


def test_a_shard_that_is_mended_is_read_again(place: Place) -> None:
    raw = bytearray(place.raw(SHARD))
    raw[300_000] ^= 1
    place.write(SHARD, bytes(raw))
    store = Store(place.source)
    ref = next(ref for ref in store.refs() if ref.directory == "weight_v000001")
    manifest = store.manifest(ref)
    spool = Spool(MemoryBudget(1 << 20))

    def copied() -> bytes:
        copy = store.shard(ref, manifest, SHARD_FILE, spool, lent_bytes=1 << 20)
        copy.fetch()
        return copy.staged.read(ByteSpan(0, len(raw))).tobytes()

    with pytest.raises(Corrupt, match=r"digest|published file"):
        copied()
    place.write(SHARD, place.raw(SHARD))
    assert copied() == place.raw(SHARD)


def test_a_version_without_its_mark_is_refused(place: Place) -> None:
    place.write(f"weight_v000004/{READY_FILE}", None)
    with pytest.raises(Corrupt, match="READY"):
        Receiver(place.source).plan(None, WeightVersion(4))


def test_a_version_of_another_system_is_read_through_relays(tmp_path: Path) -> None:
    state, directory = _states()[0], tmp_path / "stores" / "foreign" / "weight_v000001"
    directory.mkdir(parents=True)
    safetensors.torch.save_file(state, directory / SHARD_FILE)
    index = {"metadata": {"version": "1"}, "weight_map": dict.fromkeys(state, SHARD_FILE)}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    (directory.parent / "LATEST").write_text("weight_v000001")
    with (
        served(tmp_path / "stores") as url,
        relayed(url, tmp_path / "near") as near,
        relayed(near, tmp_path / "nearer") as nearer,
        closing(Receiver(HttpSource(f"{nearer}/stores/foreign", HASTY))) as receiver,
    ):
        held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        receiver.sync(None, WeightVersion(1), TensorTarget(held))
    assert all(torch.equal(held[name], state[name]) for name in state)


def test_a_store_that_was_made_anew_is_not_mistaken_for_the_old_one(tmp_path: Path) -> None:
    first, _, _, last = _states()
    root = tmp_path / "stores" / "job-a"
    root.parent.mkdir()
    with served(root.parent) as url, relayed(url, tmp_path / "cache") as relay:
        for state in (first, last):
            shutil.rmtree(root, ignore_errors=True)
            with Publisher(root) as publisher:
                publisher.publish(state)
            held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            with closing(Receiver(HttpSource(f"{relay}/stores/job-a", HASTY))) as receiver:
                receiver.sync(None, WeightVersion(1), TensorTarget(held))
            assert all(torch.equal(held[name], state[name]) for name in state)


def test_a_receiver_hears_of_the_next_version(tmp_path: Path) -> None:
    states, root = _states(), tmp_path / "stores" / "job-a"
    with Publisher(root) as publisher, served(root.parent) as url:
        publisher.publish(states[0])
        with closing(Receiver(HttpSource(f"{url}/stores/job-a", HASTY))) as receiver:
            assert receiver.newer(None, wait_s=5.0) == 1
            assert receiver.newer(WeightVersion(1), wait_s=0.05) is None
            publishing = threading.Thread(target=publisher.publish, args=(states[1],))
            publishing.start()
            assert receiver.newer(WeightVersion(1), wait_s=20.0) == 2
            publishing.join()


def test_a_follower_waits_at_a_server_and_polls_other_stores_once(
    place: Place, tmp_path: Path
) -> None:
    with (
        closing(Receiver(place.source)) as receiver,
        Follower(receiver, tmp_path / "held") as follower,
    ):
        assert follower.newer(wait_s=20.0) == 4
        follower.pull()
        assert follower.newer(wait_s=0.05) is None
        found: list[WeightVersion | None] = []
        waiter = threading.Thread(target=lambda: found.append(follower.newer(wait_s=20.0)))
        waiter.start()
        if not follower.announces:
            waiter.join(15)
        place.write("LATEST", b"weight_v000005\n")
        waiter.join(15)
    assert found == [5 if isinstance(place.source, HttpSource) else None]


async def test_a_server_that_holds_no_question_back_is_looked_at_again(tmp_path: Path) -> None:
    async def latest(_: web.Request) -> web.Response:
        return web.Response(body=b"weight_v000001\n")

    def app() -> tuple[web.Application, None]:
        plain = web.Application()
        plain.add_routes([web.get("/stores/job-a/LATEST", latest)])
        return plain, None

    def asked(url: str) -> tuple[bool, bool]:
        with closing(HttpSource(f"{url}/stores/job-a", HASTY)) as source:
            before = source.announces
            source.latest(b"weight_v000001\n", wait_s=0.3)
            return before, source.announces

    with running(app) as url:
        assert await asyncio.to_thread(asked, url) == (True, False)


def test_the_indexes_of_a_chain_are_read_at_once(published: Path) -> None:
    """Each of the first two waits for the other; one after another they would wait for ever."""

    class Remote(DirectorySource):
        streams = 2
        both = threading.Barrier(2)

        def read_small(self, path: str, limit_bytes: int) -> bytes:
            if path in {f"weight_v00000{version}/{INDEX_FILE}" for version in (2, 3)}:
                self.both.wait(20)
            return super().read_small(path, limit_bytes)

    with closing(Receiver(Remote(published))) as receiver:
        (published / "anchor_v000003").rename(published / "hidden")
        try:
            plan = receiver.plan(WeightVersion(1), WeightVersion(3))
        finally:
            (published / "hidden").rename(published / "anchor_v000003")
    assert [step.ref.version for step in plan.steps] == [2, 3]


def test_an_implementation_that_is_not_installed_says_which() -> None:
    with pytest.raises(ConfigError, match="s3fs"):
        source_at("s3://bucket/job-a")


def test_without_fsspec_an_object_store_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"pip install 'rosemux\[weights\]'"):
        source_at("memory://bucket/job-a")


def test_a_place_lists_its_stores(published: Path, tmp_path: Path) -> None:
    root = published.parent
    with served(root) as url, relayed(url, tmp_path / "cache") as near:
        for place in (root, str(root), f"file://{root}", url, near):
            assert StoreRoot(place, HASTY).names() == ("job-a",), place
            with closing(Store(StoreRoot(place, HASTY).store("job-a"))) as store:
                assert store.latest() == 4


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("linked", [SHARD, f"weight_v000001/{INDEX_FILE}", "weight_v000001"])
def test_a_server_follows_no_link_of_a_tenant_s_out_of_its_store(
    linked: str, scheme: str, published: Path, tmp_path: Path
) -> None:
    path = SHARD if linked == "weight_v000001" else linked
    files = shutil.copytree(published, tmp_path / "disk" / "job-a")
    (tmp_path / "stores").mkdir()
    # The operator's own link to where a store lies is followed, and links within the store.
    (tmp_path / "stores" / "job-a").symlink_to(files)
    (files / linked).rename(files / "moved")
    (files / linked).symlink_to(files / "moved")
    with (
        served(f"{scheme}{tmp_path}/stores") as url,
        closing(HttpSource(f"{url}/stores/job-a", HASTY)) as source,
    ):
        assert source.read_small(path, 9 << 20) == (published / path).read_bytes()
        (files / "moved").rename(tmp_path / "secret")
        (files / linked).unlink()
        (files / linked).symlink_to(tmp_path / "secret")
        with pytest.raises(Corrupt, match="out of the store"):
            source.read_small(path, 9 << 20)
        (files / "LATEST").rename(tmp_path / "token")
        (files / "LATEST").symlink_to(tmp_path / "token")
        with pytest.raises(Corrupt, match="out of the store"):
            source.latest()
    with closing(source_at(files)) as source:
        assert source.read_small(path, 9 << 20) == (published / path).read_bytes()


def test_a_place_without_a_store_tells_the_user_to_publish(published: Path, tmp_path: Path) -> None:
    with served(published.parent) as url:
        for place in (
            f"{url}/stores/job-b",
            f"{url}/elsewhere",
            f"file://{tmp_path}/job-b",
            "memory://nothing/here",
        ):
            with (
                closing(Store(place)) as store,
                pytest.raises(ConfigError, match=r"publish a version"),
            ):
                store.refs()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://bucket/job", "give a directory"),
        ("http:///stores/a", "use http"),
        ("http://me:secret@host/stores/a", "token file"),
    ],
)
def test_a_url_that_cannot_be_opened_says_what_would(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source_at(url)


def test_a_failing_object_store_is_retried_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch, published: Path
) -> None:
    source = ObjectStore(
        f"file://{published}", retries=RetryLimits(attempts_max=3, first_wait_s=0.001)
    )
    asked = 0

    def failing(*_: object, **__: object) -> bytes:
        nonlocal asked
        asked += 1
        raise OSError("throttled")

    monkeypatch.setattr(LocalFileSystem, "cat_file", failing)
    with pytest.raises(Exception, match="throttled; gave up"):
        source.read_range(SHARD, 0, memoryview(bytearray(8)))
    assert asked == 3
