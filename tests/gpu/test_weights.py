"""A store's versions on a device: the same bits as on the host, in the model's own storage."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here")

from harvester.contracts.ids import WeightVersion  # noqa: E402
from tests.unit.weightsync.vllm.plain_model import PlainModel, State  # noqa: E402
from tests.unit.weightsync.vllm.test_loader_map import LAYOUT, PackedModel  # noqa: E402
from weightsync.elements.bits import Bits, TensorSpec, bits_of, torch_dtypes  # noqa: E402
from weightsync.encoding.codec import Encoding, decode, encode, encode_as  # noqa: E402
from weightsync.encoding.delta import Delta, checked_apply  # noqa: E402
from weightsync.publisher import Published  # noqa: E402
from weightsync.transport.location import StoreRoot  # noqa: E402
from weightsync.vllm.device_delta import apply_on_device  # noqa: E402
from weightsync.vllm.engine_weights import EngineWeights  # noqa: E402
from weightsync.vllm.loader_map import traced  # noqa: E402
from weightsync.vllm.prepared_version import RequestedVersion  # noqa: E402
from weightsync.vllm.stager import StageState  # noqa: E402

INTEGERS = {"U8": np.uint8, "F8_E4M3": np.uint8, "BF16": np.uint16, "F16": np.uint16,
            "F32": np.uint32, "I64": np.uint64}  # fmt: skip
SIZES = (1, 255, 4096, 300_007)
CHUNKS = (4 << 20) + 5
"""More elements than are widened at once."""


def changed(dtype: str, size: int, density: float) -> tuple[Bits, Bits]:
    """A state and the next one: most steps are one unit, some go anywhere."""
    random = np.random.default_rng(size)
    kind = INTEGERS[dtype]
    most = np.iinfo(kind).max
    old = random.integers(0, most, size, dtype=kind, endpoint=True)
    new = old.copy()
    hit = random.random(size) < density
    new[hit] += random.choice(np.array([1, most, 77], dtype=kind), int(hit.sum()))
    far = hit & (random.random(size) < 0.2)
    new[far] = random.integers(0, most, int(far.sum()), dtype=kind)
    return old, new


def on_device(delta: Delta, old: Bits, dtype: str, device: str) -> Bits:
    tensor = torch.from_numpy(old.copy()).view(torch_dtypes()[dtype]).to(device)
    apply_on_device(delta, tensor)
    return bits_of(tensor.cpu())


@pytest.mark.parametrize("encoding", sorted({*Encoding} - {Encoding.CONTEXT}))
@pytest.mark.parametrize("dtype", list(INTEGERS))
@pytest.mark.parametrize("density", [0.0005, 0.3])
def test_a_delta_gives_the_host_s_bits(
    device: str, encoding: Encoding, dtype: str, density: float
) -> None:
    applied = 0
    for size in SIZES:
        old, new = changed(dtype, size, density)
        encoded = encode_as(encoding, old, new)
        if encoded is None:
            continue
        delta = decode(encoding, memoryview(encoded.payload), TensorSpec(dtype, (size,)))
        host = old.copy()
        checked_apply(delta, host)
        assert (host == new).all()
        assert (on_device(delta, old, dtype, device) == new).all(), size
        applied += 1
    if not applied:
        pytest.skip("this encoding has nothing for such a change")


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_delta_of_many_elements_goes_in_chunk_by_chunk(device: str, dtype: str) -> None:
    kind = INTEGERS[dtype]
    old = np.arange(CHUNKS, dtype=np.uint64).astype(kind)
    new = old + (np.arange(CHUNKS) % 5).astype(kind) - kind(2)
    encoded = encode(old, new)
    assert encoded is not None
    delta = decode(encoded.encoding, memoryview(encoded.payload), TensorSpec(dtype, (CHUNKS,)))
    assert (on_device(delta, old, dtype, device) == new).all()


def test_a_loader_s_map_reaches_packed_storage(device: str) -> None:
    model = PackedModel().to(device)
    target = traced(model, LAYOUT, lambda _touched: None)
    for name, spec in LAYOUT.items():
        old = target.bits(name).copy()
        new = old + np.uint16(1)
        encoded = encode(old, new)
        assert encoded is not None
        target.change(name, [decode(encoded.encoding, memoryview(encoded.payload), spec)])
        assert (target.bits(name) == new).all(), name
    assert target.is_current(model)


@pytest.fixture
def model(states: tuple[State, ...], device: str) -> PlainModel:
    return PlainModel(states[0]).to(device)


def places(model: PlainModel) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_versions_are_staged_and_loaded_in_place_and_verified(
    model: PlainModel,
    device: str,
    states: tuple[State, ...],
    published: tuple[Path, list[Published]],
) -> None:
    root, versions = published
    wanted: Callable[[int], RequestedVersion] = lambda number: RequestedVersion(  # noqa: E731
        store="store", version=WeightVersion(number)
    )
    weights = EngineWeights(model, None, StoreRoot(root.parent), packed_ahead_bytes=0)
    try:
        weights.load(wanted(3))
        lies = places(model)
        for number in (4, 7):
            while (status := weights.stage(wanted(number))).state is StageState.RUNNING:
                pass
            assert status.state is StageState.READY
            applied = weights.load(wanted(number))
            assert not applied.from_full
            assert applied.state_hash == versions[number - 1].state_hash
            assert deepcopy(model).cpu().holds(states[number - 1])
            weights.release()
    finally:
        weights.close()
    assert places(model) == lies
    assert {parameter.device.type for parameter in model.parameters()} == {device}


def test_a_device_hashes_its_tensors_as_the_host_does(device: str) -> None:
    """weightsync/elements/device_hash.py."""
    hashing = pytest.importorskip(
        "weightsync.elements.device_hash", reason="weights are hashed on the host alone"
    )
    from weightsync.elements.state_hash import digest_of

    generator = torch.Generator().manual_seed(1)
    sizes = (1, 240, 4096, (3 << 20) + 5)
    tensors = {
        str(size): torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for size in sizes
    }
    expected = {name: digest_of(bits_of(tensor)) for name, tensor in tensors.items()}
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    assert hashing.digests_on_device(there) == expected
