"""Encodings: exact to the bit, the smallest wins, and only payloads get through."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import Bits, TensorSpec
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.codec import Encoding, decode, encode, encode_as
from weightsync.encoding.delta import checked_apply
from weightsync.encoding.sparse import CHUNK_BYTES

DTYPES = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32, "I64": np.uint64}
ENCODINGS = list(Encoding)
# The first call of a kernel compiles it: no deadlines here.


def _spec(bits: Bits) -> TensorSpec:
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    return TensorSpec(names[bits.dtype], (bits.size,))


def _through(encoding: Encoding, payload: bytes, old: Bits) -> Bits:
    """The decoded delta applied between two guard zones that must stay as they are."""
    guarded = np.full(old.size + 128, 0xA5, dtype=old.dtype)
    middle = guarded[64 : 64 + old.size]
    middle[:] = old
    checked_apply(decode(encoding, memoryview(payload), _spec(old)), middle)
    assert (guarded[:64] == 0xA5).all()
    assert (guarded[64 + old.size :] == 0xA5).all()
    return middle.copy()


@st.composite
def _changes(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """A tensor and its successor: any dtype, any density, ulp steps and jumps mixed."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    seed = draw(st.integers(0, 2**32 - 1))
    size = draw(st.sampled_from([1, 2, 7, 254, 255, 256, 257, 600, 3000]))
    density = draw(st.sampled_from([0.0, 0.002, 0.02, 0.3, 0.5, 1.0]))
    far_share = draw(st.sampled_from([0.0, 0.15, 1.0]))
    random = np.random.default_rng(seed)
    top = np.iinfo(dtype).max
    old = random.integers(0, top, size, dtype=dtype, endpoint=True)
    new = old.copy()
    hit = random.random(size) < density
    step = np.where(random.random(size) < 0.5, dtype(1), dtype(top))
    new[hit] += step[hit]
    jump = hit & (random.random(size) < far_share)
    new[jump] = random.integers(0, top, int(jump.sum()), dtype=dtype, endpoint=True)
    return old, new


@given(_changes())
@settings(deadline=None)
def test_the_chosen_encoding_restores_every_bit(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    encoded = encode(old, new)
    if (old == new).all():
        assert encoded is None
        return
    assert encoded is not None
    assert encoded.changed == np.count_nonzero(old != new)
    assert encoded.digest == digest_of(new)
    assert (_through(encoded.encoding, encoded.payload, old) == new).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(_changes())
@settings(deadline=None)
def test_every_encoding_restores_every_bit(encoding: Encoding, pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    encoded = encode_as(encoding, old, new)
    if encoded is not None:
        # `context` takes the new tensor where that is smallest.
        assert encoded.encoding is encoding or encoding is Encoding.CONTEXT
        assert (_through(encoded.encoding, encoded.payload, old) == new).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(_changes())
@settings(deadline=None)
def test_an_apply_returns_the_hash_of_the_state_after_it(
    encoding: Encoding, pair: tuple[Bits, Bits]
) -> None:
    old, new = pair
    encoded = encode_as(encoding, old, new)
    if encoded is not None:
        delta = decode(encoded.encoding, memoryview(encoded.payload), _spec(old))
        assert checked_apply(delta, old.copy(), hashed=True) == digest_of(new)
        torn = old.copy()
        torn[-1] ^= 1
        assert checked_apply(delta, torn, hashed=True) == digest_of(torn)


def test_tensors_of_many_blocks_are_exact() -> None:
    random = np.random.default_rng(5)
    old = random.integers(0, 1 << 16, 3 * CHUNK_BYTES // 2 + 77, dtype=np.uint16)
    new = old.copy()
    hit = random.choice(old.size, 4000, replace=False)
    new[hit] += random.choice(np.array([1, 0xFFFF, 300], dtype=np.uint16), 4000)
    # Nothing for more than a whole chunk, then the very last element.
    new[old.size // 4 : -1] = old[old.size // 4 : -1]
    new[-1] += np.uint16(1)
    encoded = encode_as(Encoding.ROSEMUX, old, new)
    assert encoded is not None
    assert encoded.digest == digest_of(new)
    assert (_through(Encoding.ROSEMUX, encoded.payload, old) == new).all()


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 1020])
@pytest.mark.parametrize("step", [1, 0xFFFF, 700])
def test_gaps_around_the_escape_are_exact(gap: int, step: int) -> None:
    old = np.zeros(gap + 1, dtype=np.uint16)
    new = old.copy()
    new[gap] = step
    encoded = encode_as(Encoding.ROSEMUX, old, new)
    assert encoded is not None
    assert (_through(Encoding.ROSEMUX, encoded.payload, old) == new).all()


def test_nan_payloads_and_signed_zeros_survive() -> None:
    old = np.array([0x7FC0, 0x7F81, 0x0000, 0x8000, 0xFF80, 0x3F80], dtype=np.uint16)
    new = np.array([0x7FC1, 0xFFFF, 0x8000, 0x0000, 0x7F80, 0x3F80], dtype=np.uint16)
    for encoding in ENCODINGS:
        encoded = encode_as(encoding, old, new)
        assert encoded is not None
        assert (_through(encoded.encoding, encoded.payload, old) == new).all()


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.05, 0.3, 0.5, 0.9])
def test_no_other_encoding_is_smaller_than_the_chosen_one(density: float) -> None:
    random = np.random.default_rng(7)
    old = random.normal(size=40_000).astype(np.float32).view(np.uint32) >> np.uint32(16)
    old = old.astype(np.uint16)
    new = old + (random.random(old.size) < density).astype(np.uint16)
    chosen = encode(old, new)
    assert chosen is not None
    for encoding in set(ENCODINGS) - {Encoding.CONTEXT}:
        other = encode_as(encoding, old, new)
        assert other is not None
        assert len(chosen.payload) <= len(other.payload)


