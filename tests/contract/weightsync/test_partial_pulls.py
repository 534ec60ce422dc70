"""A rank pulls the bytes of its share from any kind of store, and holds exactly that share."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
import torch
import xxhash

from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion
from tests.weight_servers import HASTY, relayed, served
from weightsync.elements.bits import TensorSpec
from weightsync.follower import Follower
from weightsync.layout import shard
from weightsync.layout.chunk_digests import MIN_CHUNK_BYTES
from weightsync.layout.names import INDEX_FILE
from weightsync.layout.shard import shard_header
from weightsync.publish.settings import VersionSettings
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Publisher
from weightsync.receive.held_parts import Names, Selection, TensorParallel, bounds
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.directory import DirectorySource
from weightsync.transport.http_source import HttpSource
from weightsync.transport.objects import ObjectStore
from weightsync.transport.source import StoreSource

State = dict[str, torch.Tensor]
ONE, TWO, THREE = (WeightVersion(v) for v in (1, 2, 3))
SHARD = "model-00001-of-00001.safetensors"
LAYERS, EXPERTS, WIDTH = 4, 4, 256


def _first() -> State:
    """A small mixture: attention, experts and norms in four layers, an embedding and a head."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    state = {"embed.weight": drawn(4 * WIDTH, WIDTH), "head.weight": drawn(4 * WIDTH, WIDTH)}
    for layer in range(LAYERS):
        state[f"layers.{layer}.norm.weight"] = drawn(WIDTH)
        state[f"layers.{layer}.qkv.weight"] = drawn(3 * WIDTH, WIDTH)
        state[f"layers.{layer}.out.weight"] = drawn(WIDTH, WIDTH)
        for expert in range(EXPERTS):
            prefix = f"layers.{layer}.experts.{expert}"
            state[f"{prefix}.up.weight"] = drawn(4 * WIDTH, WIDTH)
            state[f"{prefix}.down.weight"] = drawn(WIDTH, 4 * WIDTH)
    return state


def _moved(state: State, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.view(torch.int16) + (torch.rand(t.shape, generator=generator) < 0.03))
        .short()
        .view(torch.bfloat16)
        for name, t in state.items()
    }


_SECOND = _moved(_first(), 1)
STATES = (_first(), _SECOND, _moved(_SECOND, 2))
_COLUMNS = ("down.weight", "out.weight")


def _dim(name: str) -> int | None:
    """The dimension as Megatron cuts it: rows of input projections, columns of output
    projections.
    """
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(_COLUMNS) else 0


SHARES: dict[str, Selection] = {
    "tp 0 of 2": TensorParallel(rank=0, ranks=2, dim_of=_dim),
    "tp 3 of 4": TensorParallel(rank=3, ranks=4, dim_of=_dim),
    "pp second half": Names(lambda name: name.startswith(("layers.2", "layers.3", "head"))),
    "ep 1 of 4": Names(lambda name: ".experts." not in name or ".experts.1." in name),
    "pp and tp": TensorParallel(
        rank=1, ranks=2, dim_of=_dim, within=Names(lambda name: name.startswith("layers.0"))
    ),
}


def part(state: State, share: Selection) -> State:
    held = {}
    for name, tensor in state.items():
        for box in share.boxes(name, TensorSpec("BF16", tuple(tensor.shape))):
            held[name] = tensor[box.index].clone()
    return held


def blank(share: Selection) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in part(STATES[0], share).items()}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.int16), right[name].view(torch.int16)) for name in left
    )


@dataclass(slots=True)
class Counted(StoreSource):
    """A source that counts the bytes read."""

    inner: StoreSource
    read_total: int = 0

    @property
    def streams(self) -> int:
        return self.inner.streams

    @property
    def range_bytes(self) -> int:
        return self.inner.range_bytes

    def directories(self) -> frozenset[str]:
        return self.inner.directories()

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        return self.inner.latest(known, wait_s=wait_s)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        return self.inner.read_small(path, limit_bytes)

    def size_bytes(self, path: str) -> int:
        return self.inner.size_bytes(path)

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        self.read_total += len(into)
        self.inner.read_range(path, start, into)

    def doubt(self, path: str) -> None:
        self.inner.doubt(path)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module", params=[shard._PACKED_ABOVE, 1], ids=["headers", "packed"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose deltas have headers as any reader knows them, or packed ones."""
    root = tmp_path_factory.mktemp("parts") / "job-a"
    with patch.object(shard, "_PACKED_ABOVE", request.param), Publisher(root) as publisher:
        for state in STATES:
            publisher.publish(state)
    return root


