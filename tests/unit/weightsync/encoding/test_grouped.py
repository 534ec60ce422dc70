"""Changes in groups: exact whatever they are, used where they pay, refused where they are wrong."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import UNSIGNED_NUMPY, Bits, TensorSpec, bits_of
from weightsync.elements.state_hash import digest_of
from weightsync.encoding import codec
from weightsync.encoding.codec import Encoding, decode, encode
from weightsync.encoding.delta import SparseDelta, checked_apply
from weightsync.encoding.grouped import GROUPS, GroupedDelta, grouped_payload
from weightsync.encoding.sparse import compared
from weightsync.encoding.varint import varint
from weightsync.vllm.device_delta import apply_on_device

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}
TORCH = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}


def _step(
    width: int, elements: int, density: float, far_share: float, wide: int, seed: int
) -> tuple[Bits, Bits]:
    """A tensor and its successor: steps of one unit, steps of a few, and `wide` of any size."""
    random = np.random.default_rng(seed)
    kind = UNSIGNED_NUMPY[width]
    top = int(np.iinfo(kind).max)
    old: Bits = random.integers(0, top, elements, dtype=kind, endpoint=True)
    new = old.copy()
    hit = np.flatnonzero(random.random(elements) < density)
    new[hit] += random.choice(np.array([1, top], dtype=kind), hit.size)
    far = hit[random.random(hit.size) < far_share]
    new[far] += random.choice(np.array([2, 9, top - 4], dtype=kind), far.size)
    new[far[:wide]] = random.integers(0, top, far[:wide].size, dtype=kind, endpoint=True)
    return old, new


def _in_groups(old: Bits, new: Bits) -> bytes:
    """The payload in groups, even if another layout would be chosen; empty if impossible."""
    return grouped_payload(old.size, compared(old, new))


def _spec(bits: Bits) -> TensorSpec:
    return TensorSpec(DTYPES[bits.itemsize], (bits.size,))


def _decoded(payload: bytes, old: Bits) -> GroupedDelta:
    delta = decode(Encoding.ROSEMUX, memoryview(payload), _spec(old))
    assert isinstance(delta, GroupedDelta)
    return delta


@st.composite
def steps(draw: st.DrawFn) -> tuple[Bits, Bits]:
    return _step(
        draw(st.sampled_from(sorted(DTYPES))),
        draw(st.sampled_from([1, 2, 63, 64, 65, 255, 256, 1023, 1024, 5000])),
        draw(st.sampled_from([0.0, 0.003, 0.05, 0.3, 1.0])),
        draw(st.sampled_from([0.0, 0.15, 1.0])),
        draw(st.sampled_from([0, 1, 3])),
        draw(st.integers(0, 1 << 30)),
    )


@given(steps())
@settings(deadline=None, max_examples=200)
def test_every_bit_is_restored_and_hashed(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    if not (payload := _in_groups(old, new)):
        return
    delta = _decoded(payload, old)
    guarded = np.full(old.size + 128, 0xA5, dtype=old.dtype)
    middle = guarded[64:-64]
    middle[:] = old
    assert checked_apply(delta, middle, hashed=True) == digest_of(new)
    assert (middle == new).all()
    assert (guarded[:64] == 0xA5).all()
    assert (guarded[-64:] == 0xA5).all()
    there = torch.from_numpy(old.copy()).view(TORCH[old.itemsize])
    apply_on_device(delta, there)
    assert (bits_of(there) == new).all()


@pytest.mark.parametrize("width", sorted(DTYPES))
def test_nan_payloads_and_signed_zeros_survive(width: int) -> None:
    bits = 8 * width
    sign, ones = 1 << (bits - 1), (1 << bits) - 1
    kind = UNSIGNED_NUMPY[width]
    edges = np.array([0, sign, sign - 1, ones], dtype=kind)
    old, new = _step(width, 20_000, 0.05, 0.2, 0, seed=4)
    old[:4], new[:4] = edges, edges[[1, 0, 3, 2]]
    payload = _in_groups(old, new)
    assert checked_apply(_decoded(payload, old), old, hashed=True) == digest_of(new)
    assert old.tobytes() == new.tobytes()


def test_gaps_longer_than_their_low_bits_say_are_exact() -> None:
    """Dense rows far apart, as of an embedding of which few rows moved."""
    old = np.zeros(1 << 20, dtype=np.uint16)
    new = old.copy()
    for row in range(0, old.size, 300_000):
        new[row : row + 500 : 3] = 1
    new[-1] = 0xFFFF
    delta = _decoded(_in_groups(old, new), old)
    delta.apply(old)
    assert (old == new).all()


@pytest.mark.parametrize("density", [0.01, 0.05, 0.2])
def test_a_training_step_is_in_groups_and_about_as_small_as_compressed(density: float) -> None:
    old, new = _step(2, 400_000, density, 0.12, 0, seed=9)
    encoded = encode(old, new)
    assert encoded is not None
    assert encoded.payload[1] == GROUPS
    compressed = codec._encode_streams(old, compared(old, new))
    assert len(encoded.payload) < 1.06 * len(compressed)


@pytest.mark.parametrize("kind", ["columns", "one sign", "few", "wide"])
def test_compressible_changes_are_left_to_the_compressor(kind: str) -> None:
    if kind == "columns":
        old = np.zeros(400_000, dtype=np.uint16)
        new = old + (np.arange(old.size) % 50 == 7).astype(np.uint16)
    elif kind == "wide":
        old, new = _step(4, 400_000, 0.05, 1.0, 1 << 20, seed=1)
    else:
        old, new = _step(2, 400_000, 0.001 if kind == "few" else 0.05, 0.0, 0, seed=2)
        new = old + (old != new).astype(np.uint16) if kind == "one sign" else new
    encoded = encode(old, new)
    assert encoded is not None
    delta = decode(encoded.encoding, memoryview(encoded.payload), _spec(old))
    assert isinstance(delta, SparseDelta)


def test_payloads_of_before_are_read_as_before() -> None:
    """Written by the state before there were groups: 3 elements of a bfloat16 tensor of 300."""
    old = np.arange(300, dtype=np.uint16)
    new = old.copy()
    new[5] += 1
    new[290] -= 1
    new[7] += 300
    payload = bytes.fromhex("010002ac02020103010305ff1d0102010701580102")
    assert codec._encode_streams(old, compared(old, new)) == payload
    decode(Encoding.ROSEMUX, memoryview(payload), _spec(old)).apply(old)
    assert (old == new).all()


@given(st.data())
@settings(deadline=None, max_examples=400)
def test_damaged_payloads_are_corrupt_or_stay_in_range(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from(sorted(DTYPES)))
    old, new = _step(width, 3000, 0.1, 0.3, 2, data.draw(st.integers(0, 99)))
    payload = bytearray(_in_groups(old, new))
    # Mostly the numbers and low bits in front: the rest is planes.
    most = data.draw(st.sampled_from([24, len(payload)]))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, most - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (payload, payload[:cut], payload + b"\0"):
        guarded = np.full(old.size + 128, 0xA5, dtype=old.dtype)
        guarded[64:-64] = old
        with suppress(Corrupt):
            decode(Encoding.ROSEMUX, memoryview(bytes(damaged)), _spec(old)).apply(guarded[64:-64])
        assert (guarded[:64] == 0xA5).all()
        assert (guarded[-64:] == 0xA5).all()


def test_cut_and_lengthened_payloads_are_corrupt() -> None:
    old, new = _step(2, 3000, 0.1, 0.3, 2, seed=5)
    payload = _in_groups(old, new)
    for cut in range(len(payload)):
        with pytest.raises(Corrupt):
            _decoded(payload[:cut], old)
    with pytest.raises(Corrupt):
        _decoded(payload + b"\0", old)


def test_changes_behind_the_tensors_end_are_corrupt() -> None:
    old, new = _step(2, 3000, 0.1, 0.3, 2, seed=6)
    new[-1] = old[-1] + np.uint16(1)
    payload = _in_groups(old, new)
    shorter = payload[:3] + varint(old.size - 1) + payload[3 + len(varint(old.size)) :]
    with pytest.raises(Corrupt, match="2999 elements"):
        decode(Encoding.ROSEMUX, memoryview(shorter), TensorSpec("BF16", (old.size - 1,)))