@pytest.mark.parametrize("size", [5000, 400_000])
def test_dense_wins_where_nothing_is_alike(size: int) -> None:
    random = np.random.default_rng(3)
    old = random.integers(0, 256, size, dtype=np.uint8)
    new = random.integers(0, 256, size, dtype=np.uint8)
    encoded = encode(old, new)
    assert encoded is not None
    assert encoded.encoding is Encoding.DENSE
    assert len(encoded.payload) == size
    assert encoded.digest == digest_of(new)


@pytest.mark.parametrize("density", [0.5, 0.7, 0.9])
def test_the_smallest_wins_in_large_tensors_that_change_a_lot(density: float) -> None:
    random = np.random.default_rng(8)
    old = random.integers(0, 1 << 16, 300_000, dtype=np.uint16)
    steps = random.integers(-9, 10, old.size).astype(np.uint16)
    new = old + steps * (random.random(old.size) < density).astype(np.uint16)
    chosen = encode(old, new)
    assert chosen is not None
    assert chosen.changed == np.count_nonzero(old != new)
    assert chosen.digest == digest_of(new)
    assert (_through(chosen.encoding, chosen.payload, old) == new).all()
    for encoding in set(ENCODINGS) - {Encoding.CONTEXT}:
        other = encode_as(encoding, old, new)
        assert other is not None
        assert len(chosen.payload) <= len(other.payload)


def test_a_single_far_change_costs_a_few_bytes() -> None:
    old = np.zeros(100_000, dtype=np.uint16)
    new = old.copy()
    new[77_777] = 0x4242
    encoded = encode(old, new)
    assert encoded is not None
    assert len(encoded.payload) < 40


@given(st.sampled_from(ENCODINGS), st.binary(max_size=200), st.sampled_from(list(DTYPES)))
@settings(max_examples=400, deadline=None)
def test_random_bytes_are_corrupt_or_stay_in_range(
    encoding: Encoding, payload: bytes, dtype: str
) -> None:
    old = np.arange(40, dtype=DTYPES[dtype])
    with suppress(Corrupt):
        _through(encoding, payload, old)


@given(_changes(), st.sampled_from(ENCODINGS), st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_payloads_are_corrupt_or_stay_in_range(
    pair: tuple[Bits, Bits], encoding: Encoding, data: st.DataObject
) -> None:
    old, new = pair
    encoded = encode_as(encoding, old, new)
    if encoded is None:
        return
    damaged = bytearray(encoded.payload)
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for payload in (bytes(damaged), bytes(damaged[:cut]), bytes(damaged) + b"\0"):
        with suppress(Corrupt):
            _through(encoding, payload, old)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_truncated_and_lengthened_payloads_are_corrupt(encoding: Encoding) -> None:
    old = np.arange(5000, dtype=np.uint16)
    new = old + (np.arange(5000) % 9 == 0).astype(np.uint16)
    encoded = encode_as(encoding, old, new)
    assert encoded is not None
    for payload in (encoded.payload[:-1], encoded.payload + b"x", b""):
        with pytest.raises(Corrupt):
            decode(encoded.encoding, memoryview(payload), _spec(old))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_for_a_larger_tensor_is_corrupt(encoding: Encoding) -> None:
    old = np.zeros(4000, dtype=np.uint16)
    new = old.copy()
    new[3999] = 1
    encoded = encode_as(encoding, old, new)
    assert encoded is not None
    with pytest.raises(Corrupt):
        decode(encoded.encoding, memoryview(encoded.payload), TensorSpec("BF16", (3000,)))


def test_a_delta_refuses_a_tensor_of_another_size() -> None:
    old = np.zeros(100, dtype=np.uint16)
    new = old + np.uint16(1)
    encoded = encode_as(Encoding.ROSEMUX, old, new)
    assert encoded is not None
    delta = decode(Encoding.ROSEMUX, memoryview(encoded.payload), _spec(old))
    with pytest.raises(ValueError, match="100 elements, tensor of 99"):
        checked_apply(delta, np.zeros(99, dtype=np.uint16))
