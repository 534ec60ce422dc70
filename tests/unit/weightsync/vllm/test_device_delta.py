"""torch's apply of a delta equals the compiled loops' apply, bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.weightsync.allocated_bytes import AllocatedBytes
from weightsync.elements.bits import Bits, TensorSpec, bits_of
from weightsync.elements.group_applying import Gaps
from weightsync.encoding.codec import Encoding, decode, encode, encode_as
from weightsync.encoding.delta import Delta, PlanesDelta, SparseDelta, XorDelta, checked_apply
from weightsync.encoding.grouped import GroupedDelta
from weightsync.layout.slices import SlicedDelta, SliceRecord
from weightsync.vllm import device_delta
from weightsync.vllm.device_delta import CHANGES_AT_ONCE, MOST_DEVICE_BYTES, apply_on_device

SPECS = {
    "U8": (np.uint8, torch.uint8),
    "BF16": (np.uint16, torch.bfloat16),
    "F32": (np.uint32, torch.float32),
    "I64": (np.uint64, torch.int64),
}


def _states(dtype: str, size: int, density: float, seed: int) -> tuple[Bits, Bits]:
    random = np.random.default_rng(seed)
    integer = SPECS[dtype][0]
    old = random.integers(0, np.iinfo(integer).max, size, dtype=integer, endpoint=True)
    new = old.copy()
    hit = random.random(size) < density
    steps = random.choice(np.array([1, np.iinfo(integer).max, 77], dtype=integer), size)
    new[hit] += steps[hit]
    far = hit & (random.random(size) < 0.2)
    new[far] = random.integers(0, np.iinfo(integer).max, int(far.sum()), dtype=integer)
    return old, new


@contextmanager
def _pieces_of(changes: int) -> Iterator[None]:
    """Use small pieces, as they occur with tensors of millions of elements."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (device_delta,):
            patched.setattr(module, "CHANGES_AT_ONCE", changes)
        patched.setattr(device_delta, "_BYTES_AT_ONCE", 8 * changes)
        patched.setattr(device_delta, "_WORDS_AT_ONCE", changes // 64)
        yield


def _on_device(delta: Delta, old: Bits, dtype: str) -> Bits:
    tensor = torch.from_numpy(old.copy()).view(SPECS[dtype][1])
    apply_on_device(delta, tensor)
    return bits_of(tensor)


@pytest.mark.parametrize("encoding", sorted({*Encoding} - {Encoding.CONTEXT}))
@pytest.mark.parametrize("dtype", list(SPECS))
@given(
    st.integers(1, 3000),
    st.sampled_from([0.0005, 0.01, 0.3, 1.0]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_every_encoding_gives_the_same_elements(
    encoding: Encoding, dtype: str, size: int, density: float, seed: int, in_pieces: bool
) -> None:
    old, new = _states(dtype, size, density, seed)
    encoded = encode_as(encoding, old, new)
    if encoded is not None:
        delta = decode(encoded.encoding, memoryview(encoded.payload), TensorSpec(dtype, (size,)))
        with _pieces_of(128) if in_pieces else nullcontext():
            assert (_on_device(delta, old, dtype) == new).all()


@pytest.mark.parametrize("dtype", list(SPECS))
@pytest.mark.parametrize("stride", [2, 9, 700])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_groups_of_any_gaps_and_differences_are_read(
    dtype: str, stride: int, in_pieces: bool
) -> None:
    """Thousands of changes, since the encoder makes no groups for fewer."""
    random = np.random.default_rng(stride)
    integer = SPECS[dtype][0]
    old = random.integers(0, np.iinfo(integer).max, 4500 * stride, dtype=integer, endpoint=True)
    new = old.copy()
    hit = np.unique(random.integers(0, old.size, 4000))
    steps = np.array([1, 1, 1, np.iinfo(integer).max, 3, 200], dtype=integer)
    new[hit] += random.choice(steps, hit.size, p=[0.3, 0.3, 0.1, 0.2, 0.096, 0.004])
    encoded = encode_as(Encoding.ROSEMUX, old, new)
    assert encoded is not None
    payload = memoryview(encoded.payload)
    delta = decode(Encoding.ROSEMUX, payload, TensorSpec(dtype, (old.size,)))
    assert isinstance(delta, GroupedDelta)
    with _pieces_of(128) if in_pieces else nullcontext():
        assert (_on_device(delta, old, dtype) == new).all()


@pytest.mark.parametrize("dtype", list(SPECS))
@pytest.mark.parametrize("in_pieces", [False, True])
def test_streams_with_gaps_of_several_bytes_are_read(dtype: str, in_pieces: bool) -> None:
    """Pieces of a stream then end at any change, and within a gap."""
    random = np.random.default_rng(5)
    integer = SPECS[dtype][0]
    old = random.integers(0, np.iinfo(integer).max, 270_000, dtype=integer, endpoint=True)
    new = old.copy()
    hit = np.unique(random.integers(0, old.size, 900))
    new[hit] += random.choice(np.array([1, np.iinfo(integer).max, 77], dtype=integer), hit.size)
    encoded = encode_as(Encoding.ROSEMUX, old, new)
    assert encoded is not None
    payload = memoryview(encoded.payload)
    delta = decode(Encoding.ROSEMUX, payload, TensorSpec(dtype, (old.size,)))
    assert isinstance(delta, SparseDelta)
    with _pieces_of(128) if in_pieces else nullcontext():
        assert (_on_device(delta, old, dtype) == new).all()


@pytest.mark.parametrize("encoding", sorted({*Encoding} - {Encoding.CONTEXT}))
@pytest.mark.parametrize("ratio", [0.02, 0.3, 1.0])
def test_memory_on_the_device_does_not_grow_with_the_delta(
    encoding: Encoding, ratio: float
) -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = old.copy()
    hit = random.random(old.size) < ratio
    new[hit] += random.choice(np.array([1, 1, 65_535, 6], dtype=np.uint16), int(hit.sum()))
    encoded = encode_as(encoding, old, new)
    assert encoded is not None
    payload = memoryview(encoded.payload)
    delta = decode(encoding, payload, TensorSpec("BF16", (old.size,)))
    tensor = torch.from_numpy(old.copy()).view(torch.bfloat16)
    with _pieces_of(4096), AllocatedBytes(tensor) as allocated:
        apply_on_device(delta, tensor)
    assert (bits_of(tensor) == new).all()
    assert 0 < allocated.most <= MOST_DEVICE_BYTES * 4096 // CHANGES_AT_ONCE


@pytest.mark.parametrize("width", [1, 2, 8])
def test_memory_does_not_grow_with_planes(width: int) -> None:
    tensor = torch.zeros(1 << 18, dtype={1: torch.uint8, 2: torch.bfloat16, 8: torch.int64}[width])
    delta = PlanesDelta(np.ones((width, tensor.numel()), dtype=np.uint8))
    with _pieces_of(4096), AllocatedBytes(tensor) as allocated:
        apply_on_device(delta, tensor)
    assert 0 < allocated.most <= MOST_DEVICE_BYTES * 4096 // CHANGES_AT_ONCE


def test_memory_stays_bounded_where_few_gaps_fill_many_words() -> None:
    """Gaps without low bits are runs of zeros as long as the tensor."""
    elements = 1 << 24
    highs = np.zeros(elements // 8, np.uint8)
    highs[0], highs[-1] = 1, 0x80
    gaps = Gaps(changes=2, first=0, lows=np.zeros(0, np.uint8), highs=highs)
    with AllocatedBytes() as allocated:
        (positions,) = device_delta.group_positions(
            gaps, np.zeros(1, np.uint8), torch.device("cpu")
        )
    assert positions.tolist() == [0, elements - 1]
    assert allocated.most <= MOST_DEVICE_BYTES


@pytest.mark.parametrize("dtype", list(SPECS))
@pytest.mark.parametrize("in_pieces", [False, True])
def test_planes_are_the_same_too(dtype: str, in_pieces: bool) -> None:
    old = np.arange(20_000, dtype=SPECS[dtype][0])
    new = old + np.arange(20_000, dtype=SPECS[dtype][0]) % 5 - SPECS[dtype][0](2)
    encoded = encode(old, new)
    assert encoded is not None
    delta = decode(encoded.encoding, memoryview(encoded.payload), TensorSpec(dtype, (old.size,)))
    assert type(delta).__name__ == "PlanesDelta"
    with _pieces_of(128) if in_pieces else nullcontext():
        assert (_on_device(delta, old, dtype) == new).all()


@pytest.mark.parametrize("lengths", [(2, 8), (4, 3)])
def test_a_slice_of_a_tensor_is_changed_where_it_lies(lengths: tuple[int, int]) -> None:
    old, new = _states("BF16", 32, 0.5, 1)
    record = SliceRecord("w", (4, 8), (4 - lengths[0], 8 - lengths[1]), lengths)
    wanted = old.copy()
    record.box(wanted)[...] = record.box(new)
    delta = SlicedDelta(record, XorDelta(record.read(old) ^ record.read(new)))
    assert (_on_device(delta, old, "BF16") == wanted).all()


def test_a_tensor_of_another_size_is_refused() -> None:
    old = np.zeros(100, dtype=np.uint16)
    encoded = encode_as(Encoding.ROSEMUX, old, old + np.uint16(1))
    assert encoded is not None
    delta = decode(Encoding.ROSEMUX, memoryview(encoded.payload), TensorSpec("BF16", (100,)))
    checked_apply(delta, old)
    with pytest.raises(ValueError, match="100 elements, tensor of 99"):
        apply_on_device(delta, torch.zeros(99, dtype=torch.bfloat16))