@pytest.fixture
def copied(published: Path, tmp_path: Path) -> Path:
    """A copy of the store, to be damaged."""
    shutil.copytree(published, tmp_path / "job-a")
    return tmp_path / "job-a"


def size_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


SIZE = size_of(STATES[0])


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES.keys())
@pytest.mark.parametrize("staging_bytes", [1 << 20, 1 << 30])
def test_a_rank_holds_its_share_of_every_state(
    published: Path, share: Selection, staging_bytes: int
) -> None:
    held, target = blank(share), TensorTarget(_held := blank(share))
    receiver = Receiver(published, selection=share, staging_bytes=staging_bytes)
    current = None
    for version in (ONE, TWO, THREE):
        applied = receiver.sync(current, version, target)
        assert same(_held, part(STATES[version - 1], share))
        assert applied.from_full == (version == 1)
        current = applied.version
    Receiver(published, selection=share).sync(None, THREE, TensorTarget(held))
    assert same(held, part(STATES[2], share))


def needed_bytes(share: Selection) -> int:
    """Bytes of a full version that the share reads: columns of a tensor touch every row."""
    by_name = part(STATES[0], share)
    return sum(
        STATES[0][name].nbytes if held.shape[-1] != STATES[0][name].shape[-1] else held.nbytes
        for name, held in by_name.items()
    )


@pytest.mark.parametrize("share", SHARES)
def test_it_reads_its_share_and_little_else(published: Path, share: str) -> None:
    source = Counted(DirectorySource(published))
    receiver, held = Receiver(source, selection=SHARES[share]), blank(SHARES[share])
    # At each end of a run a chunk may belong mostly to other ranks; one more chunk is the header.
    most = needed_bytes(SHARES[share]) + (2 * len(held) + 2) * MIN_CHUNK_BYTES
    full = receiver.sync(None, ONE, TensorTarget(held))
    assert needed_bytes(SHARES[share]) <= full.bytes_read <= source.read_total < min(most, SIZE)
    source.read_total = 0
    delta = receiver.sync(ONE, TWO, TensorTarget(held))
    size = (published / "weight_v000002" / SHARD).stat().st_size
    whole = sum(STATES[0][name].nbytes for name in held)
    assert delta.bytes_read == source.read_total <= size * whole / SIZE + 6 * MIN_CHUNK_BYTES
    assert same(held, part(STATES[1], SHARES[share]))


def test_a_pipeline_s_rank_reads_half_of_a_delta(published: Path) -> None:
    """Entries of tensors that are cut are read whole: a delta counts from a tensor's first
    element.
    """
    share = SHARES["pp second half"]
    receiver, held = Receiver(published, selection=share), blank(share)
    receiver.sync(None, ONE, TensorTarget(held))
    delta = receiver.sync(ONE, TWO, TensorTarget(held))
    assert delta.bytes_read < 0.75 * (published / "weight_v000002" / SHARD).stat().st_size


@pytest.fixture(params=["memory", "http", "relay"])
def remote(
    request: pytest.FixtureRequest, published: Path, tmp_path: Path
) -> Iterator[StoreSource]:
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.put(str(published), "/parts/job-a", recursive=True)
        yield ObjectStore("memory://parts/job-a")
        memory.rm("/parts", recursive=True)
        return
    with ExitStack() as stack:
        url = stack.enter_context(served(published.parent))
        if request.param == "relay":
            url = stack.enter_context(relayed(url, tmp_path / "cache"))
        yield stack.enter_context(closing(HttpSource(f"{url}/stores/job-a", HASTY)))


@pytest.mark.parametrize("share", ["tp 3 of 4", "pp second half"])
def test_any_source_that_gives_ranges_will_do(remote: StoreSource, share: str) -> None:
    source, held = Counted(remote), blank(SHARES[share])
    receiver = Receiver(source, selection=SHARES[share])
    receiver.sync(None, ONE, TensorTarget(held))
    assert source.read_total < 0.9 * SIZE
    receiver.sync(ONE, THREE, TensorTarget(held))
    assert same(held, part(STATES[2], SHARES[share]))


def test_a_version_in_slices_is_pulled_in_slices(tmp_path: Path) -> None:
    def cut(state: State) -> Iterator[tuple[str, torch.Tensor | ShardSlice]]:
        for name, tensor in state.items():
            half = tensor.shape[0] // 2
            for offset in (0, half):
                rows = tensor[offset : offset + half].contiguous()
                yield name, ShardSlice(rows, tuple(tensor.shape), 0, offset)

    with Publisher(tmp_path / "job-a") as publisher:
        for state in STATES[:2]:
            publisher.publish(cut(state))
    for share in (SHARES["tp 3 of 4"], SHARES["ep 1 of 4"]):
        source, held = Counted(DirectorySource(tmp_path / "job-a")), blank(share)
        receiver = Receiver(source, selection=share)
        receiver.sync(None, ONE, TensorTarget(held))
        assert source.read_total < 0.75 * SIZE
        receiver.sync(ONE, TWO, TensorTarget(held))
        assert same(held, part(STATES[1], share))


