"""Sums of boxes add up over any division, and differ where any element does."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.elements.bits import UNSIGNED_NUMPY, Bits
from weightsync.encoding.codec import encode, encode_streams
from weightsync.layout.box_sums import added_up, box_sum, changed_box_sum, run_dims
from weightsync.layout.slices import SliceRecord

_MASK = (1 << 64) - 1


def whole(shape: tuple[int, ...]) -> SliceRecord:
    return SliceRecord("t", shape, (0,) * len(shape), shape)


def word(place: int, unit: int) -> int:
    """splitmix64, by Python's integers."""
    state = (place << 16 | unit) * 0x9E3779B97F4A7C15 & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31


def defined(bits: Bits) -> int:
    """The definition, unit by unit."""
    units = bits if bits.itemsize == 1 else bits.view("<u2")
    return added_up(word(place, int(unit)) for place, unit in enumerate(units))


@st.composite
def divided(draw: st.DrawFn) -> tuple[Bits, tuple[int, ...], list[SliceRecord]]:
    """A tensor's bits, its shape and boxes that divide it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    kind = UNSIGNED_NUMPY[draw(st.sampled_from([1, 2, 4, 8]))]
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    bits = random.integers(0, np.iinfo(kind).max, prod(shape), dtype=kind)
    boxes = [((0,) * len(shape), shape)]
    for dim, size in enumerate(shape):
        at = draw(st.integers(0, size - 1))
        if at:
            boxes = [
                (
                    tuple(o if d == dim else n for d, n in enumerate(offsets)),
                    (*lengths[:dim], c, *lengths[dim + 1 :]),
                )
                for offsets, lengths in boxes
                for o, c in ((0, at), (at, size - at))
            ]
    return bits, shape, [SliceRecord("t", shape, *box) for box in boxes]


@given(divided())
def test_boxes_add_up_to_the_defined_sum(
    case: tuple[Bits, tuple[int, ...], list[SliceRecord]],
) -> None:
    bits, shape, boxes = case
    assert box_sum(bits, whole(shape)) == defined(bits)
    assert added_up(box_sum(box.read(bits), box) for box in boxes) == defined(bits)


@given(divided(), st.data())
def test_a_change_is_known_from_what_differs(
    case: tuple[Bits, tuple[int, ...], list[SliceRecord]], data: st.DataObject
) -> None:
    old, _, boxes = case
    new = old.copy()
    for at in data.draw(st.lists(st.integers(0, old.size - 1), max_size=5)):
        new[at] ^= new.dtype.type(data.draw(st.integers(1, 255)))
    for box in boxes:
        before, after = box.read(old), box.read(new)
        found = changed_box_sum(box_sum(before, box), before, after, box)
        assert found == box_sum(after, box)
        assert (found == box_sum(before, box)) == bool((before == after).all())


@given(divided(), st.floats(0, 1), st.booleans())
def test_an_encoded_change_knows_what_it_adds(
    case: tuple[Bits, tuple[int, ...], list[SliceRecord]], share: float, is_small: bool
) -> None:
    """Changes by one unit and by more, in payloads of every layout, of a slice as of a tensor."""
    old, _, boxes = case
    random = np.random.default_rng(old.size)
    moves = random.integers(1, 4, old.size).astype(old.dtype) * (random.random(old.size) < share)
    new = old + moves.astype(old.dtype)
    for box in boxes:
        before, after = box.read(old), box.read(new)
        encoded = (encode if is_small else encode_streams)(before, after, run_dims(box))
        assert (encoded is None) == bool((before == after).all())
        if encoded is not None:
            assert encoded.sum_change is not None
            found = added_up((box_sum(before, box), encoded.sum_change))
            assert found == box_sum(after, box)


@pytest.mark.parametrize("changed", [0.01, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_a_large_change_knows_what_it_adds(kind: type[np.unsignedinteger], changed: float) -> None:
    random = np.random.default_rng(3)
    old = random.integers(0, 250, 1 << 19).astype(kind)
    moves = random.choice([1, 200], old.size).astype(kind)
    new = np.where(random.random(old.size) < changed, old + moves, old)
    box = SliceRecord("t", (512, 4096), (0, 1024), (512, 1024))
    encoded = encode(old, new, run_dims(box))
    assert encoded is not None
    assert encoded.sum_change is not None
    assert added_up((box_sum(old, box), encoded.sum_change)) == box_sum(new, box)


def test_a_difference_on_another_base_leads_to_another_sum() -> None:
    """A sum that is linear in the bits would be the same for both."""
    base = np.arange(64, dtype=np.uint16)
    other = base.copy()
    other[5] += 1
    box = whole((64,))
    step = np.zeros_like(base)
    step[5] = 3
    moved = [box_sum(bits + step, box) - box_sum(bits, box) for bits in (base, other)]
    assert moved[0] != moved[1]


@pytest.mark.parametrize("lost_bits", [32, 40])
def test_single_changes_look_random(lost_bits: int) -> None:
    """The words that changes by one unit add, cut to few bits, meet as often as random ones."""
    count = 1 << 16
    bits = np.full(count, 0x3F80, np.uint16)
    box = whole((count,))
    start = box_sum(bits, box)
    seen = set()
    for at in range(count):
        one = bits[at : at + 1].copy()
        place = SliceRecord("t", (count,), (at,), (1,))
        seen.add(changed_box_sum(start, one, one + np.uint16(1), place) >> lost_bits)
    room = 1 << (64 - lost_bits)
    expected = room * (1 - (1 - 1 / room) ** count)
    assert abs(len(seen) - expected) < 6 * (count**2 / (2 * room)) ** 0.5 + 6


def test_nothing_has_the_sum_of_nothing() -> None:
    assert box_sum(np.empty(0, np.uint16), whole((3, 0))) == 0
    assert changed_box_sum(0, np.empty(0, np.uint8), np.empty(0, np.uint8), whole((0,))) == 0
