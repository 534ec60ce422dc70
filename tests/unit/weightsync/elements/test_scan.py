"""Both ways of comparing write the same bytes, whichever this processor takes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.elements import xxh3
from weightsync.elements.bits import Bits, bytes_of
from weightsync.elements.lanes import LANES
from weightsync.elements.picked import IS_KNOWN
from weightsync.elements.scan import Room, Scan, scan_counting, scan_picking
from weightsync.elements.xxh3 import Accumulators

pytestmark = pytest.mark.skipif(not IS_KNOWN, reason="one way only with this LLVM")
WIDTHS: list[Any] = [np.uint8, np.uint16, np.uint32, np.uint64]
# The first call of a kernel compiles it: no deadlines here.


@st.composite
def _steps(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Any number of elements, in stretches where nothing, little or everything changes."""
    dtype = draw(st.sampled_from(WIDTHS))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = int(np.iinfo(dtype).max)
    old = random.integers(0, top, draw(st.integers(0, 9000)), dtype=dtype, endpoint=True)
    new = old.copy()
    for part in np.array_split(new, draw(st.integers(1, 4))):
        hit = np.flatnonzero(
            random.random(part.size) < draw(st.sampled_from([0, 1e-3, 0.1, 0.5, 1]))
        )
        step = random.choice(np.array([1, top, 2, top - 1, 77, 1 << 7], dtype=dtype), hit.size)
        part[hit] += step
    return old, new


def _compared(scanning: Any, old: Bits, new: Bits, *, cut: int) -> tuple[Any, ...]:
    """In two calls, the first of them up to element `cut`."""
    room = Room(
        *(np.empty(2 * old.size + 2 * LANES, np.int32) for _ in range(2)),
        *(np.empty(2 * old.size + 2 * LANES, np.uint8) for _ in range(3)),
        np.empty((8, 2 * old.size + 2 * LANES), np.uint8),
    )
    sums: Accumulators = xxh3.started()
    scan = Scan()
    for start, stop in ((0, cut), (cut, old.size)):
        scan = Scan(*scanning(old, new, bytes_of(new), start, stop, scan, room, sums))
    return (
        tuple(map(int, scan)),
        room.minus[: scan.small].tolist(),
        room.gaps[: scan.gap_bytes].tolist(),
        room.far_gaps[: scan.far_gap_bytes].tolist(),
        room.far_planes[: old.itemsize, : scan.far].tolist(),
        sums.tolist(),
    )


@given(_steps(), st.integers(0, 2))
@settings(deadline=None, max_examples=80)
def test_both_ways_find_the_same_changes(pair: tuple[Bits, Bits], blocks: int) -> None:
    old, new = pair
    cut = min(old.size, blocks * 4096 // old.itemsize)
    assert _compared(scan_picking, old, new, cut=cut) == _compared(scan_counting, old, new, cut=cut)


@pytest.mark.parametrize("gap", [0, 63, 64, 254, 255, 256, 509, 510, 16 * 255, 40 * 255 + 3])
@pytest.mark.parametrize("step", [1, 9])
def test_gaps_around_the_escape_are_found_alike(gap: int, step: int) -> None:
    old = np.zeros(gap + 5000, dtype=np.uint16)
    new = old.copy()
    new[[0, gap + 1, gap + 2, gap + 300]] += np.uint16(step)
    found = _compared(scan_picking, old, new, cut=0)
    assert found == _compared(scan_counting, old, new, cut=0)
    assert found[0][:2] == ((4, 0) if step == 1 else (0, 4))
