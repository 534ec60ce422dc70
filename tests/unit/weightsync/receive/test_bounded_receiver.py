"""A receiver with little memory: every state as with much, in no more than it was given."""

import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import TensorSpec
from weightsync.encoding.codec import Encoding, decode, encode_as
from weightsync.encoding.delta import Delta
from weightsync.follower import Follower
from weightsync.layout.slices import SliceRecord
from weightsync.publish.settings import VersionSettings
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Publisher
from weightsync.reading.spool import MemoryStaging
from weightsync.receive.stored_delta import StoredDelta
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.ranges import ByteSpan

State = dict[str, torch.Tensor]
Same = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]
MIB = 1 << 20
LITTLE = 2 * MIB
TENSORS, ELEMENTS = 48, 128 << 10
TENSOR_BYTES = 2 * ELEMENTS
MODEL_BYTES = TENSORS * TENSOR_BYTES
SHARD = "model-00001-of-00001.safetensors"
ONE, THREE = WeightVersion(1), WeightVersion(3)


def _states() -> list[State]:
    """Three states; every element changes from one to the next, the worst that a delta can be."""
    generator = torch.Generator().manual_seed(0)
    state = {
        f"layer.{n:02d}": torch.randn(512, ELEMENTS // 512, generator=generator).bfloat16()
        for n in range(TENSORS)
    }
    run = [state]
    for _ in range(2):
        run.append(
            {
                name: (t.view(torch.int16) ^ torch.randint(1, 99, t.shape, generator=generator))
                .short()
                .view(torch.bfloat16)
                for name, t in run[-1].items()
            }
        )
    return run


STATES = _states()


@pytest.fixture(scope="module", params=[Encoding.ROSEMUX, Encoding.XOR])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bounded") / "store"
    with Publisher(root, versions=VersionSettings(encoding=request.param)) as publisher:
        for state in STATES:
            publisher.publish(state)
    return root


def held(state: State | None = None) -> State:
    start = state or STATES[0]
    return {n: t.clone() if state else torch.zeros_like(t) for n, t in start.items()}


@pytest.mark.parametrize(("start", "version"), [(None, ONE), (None, THREE), (ONE, THREE)])
def test_no_version_takes_more_memory_than_was_given(
    store: Path, same: Same, tmp_path: Path, start: WeightVersion | None, version: WeightVersion
) -> None:
    """Beyond the setting only what the largest tensors take, three of them on each thread."""
    receiver = Receiver(store, staging_bytes=LITTLE, spool_dir=tmp_path)
    mine = held(STATES[0] if start else None)
    receiver.sync(start, version, TensorTarget(held(STATES[0] if start else None)))
    tracemalloc.start()
    try:
        receiver.sync(start, version, TensorTarget(mine))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < LITTLE + 6 * TENSOR_BYTES < MODEL_BYTES / 3
    assert same(mine, STATES[version - 1])
    assert list(tmp_path.iterdir()) == []
    receiver.close()


def test_a_fitting_delta_is_decoded_before_it_is_applied(
    store: Path,
) -> None:
    little = Receiver(store, staging_bytes=LITTLE).prepare(ONE, THREE)
    much = Receiver(store).prepare(ONE, THREE)
    waiting = [
        delta
        for deltas in little.deltas.values()
        for delta in deltas
        if isinstance(delta, StoredDelta)
    ]
    assert waiting
    assert not any(isinstance(d, StoredDelta) for deltas in much.deltas.values() for d in deltas)
    assert little.bytes_read == much.bytes_read


def test_nothing_of_the_store_is_needed_any_more_once_it_is_staged(
    tmp_path: Path, same: Same
) -> None:
    """The second pass reads the receiver's own copy: what changes under it is not seen."""
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(STATES[0])
    receiver = Receiver(tmp_path / "store", staging_bytes=LITTLE)
    staged = receiver.prepare(None, ONE)
    shard = tmp_path / "store" / "weight_v000001" / SHARD
    shard.write_bytes(bytes(shard.stat().st_size))
    mine = held()
    receiver.settle(staged, TensorTarget(mine))
    assert same(mine, STATES[0])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("at", [0.02, 0.5, 0.999])
def test_a_flipped_bit_is_found_before_anything_is_written(
    tmp_path: Path, same: Same, version: int, at: float
) -> None:
    with Publisher(tmp_path / "store") as publisher:
        for state in STATES[:2]:
            publisher.publish(state)
    shard = tmp_path / "store" / f"weight_v00000{version}" / SHARD
    raw = bytearray(shard.read_bytes())
    raw[int(at * len(raw))] ^= 4
    shard.write_bytes(raw)
    receiver, mine = Receiver(tmp_path / "store", staging_bytes=LITTLE), held()
    with pytest.raises(Corrupt):
        receiver.sync(None, WeightVersion(2), TensorTarget(mine))
    assert same(mine, held())


def test_slices_are_brought_together(tmp_path: Path, same: Same) -> None:
    def cut(state: State) -> list[tuple[str, torch.Tensor | ShardSlice]]:
        given: list[tuple[str, torch.Tensor | ShardSlice]] = []
        for n, (name, whole) in enumerate(state.items()):
            dim = n % 2
            for part, offset in zip(whole.chunk(3, dim), (0, *_ends(whole, dim)), strict=False):
                given.append((name, ShardSlice(part.contiguous(), tuple(whole.shape), dim, offset)))
        return given

    with Publisher(tmp_path / "store") as publisher:
        for state in STATES[:2]:
            publisher.publish(cut(state))
    receiver, mine = Receiver(tmp_path / "store", staging_bytes=LITTLE), held()
    receiver.sync(None, ONE, TensorTarget(mine))
    assert same(mine, STATES[0])
    receiver.sync(ONE, WeightVersion(2), TensorTarget(mine))
    assert same(mine, STATES[1])


def _ends(whole: torch.Tensor, dim: int) -> list[int]:
    sizes = [part.shape[dim] for part in whole.chunk(3, dim)]
    return [sum(sizes[: n + 1]) for n in range(2)]


def test_a_checkpoint_directory_follows_with_little_memory(
    store: Path, same: Same, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    receiver = Receiver(store, staging_bytes=LITTLE, spool_dir=tmp_path / "held")
    with Follower(receiver, tmp_path / "held") as follows:
        for version in (ONE, THREE):
            pulled = follows.pull(version)
            assert pulled.version == version
            assert same(load_file(tmp_path / "held" / SHARD), STATES[version - 1])
    receiver.close()


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_an_overwriting_delta_lends_what_its_positions_take(share: float) -> None:
    """A changed byte comes with four of its position."""
    random = np.random.default_rng(0)
    spec = TensorSpec("BF16", (1 << 20,))
    old = np.zeros(spec.elements, np.uint16)
    new = np.where(random.random(spec.elements) < share, ~old, old)
    encoded = encode_as(Encoding.OVERWRITE, old, new)
    assert encoded is not None
    staged = MemoryStaging(len(encoded.payload))
    staged.write(0, np.frombuffer(encoded.payload, np.uint8))
    delta = StoredDelta(
        file=staged,
        span=ByteSpan(0, staged.kept_bytes),
        encoding=Encoding.OVERWRITE,
        spec=spec,
        what="w",
    )
    tracemalloc.start()
    try:
        delta.apply(old)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(old, new)
    assert delta.lent_bytes - staged.kept_bytes <= peak < delta.lent_bytes + MIB


class Experts:
    """Both halves of every expert's rows, as loaders of fused experts copy them."""

    def boxes(self, name: str, spec: TensorSpec) -> list[SliceRecord]:
        experts, rows, columns = spec.shape
        return [
            SliceRecord(name, spec.shape, (expert, at, 0), (1, rows // 4, columns))
            for expert in range(experts)
            for at in (0, rows // 2)
        ]


def test_a_delta_is_decoded_once_for_all_boxes_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"w": torch.randn(8, 64, 256).bfloat16()}
    second = {"w": first["w"] + torch.rand(8, 64, 256).bfloat16()}
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(first)
        publisher.publish(second)
    boxes = Experts().boxes("w", TensorSpec("BF16", (8, 64, 256)))
    held = {box.entry: first["w"][box.index].clone() for box in boxes}
    decoded: list[TensorSpec] = []

    def counted(encoding: Encoding, payload: memoryview, spec: TensorSpec) -> Delta:
        decoded.append(spec)
        return decode(encoding, payload, spec)

    monkeypatch.setattr("weightsync.receive.stored_delta.decode", counted)
    with closing(Receiver(tmp_path / "store", selection=Experts())) as receiver:
        receiver.sync(None, ONE, TensorTarget(held))
        assert not receiver.sync(ONE, WeightVersion(2), TensorTarget(held)).from_full
    assert len(decoded) == 1
    for box in boxes:
        assert torch.equal(held[box.entry], second["w"][box.index])