def _without_chunks(index: dict[str, object]) -> None:
    section = index["rosemux"]
    assert isinstance(section, dict)
    for record in section["files"].values():
        del record["chunk_bytes"], record["chunks"]


def _foreign(index: dict[str, object]) -> None:
    del index["rosemux"]


@pytest.mark.parametrize("age", [_without_chunks, _foreign])
@pytest.mark.parametrize("share", ["tp 0 of 2", "ep 1 of 4"])
def test_a_store_that_vouches_for_no_parts_is_read_whole(
    copied: Path,
    caplog: pytest.LogCaptureFixture,
    age: Callable[[dict[str, object]], None],
    share: str,
) -> None:
    for path in copied.glob(f"*/{INDEX_FILE}"):
        index = json.loads(path.read_bytes())
        age(index)
        path.write_text(json.dumps(index))
    source, held = Counted(DirectorySource(copied)), blank(SHARES[share])
    receiver = Receiver(source, selection=SHARES[share])
    with caplog.at_level(logging.INFO, logger="weightsync"):
        receiver.sync(None, ONE, TensorTarget(held))
    assert source.read_total >= SIZE
    assert "weight_v000001 is read whole" in caplog.text
    assert same(held, part(STATES[0], SHARES[share]))
    if age is _without_chunks:
        applied = receiver.sync(ONE, THREE, TensorTarget(held))
        assert not applied.from_full
        assert same(held, part(STATES[2], SHARES[share]))


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("share", ["tp 3 of 4", "pp second half"])
def test_damage_within_a_share_is_found_before_anything_is_written(
    copied: Path, share: str
) -> None:
    selection = SHARES[share]
    receiver, held = Receiver(copied, selection=selection), blank(selection)
    path = copied / "weight_v000001" / SHARD
    size = path.stat().st_size
    for at in (3, 200, size - 1):
        _flip(path, at)
        with pytest.raises(Corrupt):
            receiver.sync(None, ONE, TensorTarget(held))
        assert same(held, blank(selection))
        _flip(path, at)
    receiver.sync(None, ONE, TensorTarget(held))
    assert same(held, part(STATES[0], selection))


def _forge(directory: Path) -> None:
    """Writes the present digest of the file into the index, as one without chunks."""
    index = json.loads((directory / INDEX_FILE).read_bytes())
    raw = (directory / SHARD).read_bytes()
    record = {"bytes": len(raw), "xxh3_128": xxhash.xxh3_128_hexdigest(raw)}
    index["rosemux"]["files"] = {SHARD: record}
    (directory / INDEX_FILE).write_text(json.dumps(index))


def _flip_held(path: Path, share: Selection) -> None:
    """Damages the first byte that a share has of a layer's matrix, in a full version."""
    header = shard_header(np.frombuffer(path.read_bytes(), dtype=np.uint8))
    held = ((n, box) for n, spec in header.layout.items() for box in share.boxes(n, spec))
    name, box = next((n, box) for n, box in held if n.startswith("layers") and "norm" not in n)
    _flip(path, header.offsets[name][0] + bounds(box, 2).start)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("as_objects", [False, True])
def test_a_full_version_under_a_forged_digest_is_refused(
    copied: Path, share: str, as_objects: bool
) -> None:
    """A file without digests of its chunks is read whole, so that cut tensors are checked too."""
    selection = SHARES[share]
    _flip_held(copied / "weight_v000001" / SHARD, selection)
    _forge(copied / "weight_v000001")
    store, held = f"file://{copied}" if as_objects else copied, blank(selection)
    with pytest.raises(Corrupt, match="differs from the published"):
        Receiver(store, selection=selection).sync(None, ONE, TensorTarget(held))
    with pytest.raises(Corrupt, match="differs from the published"):
        Receiver(store, selection=selection).sync(None, THREE, TensorTarget(held))
    assert same(held, blank(selection))


@pytest.mark.parametrize("share", SHARES)
def test_a_rank_goes_around_an_anchor_under_a_forged_digest(tmp_path: Path, share: str) -> None:
    store, selection = tmp_path / "job-a", SHARES[share]
    with Publisher(store, versions=VersionSettings(anchor_every=1)) as publisher:
        for state in STATES[:2]:
            publisher.publish(state)
    anchor = store / "anchor_v000002"
    _flip_held(anchor / SHARD, selection)
    _forge(anchor)
    held = blank(selection)
    Receiver(store, selection=selection).sync(None, TWO, TensorTarget(held))
    assert same(held, part(STATES[1], selection))


