"""Loops that go over tensors in tiles: exact at every edge of one, and where density changes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.elements import kernels
from weightsync.elements.bits import TILE_BYTES, Bits, TensorSpec
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.codec import Encoding, decode, encode, encode_as
from weightsync.encoding.delta import checked_apply

NAMES = {np.uint8: "U8", np.uint16: "BF16", np.uint32: "F32", np.uint64: "I64"}
APPLIED_TILE_BYTES = 16 << 10
DENSITIES = [0.0, 0.0005, 0.02, 0.3, 1.0]
# The first call of a kernel compiles it: no deadlines here.


def _moved(random: np.random.Generator, part: Bits, density: float, far_share: float) -> None:
    """Changes a share of the elements, by one unit in the last place or by anything."""
    top = int(np.iinfo(part.dtype).max)
    hit = np.flatnonzero(random.random(part.size) < density)
    part[hit] += random.choice(np.array([1, top], dtype=part.dtype), hit.size)
    far = hit[random.random(hit.size) < far_share]
    part[far] = random.integers(0, top, far.size, dtype=part.dtype.type, endpoint=True)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """A tensor that ends around the edge of a tile, with stretches of different density."""
    dtype: Any = draw(st.sampled_from(list(NAMES)))
    tile = draw(st.sampled_from([APPLIED_TILE_BYTES, 2 * APPLIED_TILE_BYTES, TILE_BYTES]))
    beyond = draw(st.sampled_from([-65, -64, -1, 0, 1, 63, 64, 513]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = tile // np.dtype(dtype).itemsize + beyond
    old = random.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    new = old.copy()
    far_share = draw(st.sampled_from([0.0, 0.2, 1.0]))
    for part in np.array_split(new, draw(st.integers(1, 5))):
        _moved(random, part, draw(st.sampled_from(DENSITIES)), far_share)
    return old, new


@given(_steps())
@settings(deadline=None, max_examples=60)
def test_a_step_is_restored_whatever_its_tiles_hold(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    spec = TensorSpec(NAMES[old.dtype.type], (old.size,))
    chosen, sparse = encode(old, new), encode_as(Encoding.ROSEMUX, old, new)
    if chosen is None or sparse is None:
        assert (old == new).all()
        return
    for encoded in (chosen, sparse):
        assert encoded.changed == np.count_nonzero(old != new)
        assert encoded.digest == digest_of(new)
        delta = decode(encoded.encoding, memoryview(encoded.payload), spec)
        hashed, plain = old.copy(), old.copy()
        assert checked_apply(delta, hashed, hashed=True) == digest_of(new)
        checked_apply(delta, plain)
        assert (hashed == new).all()
        assert (plain == new).all()


@pytest.mark.parametrize("dtype", list(NAMES))
def test_an_empty_tensor_has_not_changed(dtype: Any) -> None:
    nothing = np.empty(0, dtype=dtype)
    assert encode(nothing, nothing.copy()) is None


@pytest.mark.parametrize("width", list(NAMES))
def test_signs_of_zero_and_payloads_of_nans_survive_in_every_width(width: Any) -> None:
    bits = 8 * np.dtype(width).itemsize
    sign, ones = 1 << (bits - 1), (1 << bits) - 1
    old = np.array([0, sign, sign - 1, ones, 0, sign, 1, 7] * 999, dtype=width)
    new = np.array([sign, 0, ones, sign - 1, 0, sign, 0, 8] * 999, dtype=width)
    encoded = encode_as(Encoding.ROSEMUX, old, new)
    assert encoded is not None
    spec = TensorSpec(NAMES[width], (old.size,))
    delta = decode(Encoding.ROSEMUX, memoryview(encoded.payload), spec)
    assert checked_apply(delta, old, hashed=True) == digest_of(new)
    assert (old == new).all()


@given(st.lists(st.integers(0, 1), max_size=200))
@settings(deadline=None)
def test_signs_are_packed_lowest_first(flags: list[int]) -> None:
    signs = np.array(flags, dtype=np.uint8)
    packed = np.zeros((signs.size + 7) // 8, dtype=np.uint8)
    kernels.pack_signs(signs, packed)
    assert (packed == np.packbits(signs, bitorder="little")).all()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_guess_sees_changes_from_all_over(share: float) -> None:
    old = np.zeros(400_000, dtype=np.uint16)
    new = old.copy()
    new.reshape(-1, 1000)[: int(400 * share)] = 1
    assert abs(kernels.share_changed(old, new, 128, 32) - share) < 0.02
