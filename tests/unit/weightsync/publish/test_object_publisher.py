"""Publishing to object stores: no lock, no rename, and still every version whole or not at all."""

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import fsspec
import fsspec.config
import pytest
import torch

from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError, RoseMuxError
from harvester.contracts.ids import WeightVersion
from harvester.platform.backoff import RetryLimits
from tests import frail_objects
from tests.frail_objects import Bucket, Killed
from tests.weight_servers import relayed
from weightsync.layout.adapter import FULL_SHARD_FILE, Adapter, Base
from weightsync.publish.object_writer import WritableObjectStore
from weightsync.publish.settings import ExchangeSettings, VersionSettings, WorkSettings
from weightsync.publish.store_writer import store_name, writable_store
from weightsync.publisher import Published, Publisher
from weightsync.reading.store import Store
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.objects import ObjectStore

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
HASTY = RetryLimits(give_up_s=5.0, attempts_max=8, first_wait_s=0.0005, wait_max_s=0.001)
URL = "frail://bucket/job-a"


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    frail_objects.buckets["bucket"] = Bucket()
    yield frail_objects.buckets["bucket"]
    del frail_objects.buckets["bucket"]


@pytest.fixture(params=["frail", "memory", "file"])
def url(
    request: pytest.FixtureRequest,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """The same rules over three file systems; a local one may make directories by itself here."""
    if request.param == "frail":
        yield URL
    elif request.param == "memory":
        yield "memory://bucket/job-a"
        fsspec.filesystem("memory").rm("/bucket", recursive=True)
    else:
        monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})
        yield f"file://{tmp_path}/store"


def publisher(url: str = URL, **options: Any) -> Publisher:
    return Publisher(WritableObjectStore(url, streams=3, retries=HASTY), **options)


def received(url: str, version: int, like: State) -> State:
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    with closing(Receiver(url)) as receiver:
        receiver.sync(None, WeightVersion(version), TensorTarget(held))
    return held


def latest(url: str = URL) -> int:
    with closing(Store(url)) as store:
        return store.latest() or 0


def versions(bucket: Bucket) -> set[str]:
    return {path.split("/")[2] for path in bucket.objects if path.count("/") == 3}


def test_every_version_is_exact_and_followed(
    url: str, states: tuple[State, ...], blank: State, same: Same
) -> None:
    done: list[Published] = []
    current = None
    with (
        publisher(
            url, versions=VersionSettings(anchor_every=4), work=WorkSettings(shard_bytes=200)
        ) as publishing,
        closing(Receiver(url)) as receiver,
    ):
        for state in states[:8]:
            done.append(publishing.publish(state))
            current = receiver.sync(current, done[-1].version, TensorTarget(blank)).version
            assert same(blank, state)
    assert [step.version for step in done] == list(range(1, 9))
    assert [step.is_full for step in done] == [True] + [False] * 7
    assert [step.bytes_anchor > 0 for step in done] == [False] * 4 + [True] + [False] * 3
    for version in range(1, 9):
        assert same(received(url, version, states[0]), states[version - 1])


def test_an_object_store_holds_what_a_directory_holds(
    bucket: Bucket, tmp_path: Path, states: tuple[State, ...]
) -> None:
    with publisher() as objects, Publisher(tmp_path) as directory:
        for state in states[:3]:
            one, two = objects.publish(state), directory.publish(state)
            assert one.state_hash == two.state_hash
    for kind in ("full", "delta"):
        path = f"weight_v00000{1 if kind == 'full' else 3}"
        (ours,) = [
            raw
            for name, raw in bucket.objects.items()
            if path in name and name.endswith(".safetensors")
        ]
        (theirs,) = (tmp_path / path).glob("*.safetensors")
        assert ours == theirs.read_bytes()


