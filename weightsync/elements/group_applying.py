"""Changes a state in place by gaps in groups.

Compiled loops that hold no lock of Python's and check no lengths: encoding/grouped.py did before.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bits, Bytes
from weightsync.elements.compiled import compiled, inlined
from weightsync.elements.groups import (
    BEFORE_ALL,
    END,
    GROUP,
    ROOM,
    WORD_BYTES,
    Lows,
    Positions,
    Walk,
    low_bits_of,
    read_group,
)
from weightsync.elements.kernels import APPLIED_BYTES, pass_tile, unzigzag
from weightsync.elements.lanes import put_signs, width_of, word_at
from weightsync.elements.xxh3 import Accumulators

NEAREST_FAR = 3
"""Smallest zigzag difference of more than one unit either way."""
INDEX_BYTES = 4
"""Bytes of the number of a far change with a wide difference."""
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_WORD = np.uint64(64)
_NEAREST_FAR = np.uint64(NEAREST_FAR)


Signed: TypeAlias = npt.NDArray[np.int8]
"""1 or -1 for each change of a group."""


class Gaps(NamedTuple):
    """The gaps of `changes` changes, or their differences; see groups.py."""

    changes: int
    first: int
    """Index of their first group in `low_bits`."""
    lows: Bytes
    highs: Bytes


class _Small(NamedTuple):
    """Progress of the changes by one unit."""

    walk: Walk
    next: np.uint64
    """Index of the next change in the group last read."""


class _Far(NamedTuple):
    """Progress of all other changes."""

    walk: Walk
    codes: Walk
    next: np.uint64
    behind: np.uint64
    """End of the previous code; codes are stored as gaps are."""
    number: np.uint64
    """Index of the next change among all far changes."""
    entry: np.uint64
    """Offset of the next entry in `wide`."""
    next_wide: np.uint64
    """Index of that entry's change; END after the last entry."""


@compiled
def apply_grouped(
    bits: Bits,
    data: Bytes,
    low_bits: Bytes,
    small: Gaps,
    signs: Bytes,
    far: Gaps,
    codes: Gaps,
    wide: Bytes,
    sums: Accumulators,
    hashed: bool,
) -> None:
    """Make all changes; `sums` takes `data`, which is `bits` as bytes, where `hashed`."""
    room, signed = np.empty(ROOM, np.uint16), np.empty(GROUP, np.int8)
    positions, far_at = np.empty(GROUP + 1, np.uint64), np.empty(GROUP + 1, np.uint64)
    far_codes = np.empty(GROUP + 1, np.uint64)
    positions[0] = far_at[0] = END
    start_walk = Walk(0, _NONE, BEFORE_ALL, _NONE, _WORD, _NONE)
    smalls = _Small(start_walk, _NONE)
    fars = _Far(start_walk, start_walk, _NONE, _NONE, _NONE, _NONE, _next_wide(wide, _NONE))
    width = width_of(bits)
    for start in range(0, bits.size, APPLIED_BYTES // width):
        end = min(bits.size, start + APPLIED_BYTES // width)
        stop = np.uint64(end)
        smalls = _apply_small(bits, stop, small, low_bits, signs, smalls, room, signed, positions)
        fars = _apply_far(bits, stop, far, codes, low_bits, wide, fars, room, far_at, far_codes)
        pass_tile(data, start * width, end * width, sums, hashed)


@inlined
def _apply_small(
    bits: Bits,
    stop: np.uint64,
    gaps: Gaps,
    low_bits: Bytes,
    signs: Bytes,
    done: _Small,
    room: Lows,
    signed: Signed,
    positions: Positions,
) -> _Small:
    """Add or subtract one unit in the last place at each position before `stop`."""
    changes, _, lows, highs = gaps
    walk, change = done
    while True:
        position = positions[change]
        while position < stop:
            bits[position] = np.uint64(bits[position]) + np.uint64(np.int64(signed[change]))
            change += _ONE
            position = positions[change]
        left = changes - GROUP * walk.group
        if position != END or left <= 0:
            return _Small(walk, change)
        put_signs(signed, word_at(signs, np.uint64(WORD_BYTES * walk.group)))
        kept = low_bits_of(low_bits, walk.group)
        walk = read_group(min(GROUP, left), kept, lows, highs, walk, room, positions)
        change = _NONE


@inlined
def _apply_far(
    bits: Bits,
    stop: np.uint64,
    gaps: Gaps,
    differences: Gaps,
    low_bits: Bytes,
    wide: Bytes,
    done: _Far,
    room: Lows,
    positions: Positions,
    codes: Positions,
) -> _Far:
    """Add the zigzag difference at each position before `stop`."""
    changes, first, lows, highs = gaps
    _, _, code_lows, code_highs = differences
    walk, code_walk, change, behind, number, entry, next_wide = done
    while True:
        position = positions[change]
        while position < stop:
            code = codes[change] - behind + _NEAREST_FAR
            behind = codes[change] + _ONE
            if number == next_wide:
                code = _number(wide, entry + np.uint64(INDEX_BYTES), width_of(bits))
                entry += np.uint64(INDEX_BYTES + width_of(bits))
                next_wide = _next_wide(wide, entry)
            bits[position] = np.uint64(bits[position]) + unzigzag(code)
            number += _ONE
            change += _ONE
            position = positions[change]
        left = changes - GROUP * walk.group
        if position != END or left <= 0:
            return _Far(walk, code_walk, change, behind, number, entry, next_wide)
        count, group = min(GROUP, left), first + walk.group
        kept = low_bits_of(low_bits, group)
        walk = read_group(count, kept, lows, highs, walk, room, positions)
        kept = low_bits_of(low_bits, group + (changes + GROUP - 1) // GROUP)
        code_walk = read_group(count, kept, code_lows, code_highs, code_walk, room, codes)
        change = _NONE


@compiled
def _next_wide(wide: Bytes, entry: np.uint64) -> np.uint64:
    """Index of the far change of the entry at that byte; END after the last entry."""
    return END if entry >= np.uint64(wide.size) else _number(wide, entry, INDEX_BYTES)


@compiled
def _number(data: Bytes, at: np.uint64, size: int) -> np.uint64:
    """`size` bytes from byte `at` on, least significant first."""
    number = _NONE
    for byte in range(size):
        number |= np.uint64(data[at + np.uint64(byte)]) << np.uint64(8 * byte)
    return number