def test_damage_outside_of_a_share_does_not_fail_its_pull(copied: Path) -> None:
    selection = SHARES["pp and tp"]
    _flip(copied / "weight_v000001" / SHARD, SIZE - 1000)
    held = blank(selection)
    Receiver(copied, selection=selection).sync(None, ONE, TensorTarget(held))
    assert same(held, part(STATES[0], selection))


def test_digests_that_do_not_lead_to_the_state_are_refused(copied: Path) -> None:
    """The header's digests vouch for whole tensors, so a header with other digests is refused."""
    path = copied / "weight_v000002" / INDEX_FILE
    index = json.loads(path.read_bytes())
    index["rosemux"]["state_hash"] = "0" * 32
    path.write_text(json.dumps(index))
    selection = SHARES["ep 1 of 4"]
    receiver, held = Receiver(copied, selection=selection), blank(selection)
    receiver.sync(None, ONE, TensorTarget(held))
    with pytest.raises(Corrupt, match="do not combine to"):
        receiver.sync(ONE, TWO, TensorTarget(held))
    assert same(held, part(STATES[0], selection))


@pytest.mark.parametrize("share", ["tp 3 of 4", "ep 1 of 4"])
def test_a_part_that_changed_by_itself_is_replaced_whole(published: Path, share: str) -> None:
    selection = SHARES[share]
    receiver, held = Receiver(published, selection=selection), blank(selection)
    receiver.sync(None, ONE, TensorTarget(held))
    held["layers.0.experts.1.up.weight"].view(torch.int16)[0, 0] ^= 1
    applied = receiver.sync(ONE, TWO, TensorTarget(held))
    assert (applied.from_full, receiver.reapplied) == (True, 1)
    assert same(held, part(STATES[1], selection))


def test_a_receiver_that_wrote_nothing_yet_starts_from_a_full_checkpoint(published: Path) -> None:
    """The current version is given, but without a write of its own the receiver knows no digests of
    the held parts."""
    selection = SHARES["tp 3 of 4"]
    held = part(STATES[0], selection)
    applied = Receiver(published, selection=selection).sync(ONE, THREE, TensorTarget(held))
    assert applied.from_full
    assert same(held, part(STATES[2], selection))


def test_another_share_and_a_directory_are_refused(published: Path, tmp_path: Path) -> None:
    held = blank(SHARES["tp 0 of 2"])
    receiver = Receiver(published, selection=SHARES["tp 3 of 4"])
    with pytest.raises(ConfigError, match="does not fit this model"):
        receiver.sync(None, ONE, TensorTarget(held))
    assert same(held, blank(SHARES["tp 0 of 2"]))
    with pytest.raises(ConfigError, match="whole models"):
        Follower(receiver, tmp_path / "held")


def test_a_corrupt_part_of_a_relay_s_file_is_pulled_again(published: Path, tmp_path: Path) -> None:
    """No reader needs the rest of the file, so the relay never verifies it as a whole."""
    selection = SHARES["pp second half"]
    cache = tmp_path / "cache"
    with served(published.parent) as url, relayed(url, cache) as first:
        for _ in range(2):
            held = blank(selection)
            with closing(HttpSource(f"{first}/stores/job-a", HASTY)) as source:
                Receiver(source, selection=selection).sync(None, ONE, TensorTarget(held))
            assert same(held, part(STATES[0], selection))
            (growing,) = cache.glob("job-a/*.part")
            _flip(growing, growing.stat().st_size - 1000)


def test_a_part_of_an_earlier_run_is_no_base_for_the_deltas_of_a_store_begun_anew(
    tmp_path: Path,
) -> None:
    """Norms stay as they were, as in bfloat16 they often do: every digest that is known fits."""
    share, store = SHARES["tp 0 of 2"], tmp_path / "job"
    norms = {name: tensor for name, tensor in STATES[0].items() if "norm" in name}

    def begun(seed: int) -> list[State]:
        shutil.rmtree(store, ignore_errors=True)
        states = [_moved(STATES[0], seed) | norms]
        states += [_moved(states[0], seed + step) | norms for step in (1, 2, 3)]
        with Publisher(store) as publisher:
            for state in states:
                publisher.publish(state)
        return states

    held, states = blank(share), begun(10)
    with closing(Receiver(store, selection=share)) as receiver:
        receiver.sync(None, TWO, TensorTarget(held))
        assert same(held, part(states[1], share))
        states = begun(20)
        receiver.sync(TWO, WeightVersion(4), TensorTarget(held))
        assert same(held, part(states[3], share))
