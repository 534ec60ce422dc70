"""Positions of changes in a tensor, and which of them are in a box of it.

Compiled loops that hold no lock of Python's and check no lengths: their callers hold checked
deltas. Gap streams: see scan.py.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bytes
from weightsync.elements.compiled import compiled
from weightsync.elements.group_applying import Gaps
from weightsync.elements.groups import BEFORE_ALL, GROUP, ROOM, Positions, Walk, read_group
from weightsync.elements.scan import GAP_ESCAPE

Numbers: TypeAlias = npt.NDArray[np.int64]
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_WORD = np.uint64(64)


@compiled
def stream_positions(gaps: Bytes, positions: Positions) -> None:
    """Write the position of every change of a gap stream."""
    after, found = _NONE, 0
    for i in range(gaps.size):
        after += np.uint64(gaps[i])
        if gaps[i] != GAP_ESCAPE:
            positions[found] = after
            after += _ONE
            found += 1


@compiled
def group_positions(gaps: Gaps, low_bits: Bytes, positions: Positions) -> None:
    """Write the position of every change whose gap is stored in groups. `low_bits`: one byte for
    each group."""
    changes, first, lows, highs = gaps
    room, group_of = np.empty(ROOM, np.uint16), np.empty(GROUP + 1, np.uint64)
    walk = Walk(0, _NONE, BEFORE_ALL, _NONE, _WORD, _NONE)
    for start in range(0, changes, GROUP):
        count = min(GROUP, changes - start)
        kept = np.uint64(low_bits[first + walk.group])
        walk = read_group(count, kept, lows, highs, walk, room, group_of)
        for i in range(count):
            positions[start + i] = group_of[i]


@compiled
def within_box(positions: Positions, dims: Positions, kept: Numbers, inside: Positions) -> int:
    """Write the index of every position in a box, and its position there; returns their number.

    `dims`: for each dimension the elements between two of its indices, the first index of the box,
    the number of its indices, and the elements between two of them in the box.
    """
    found = 0
    for i in range(positions.size):
        rest, at, is_inside = positions[i], _NONE, True
        for d in range(dims.shape[0]):
            index = rest
            if dims[d, 0] != _ONE:
                index = rest // dims[d, 0]
                rest -= index * dims[d, 0]
            # An index before the first one wraps to a large number.
            index -= dims[d, 1]
            is_inside = is_inside and index < dims[d, 2]
            at += index * dims[d, 3]
        if is_inside:
            kept[found] = i
            inside[found] = at
            found += 1
    return found


@compiled
def pick_signs(signs: Bytes, kept: Numbers, picked: Bytes) -> None:
    """Write the sign bits with these indices; `picked` is zeroed."""
    for i in range(kept.size):
        sign = (signs[kept[i] >> 3] >> np.uint8(kept[i] & 7)) & np.uint8(1)
        picked[i >> 3] |= sign << np.uint8(i & 7)
