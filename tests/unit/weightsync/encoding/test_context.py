"""Changes by old values: exact whatever they are, as an oracle in numpy reads them, smaller than
today's, and harmless where they are wrong."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt, Unsupported
from weightsync.elements.bits import UNSIGNED_NUMPY, Bits, TensorSpec, bits_of
from weightsync.elements.state_hash import digest_of
from weightsync.encoding import codec, context
from weightsync.encoding.codec import Encoding, composed, decode, encode, encode_as
from weightsync.encoding.context import ClassesDelta, classes_payload
from weightsync.encoding.delta import checked_apply
from weightsync.encoding.varint import PayloadReader
from weightsync.layout.box_delta import box_delta
from weightsync.layout.slices import SliceRecord

DTYPES = {2: "BF16", 4: "F32"}


def _spec(bits: Bits) -> TensorSpec:
    return TensorSpec(DTYPES[bits.itemsize], (bits.size,))


def _decoded(payload: bytes, old: Bits) -> ClassesDelta:
    delta = decode(Encoding.CONTEXT, memoryview(payload), _spec(old))
    assert isinstance(delta, ClassesDelta)
    return delta


def _by_numpy(payload: bytes, old: Bits) -> Bits:
    """The new elements, one change after another."""
    reader, width = PayloadReader(memoryview(payload)), old.itemsize
    reader.take(3)
    assert reader.number(at_most=old.size) == old.size
    step_key, classes = reader.take(2)
    tables = [(*reader.take(3), reader.number(at_most=len(payload))) for _ in range(classes)]
    keys = (old >> old.dtype.type(8 * width - 9)).astype(np.uint8)
    new, upper = old.copy(), 256
    for bound, gap_bits, far_bits, size in tables:
        members = np.flatnonzero((keys >= bound) & (keys < upper))
        upper = bound
        codes = int.from_bytes(reader.take(size), "little")
        if not size:
            continue

        def code(kept: int) -> int:
            nonlocal codes
            if not codes & 0xFFFFFF:
                value, codes = (codes >> 24) & 0xFFFFFFFF, codes >> 56
                return value
            zeros = (codes & -codes).bit_length() - 1
            codes >>= zeros + 1
            value = (zeros << kept) | (codes & ((1 << kept) - 1))
            codes >>= kept
            return value

        at, far = code(gap_bits), code(far_bits)
        while at < members.size:
            element, step = members[at], 1
            minus, codes = codes & 1, codes >> 1
            if far:
                far -= 1
            else:
                step = code(min(31, max(0, step_key - int(keys[element])))) + 2
                far = code(far_bits)
            new[element] = (int(old[element]) + (-step if minus else step)) % (1 << (8 * width))
            at += code(gap_bits) + 1
        assert at == members.size, "the last gap ends with the tensor"
    reader.finish()
    return new


@st.composite
def steps(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """A tensor and its successor: one to several magnitudes, any density, steps of any size."""
    width = draw(st.sampled_from(sorted(DTYPES)))
    size = draw(st.sampled_from([1, 2, 63, 64, 65, 511, 1023, 1024, 1025, 1100, 5000]))
    density = draw(st.sampled_from([0.002, 0.05, 0.3, 1.0]))
    far_share = draw(st.sampled_from([0.0, 0.15, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    kind = UNSIGNED_NUMPY[width]
    top = int(np.iinfo(kind).max)
    if draw(st.booleans()):
        old: Bits = random.integers(0, top, size, dtype=kind, endpoint=True)
    else:
        values = random.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
        old = (values >> (32 - 8 * width)).astype(kind)
    new = old.copy()
    hit = np.flatnonzero(random.random(size) < density)
    new[hit] += random.choice(np.array([1, top], dtype=kind), hit.size)
    far = hit[random.random(hit.size) < far_share]
    new[far] += random.choice(np.array([2, 9, top - 4, top // 2 + 1], dtype=kind), far.size)
    few = far[: draw(st.sampled_from([0, 3]))]
    new[few] = random.integers(0, top, few.size, dtype=kind, endpoint=True)
    return old, new


@given(steps())
@settings(deadline=None, max_examples=200)
def test_every_bit_is_restored_and_hashed_as_the_oracle_reads_it(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    payload = classes_payload(old, new)
    if (old == new).all():
        assert payload == b""
        return
    assert (_by_numpy(payload, old) == new).all()
    delta = _decoded(payload, old)
    guarded = np.full(old.size + 128, 0xA5, dtype=old.dtype)
    middle = guarded[64:-64]
    middle[:] = old
    assert checked_apply(delta, middle, hashed=True) == digest_of(new)
    assert (middle == new).all()
    assert (guarded[:64] == 0xA5).all()
    assert (guarded[-64:] == 0xA5).all()


@pytest.mark.parametrize("width", sorted(DTYPES))
def test_nan_infinity_denormals_and_signed_zeros_survive(width: int) -> None:
    kind, bits = UNSIGNED_NUMPY[width], 8 * width
    sign, infinity = 1 << (bits - 1), ((1 << 8) - 1) << (bits - 9)
    edges = np.array(
        [0, sign, 1, sign | 1, infinity, infinity | 1, sign - 1, sign | infinity], kind
    )
    old = np.tile(edges, 64)
    new = old.copy()
    new[::3] = np.tile(edges[::-1], 64)[::3]
    delta = _decoded(classes_payload(old, new), old)
    assert checked_apply(delta, old, hashed=True) == digest_of(new)
    assert old.tobytes() == new.tobytes()


def test_gaps_longer_than_their_low_bits_say_are_exact() -> None:
    """Dense rows far apart, as of an embedding of which few rows moved."""
    old = np.full(1 << 20, 0x3C00, dtype=np.uint16)
    new = old.copy()
    for row in range(0, old.size, 300_000):
        new[row : row + 500 : 3] += 1
    new[-1] = 0xFFFF
    _decoded(classes_payload(old, new), old).apply(old)
    assert (old == new).all()


def test_a_step_of_adam_takes_three_quarters_of_the_bytes_that_ignore_old_values() -> None:
    random = torch.Generator().manual_seed(3)
    master = 0.02 * torch.randn(400_000, generator=random)
    old = bits_of(master.bfloat16())
    new = bits_of((master + 6e-7 * torch.randn(400_000, generator=random)).bfloat16())
    ours, today = encode_as(Encoding.CONTEXT, old, new), encode(old, new)
    assert ours is not None
    assert today is not None
    assert ours.encoding is Encoding.CONTEXT
    assert len(ours.payload) < 0.78 * len(today.payload)
    assert (ours.changed, ours.digest) == (today.changed, today.digest)


def _steps_of_small_values(size: int) -> tuple[Bits, Bits]:
    """A change that classes code best."""
    random = np.random.default_rng(5)
    old = random.integers(0x3C00, 0x4000, size, dtype=np.uint16)
    return old, old + ((old < 0x3D00) & (random.random(size) < 0.3)).astype(np.uint16)


@pytest.mark.parametrize("read", [(context, "count_keys"), (codec, "encode")], ids=str)
@pytest.mark.parametrize("late", [slice(7, 8), slice(1, None, 2)], ids=["one", "half"])
def test_a_tensor_that_changes_while_it_is_published_gets_a_payload_of_its_digest(
    monkeypatch: pytest.MonkeyPatch, read: tuple[Any, str], late: slice
) -> None:
    old, new = _steps_of_small_values(40_000)
    right: Callable[..., Any] = getattr(*read)

    def then_changes(*given: Any) -> Any:
        found = right(*given)
        new[late] += 1
        return found

    monkeypatch.setattr(*read, then_changes)
    encoded = encode_as(Encoding.CONTEXT, old, new)
    assert encoded is not None
    delta = decode(Encoding.CONTEXT, memoryview(encoded.payload), _spec(old))
    assert checked_apply(delta, old, hashed=True) == encoded.digest


def test_a_tensor_whose_elements_all_change_takes_no_memory_for_each_change() -> None:
    old = np.random.default_rng(5).integers(0, 1 << 15, 1 << 20, dtype=np.uint16)
    new = old + np.uint16(1)
    encode_as(Encoding.CONTEXT, old, new)
    tracemalloc.start()
    try:
        encode_as(Encoding.CONTEXT, old, new)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 16 * old.size


@pytest.mark.parametrize(("size", "most"), [(4096, 1 << 21), (40_000, 1000)])
def test_a_small_tensor_and_one_of_many_changes_are_coded_as_by_rosemux(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    old, new = _steps_of_small_values(size)
    monkeypatch.setattr(codec, "MOST_CONTEXT_CHANGES", most)
    ours, today = encode_as(Encoding.CONTEXT, old, new), encode(old, new)
    assert ours is not None
    assert today is not None
    assert ours.payload == today.payload
    assert len(classes_payload(old, new)) < len(ours.payload)


@given(steps(), st.data())
@settings(deadline=None, max_examples=200)
def test_a_damaged_payload_is_refused_or_stays_within_its_tensor(
    pair: tuple[Bits, Bits], data: st.DataObject
) -> None:
    old, new = pair
    damaged = bytearray(classes_payload(old, new))
    if not damaged:
        return
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 8))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(Corrupt):
        delta = decode(Encoding.CONTEXT, memoryview(bytes(damaged)), _spec(old))
        guarded = np.full(old.size + 128, 0xA5, dtype=old.dtype)
        guarded[64:-64] = old
        checked_apply(delta, guarded[64:-64])
        assert (guarded[:64] == 0xA5).all()
        assert (guarded[-64:] == 0xA5).all()


def test_a_cut_or_a_sum_of_such_changes_is_refused_by_its_reason() -> None:
    old = np.arange(4096, dtype=np.uint16)
    new = old ^ np.uint16(1)
    payload = classes_payload(old, new)
    with pytest.raises(Unsupported, match="cannot be cut"):
        box_delta(_decoded(payload, old), SliceRecord("", old.shape, (1,), (2,)), 2)
    with pytest.raises(Unsupported, match="do not add up"):
        composed([(Encoding.CONTEXT, memoryview(payload))], _spec(old), "")
    with pytest.raises(Corrupt, match="layout 3"):
        composed([(Encoding.ROSEMUX, memoryview(payload))], _spec(old), "")
