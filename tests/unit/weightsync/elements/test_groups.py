"""Both readers of gap groups agree, and their predicted sizes are exact."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.elements.bits import Bytes
from weightsync.elements.group_writing import highs_room, write_groups
from weightsync.elements.groups import (
    END,
    GROUP,
    MAX_LOW_BITS,
    ROOM,
    Walk,
    count_group,
    groups_end,
    low_bits_of,
    pick_group,
)
from weightsync.elements.picked import IS_KNOWN

# The first call of a kernel compiles it: no deadlines here.


def _gap_stream(gaps: list[int]) -> Bytes:
    """The gap stream as scan.py writes it."""
    stream = [byte for gap in gaps for byte in (*[255] * (gap // 255), gap % 255)]
    return np.array(stream, dtype=np.uint8)


def _written(gaps: list[int]) -> tuple[Bytes, Bytes, Bytes]:
    """(low bits, two groups a byte; lows; highs)."""
    stream, groups = _gap_stream(gaps), -(-len(gaps) // GROUP)
    low_bits = np.zeros(groups + 1, np.uint8)
    lows = np.zeros(8 * MAX_LOW_BITS * groups, np.uint8)
    highs = np.zeros(highs_room(len(gaps), sum(gaps) + len(gaps)), np.uint8)
    made = write_groups(stream, len(gaps), low_bits[:groups], lows, highs)
    halves = low_bits[: groups + groups % 2]
    return halves[::2] | halves[1::2] << 4, lows[: made[0]], highs[: made[1]]


def _positions(reading: Any, count: int, low_bits: Bytes, lows: Bytes, highs: Bytes) -> list[int]:
    """Positions of all changes, and a 65th entry after each group."""
    room, positions, walk = np.empty(ROOM, np.uint16), np.empty(GROUP + 1, np.uint64), Walk()
    found: list[int] = []
    for first in range(0, count, GROUP):
        changes = min(GROUP, count - first)
        kept = low_bits_of(low_bits, first // GROUP)
        # A compiled loop returns plain numbers and accepts none.
        group, *unsigned = reading(changes, np.uint64(kept), lows, highs, walk, room, positions)
        walk = Walk(group, *map(np.uint64, unsigned))
        found += map(int, positions[: changes + 1])
    return found


@st.composite
def _gaps(draw: st.DrawFn) -> list[int]:
    """Stretches of one density each, and some much longer gaps."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gaps: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        mean = draw(st.sampled_from([0, 1, 20, 120, 700]))
        gaps += map(int, random.geometric(1 / (mean + 1), draw(st.integers(0, 200))) - 1)
    for at in draw(st.lists(st.integers(0, max(0, len(gaps) - 1)), max_size=3)):
        if gaps:
            gaps[at] += draw(st.sampled_from([254, 255, 5000, 300_000]))
    return gaps


@given(_gaps())
@settings(deadline=None, max_examples=150)
def test_both_ways_read_what_was_written(gaps: list[int]) -> None:
    low_bits, lows, highs = _written(gaps)
    ends = np.cumsum(np.array(gaps, dtype=np.int64) + 1)
    expected: list[int] = []
    for first in range(0, len(gaps), GROUP):
        expected += [*(int(end) - 1 for end in ends[first : first + GROUP]), int(END)]
    assert _positions(count_group, len(gaps), low_bits, lows, highs) == expected
    if IS_KNOWN and max(int(kept) for kept in (*(low_bits & 15), *(low_bits >> 4), 0)) <= 9:
        assert _positions(pick_group, len(gaps), low_bits, lows, highs) == expected
    if gaps:
        assert groups_end(len(gaps), low_bits, 0, lows, highs) == ends[-1]


@pytest.mark.parametrize("zeros", [60_000, 65_535, 70_000, 1 << 20])
def test_a_code_of_very_many_zeros_is_read(zeros: int) -> None:
    """A forged payload: few low bits and a gap that needs many."""
    bits = np.zeros(zeros + 128 - zeros % 64, np.uint8)
    bits[[3, zeros]] = 1
    highs = np.packbits(bits, bitorder="little")
    lows, low_bits = np.empty(0, np.uint8), np.zeros(1, np.uint8)
    expected = [3, zeros, int(END)]
    for reading in (count_group, pick_group) if IS_KNOWN else (count_group,):
        assert _positions(reading, 2, low_bits, lows, highs) == expected