def test_a_large_full_version_is_several_files_at_once(
    bucket: Bucket, states: tuple[State, ...], same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.publish.object_writer.ObjectDraft.full_file_bytes", 2000)
    with publisher() as publishing:
        publishing.publish(states[0])
    shards = [path for path in bucket.objects if path.endswith(".safetensors")]
    assert len(shards) > 1
    assert same(received(URL, 1, states[0]), states[0])


def test_old_versions_go_and_a_quota_is_kept(
    bucket: Bucket, states: tuple[State, ...], same: Same
) -> None:
    with publisher(versions=VersionSettings(anchor_every=3, keep_versions=4)) as publishing:
        for state in states:
            publishing.publish(state)
    assert min(versions(bucket)) == "anchor_v000007"
    assert "weight_v000006" not in versions(bucket)
    for version in range(9, 13):
        assert same(received(URL, version, states[0]), states[version - 1])
    full = sum(len(raw) for path, raw in bucket.objects.items() if "anchor_v000010" in path)
    bucket.objects.clear()
    with publisher(versions=VersionSettings(anchor_every=3, max_bytes=3 * full)) as publishing:
        for state in states[:9]:
            publishing.publish(state)
            assert sum(map(len, bucket.objects.values())) <= 3 * full + 1000
    assert same(received(URL, 9, states[0]), states[8])
    before = dict(bucket.objects)
    with (
        publisher(versions=VersionSettings(max_bytes=full)) as publishing,
        pytest.raises(Exhausted, match="max_bytes="),
    ):
        publishing.publish(states[9])
    changed = {p for p, raw in bucket.objects.items() if before.get(p) != raw} - {_OWNER}
    assert not changed
    assert before.keys() == bucket.objects.keys()


_OWNER = "bucket/job-a/.publisher"


@pytest.mark.parametrize("copy_lasts", [True, False])
def test_a_kill_at_any_call_leaves_the_version_before_whole(
    bucket: Bucket, tmp_path: Path, states: tuple[State, ...], same: Same, copy_lasts: bool
) -> None:
    """A publish of several files that also writes an anchor and deletes an old version."""
    options = {"versions": VersionSettings(anchor_every=2, keep_versions=1)}
    with publisher(work=WorkSettings(shard_bytes=200), **options) as publishing:
        for state in states[:2]:
            publishing.publish(state)
        first = bucket.calls
        publishing.publish(states[2])
    for call in range(1, bucket.calls - first + 1):
        bucket.objects.clear()
        copy_dir = tmp_path / f"copy-{call}" if copy_lasts else None
        work = WorkSettings(shard_bytes=200, copy_dir=copy_dir)
        publishing = publisher(work=work, **options)
        for state in states[:2]:
            publishing.publish(state)
        bucket.before = _at(bucket.calls + call, Killed())
        with suppress(Killed), publishing:
            publishing.publish(states[2])
        bucket.before, bucket.is_dead = _nothing, False
        found = latest()
        assert found in {2, 3}
        assert same(received(URL, found, states[0]), states[found - 1])
        with publisher(work=work, **options) as successor:
            step = successor.publish(states[3])
        assert step.version > found
        assert step.is_full != copy_lasts
        assert same(received(URL, step.version, states[0]), states[3])
        _check_nothing_is_half(bucket)


def _nothing(number: int, call: str) -> None:
    """No fault."""


def _at(wanted: int, error: BaseException) -> Callable[[int, str], None]:
    def before(number: int, call: str) -> None:
        if number == wanted:
            raise error

    return before


def _check_nothing_is_half(bucket: Bucket) -> None:
    """Each version has its mark and its index, and no shard that the index does not name."""
    for version in versions(bucket):
        files = {path.split("/")[3] for path in bucket.objects if f"/{version}/" in path}
        index = bucket.objects[f"bucket/job-a/{version}/model.safetensors.index.json"]
        assert "READY" in files
        assert all(f.encode() in index for f in files if f.endswith(".safetensors")), version


@pytest.mark.parametrize("seed", range(8))
def test_calls_that_fail_now_and_then_are_made_again(
    bucket: Bucket, states: tuple[State, ...], same: Same, seed: int
) -> None:
    """One change in twelve fails."""
    chance = random.Random(seed)

    def before(number: int, call: str) -> None:
        if chance.random() < 1 / 12:
            raise TimeoutError("the store did not answer")

    bucket.before = before
    with publisher(
        versions=VersionSettings(anchor_every=3), work=WorkSettings(shard_bytes=200)
    ) as publishing:
        for state in states[:6]:
            publishing.publish(state)
    for version in range(1, 7):
        assert same(received(URL, version, states[0]), states[version - 1])
    _check_nothing_is_half(bucket)


def test_a_put_whose_answer_is_lost_is_not_taken_for_another_s(
    bucket: Bucket, states: tuple[State, ...], same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = frail_objects.FrailObjects.pipe_file
    lost = iter(range(100))

    def put(self: Any, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        real(self, path, value, mode)
        if next(lost) % 2 == 0:
            raise TimeoutError("no answer")

    monkeypatch.setattr(frail_objects.FrailObjects, "pipe_file", put)
    with publisher() as publishing:
        for state in states[:3]:
            publishing.publish(state)
    assert same(received(URL, 3, states[0]), states[2])


@pytest.mark.parametrize("call", ["part", "close", "put"])
def test_a_store_that_is_gone_is_exhausted_and_changes_nothing(
    bucket: Bucket, states: tuple[State, ...], same: Same, call: str
) -> None:
    def before(_: int, made: str) -> None:
        if made == call:
            raise OSError("connection refused")

    with publisher(work=WorkSettings(shard_bytes=200)) as publishing:
        publishing.publish(states[0])
        bucket.before = before
        with pytest.raises(Exhausted, match="connection refused"):
            publishing.publish(states[1])
        assert latest() == 1
        bucket.before = _nothing
        step = publishing.publish(states[2])
    assert not step.is_full
    assert same(received(URL, step.version, states[0]), states[2])
    _check_nothing_is_half(bucket)


def test_listings_that_are_late_cost_nothing_but_leftovers(
    bucket: Bucket, states: tuple[State, ...], same: Same
) -> None:
    """The listing stays empty through two publishers, one of which is killed after its index."""
    bucket.lists_late = True
    publishing = publisher(versions=VersionSettings(anchor_every=3, keep_versions=2))
    for state in states[:3]:
        publishing.publish(state)
    numbers = iter(range(1000))

    def before(_: int, call: str) -> None:
        if call == "put" and next(numbers) == 2:
            raise Killed

    bucket.before = before
    with pytest.raises(Killed):
        publishing.publish(states[3])
    bucket.before, bucket.is_dead = _nothing, False
    assert latest() == 3
    assert "bucket/job-a/weight_v000004/READY" in bucket.objects
    with publisher(versions=VersionSettings(anchor_every=2, keep_versions=2)) as successor:
        steps = [successor.publish(state) for state in states[4:8]]
    assert [step.version for step in steps] == [5, 6, 7, 8], "version 4 has an index already"
    bucket.lists_late = False
    assert same(received(URL, 8, states[0]), states[7])
    with publisher(versions=VersionSettings(anchor_every=2, keep_versions=2)) as last:
        last.publish(states[8])
    assert "weight_v000001" not in versions(bucket)
    assert same(received(URL, 9, states[0]), states[8])


@pytest.mark.parametrize("condition", ["kept", "unknown", "ignored"])
def test_an_object_is_created_and_never_replaced(bucket: Bucket, condition: str) -> None:
    bucket.has_conditional_put = condition != "unknown"
    bucket.ignores_condition = condition == "ignored"
    store = ObjectStore(URL)
    for _ in range(2):
        store.create("index", b"first")
    with pytest.raises(FileExistsError):
        store.create("index", b"second")
    assert store.read("index", 0, 9) == b"first"


@pytest.mark.parametrize("condition", ["kept", "unknown", "ignored"])
def test_the_newest_of_two_publishers_goes_on(
    bucket: Bucket, states: tuple[State, ...], same: Same, condition: str
) -> None:
    bucket.has_conditional_put = condition != "unknown"
    bucket.ignores_condition = condition == "ignored"
    older = publisher()
    older.publish(states[0])
    newer = publisher()
    newer.publish(states[1])
    with pytest.raises(ConfigError, match="only the newest one may publish"):
        older.publish(states[2])
    newer.publish(states[3])
    assert latest() == 3
    for version, state in ((1, states[0]), (2, states[1]), (3, states[3])):
        assert same(received(URL, version, states[0]), state)


def test_a_publisher_that_is_taken_over_at_any_call_breaks_nothing(
    bucket: Bucket, states: tuple[State, ...], same: Same
) -> None:
    """Between two calls of a publish another publisher starts and publishes: also just before the
    older one puts LATEST."""
    with publisher(work=WorkSettings(shard_bytes=200)) as alone:
        alone.publish(states[0])
        first = bucket.calls
        alone.publish(states[1])
    for call in range(1, bucket.calls - first + 1):
        bucket.objects.clear()
        older = publisher(work=WorkSettings(shard_bytes=200))
        older.publish(states[0])
        wanted = bucket.calls + call
        newest: list[Published] = []

        def before(number: int, made: str, wanted: int = wanted, newest: Any = newest) -> None:
            if number == wanted:
                with publisher() as newer:
                    newest.append(newer.publish(states[2]))

        bucket.before = before
        with suppress(ConfigError):
            older.publish(states[1])
        bucket.before = _nothing
        (step,) = newest
        assert latest() == step.version
        assert same(received(URL, step.version, states[0]), states[2])
        with pytest.raises(ConfigError, match="only the newest"):
            older.publish(states[3])
        with publisher() as successor:
            again = successor.publish(states[4])
        assert same(received(URL, again.version, states[0]), states[4])


def test_a_stalled_latest_is_put_right_in_a_store_that_was_emptied(
    bucket: Bucket, states: tuple[State, ...], same: Same
) -> None:
    """The older publisher stalls just before it puts LATEST."""
    older = publisher()
    for state in states[:2]:
        older.publish(state)

    def before(_: int, call: str) -> None:
        if call != "put" or "bucket/job-a/weight_v000003/READY" not in bucket.objects:
            return
        if "bucket/job-a/weight_v000003/model.safetensors.index.json" in bucket.objects:
            bucket.before = _nothing
            bucket.objects.clear()
            with publisher() as newer:
                newer.publish(states[3])

    bucket.before = before
    with pytest.raises(ConfigError, match="only the newest one may publish"):
        older.publish(states[2])
    assert bucket.before is _nothing
    assert latest() == 1
    assert same(received(URL, 1, states[0]), states[3])


def test_a_version_that_latest_names_is_published(
    bucket: Bucket, states: tuple[State, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails at the look for a newer publisher after LATEST."""
    real = frail_objects.FrailObjects.cat_file
    named = b"weight_v000002"

    def read(self: Any, path: str, *args: Any, **more: Any) -> bytes:
        if path.endswith(".publisher") and named in bucket.objects["bucket/job-a/LATEST"]:
            raise OSError("connection refused")
        return real(self, path, *args, **more)

    with publisher() as publishing:
        publishing.publish(states[0])
        with monkeypatch.context() as patched:
            patched.setattr(frail_objects.FrailObjects, "cat_file", read)
            assert publishing.publish(states[1]).version == 2
        assert publishing.publish(states[2]).version == 3


def test_versions_of_other_systems_are_left_alone(bucket: Bucket) -> None:
    foreign = {
        "bucket/job-a/weight_v000001/model.safetensors.index.json": (
            b'{"metadata":{"version":"1"},"weight_map":{"w":"a.safetensors"}}'
        ),
        "bucket/job-a/weight_v000001/a.safetensors": b"theirs",
        "bucket/job-a/weight_v000002/b.safetensors": b"theirs, still being written",
        "bucket/job-a/notes/weight_v000001/READY": b"",
    }
    bucket.objects.update(foreign)
    with pytest.raises(ConfigError, match="job-a is written by slime or miles: publish elsewhere"):
        publisher()
    assert bucket.objects == foreign


def test_ranks_need_a_directory_to_agree_in(
    bucket: Bucket, tmp_path: Path, states: tuple[State, ...], same: Same
) -> None:
    with pytest.raises(ConfigError, match="ranks_dir"):
        publisher(rank=0, ranks=2)
    options = {
        "exchange": ExchangeSettings(ranks_dir=tmp_path),
        "versions": VersionSettings(anchor_every=1),
    }
    crew = [publisher(rank=rank, ranks=2, **options) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        for state in states[:3]:
            names = sorted(state)
            shares = [{n: state[n] for n in names[rank::2]} for rank in (0, 1)]
            calls = [
                pool.submit(each.publish, share) for each, share in zip(crew, shares, strict=True)
            ]
            assert len({call.result().state_hash for call in calls}) == 1
    for each in crew:
        each.close()
    assert same(received(URL, 3, states[0]), states[2])


def test_a_rank_writes_only_what_a_version_was_begun_as() -> None:
    for begun in ("../x~0123abcd", "weight_v000001", "weight_v000001~../../", "a~0123abcd", ""):
        with pytest.raises(PeerProtocolError):
            WritableObjectStore(URL).draft(begun)


def test_an_adapter_is_a_directory_that_peft_loads(bucket: Bucket) -> None:
    base = Base(store="job-a", version=WeightVersion(7), state_hash="0" * 32)
    adapter = Adapter(base, {"peft_type": "LORA", "r": 4})
    weights = {"layer.lora_A.weight": torch.ones(4, 8)}
    with publisher(adapter=adapter) as publishing:
        publishing.publish(weights)
    files = {path.split("/")[3] for path in bucket.objects if "weight_v000001" in path}
    assert files == {
        FULL_SHARD_FILE,
        "adapter_config.json",
        "model.safetensors.index.json",
        "READY",
    }
    with closing(Receiver(URL, base=base)) as receiver:
        held = {"layer.lora_A.weight": torch.zeros(4, 8)}
        receiver.sync(None, WeightVersion(1), TensorTarget(held))
    assert torch.equal(held["layer.lora_A.weight"], torch.ones(4, 8))


def test_the_three_lines_take_a_url(states: tuple[State, ...], same: Same, tmp_path: Path) -> None:
    for location in ("memory://three/lines", f"file://{tmp_path}/lines", str(tmp_path / "plain")):
        with Publisher(location) as publishing:
            publishing.publish(states[0])
            publishing.publish(states[1])
        assert same(received(location, 2, states[0]), states[1])
        assert store_name(location + "/") in {"lines", "plain"}
    assert (tmp_path / "lines" / ".publisher-lock").exists(), "a local URL is a directory"
    fsspec.filesystem("memory").rm("/three", recursive=True)


def test_a_relay_serves_a_store_that_has_no_range_of_an_empty_object(
    bucket: Bucket, states: tuple[State, ...], same: Same, tmp_path: Path
) -> None:
    with publisher() as publishing:
        publishing.publish(states[0])
    with relayed("frail://bucket", tmp_path / "cache") as url:
        held = received(f"{url}/stores/job-a", 1, states[0])
    assert same(held, states[0])


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://127.0.0.1:9731/stores/job-a", "weight servers only read"),
        ("sftp://host/job-a", "not known to replace an object in one piece"),
        ("simplecache::s3://bucket/job-a", "not known to replace"),
        ("s3://bucket/job-a", "s3fs"),
    ],
)
def test_a_place_that_cannot_be_published_to_says_why(location: str, message: str) -> None:
    with pytest.raises(RoseMuxError, match=message):
        writable_store(location)
