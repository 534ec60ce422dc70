"""Changing a state in place, and the loops over all its elements.

Compiled loops that hold no lock of Python's and check no lengths: codec.py does that before, so
that an apply cannot fail half-way. What gap streams are: see scan.py.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsync.bits import BLOCK_BYTES, Bits, Bytes
from weightsync.compiled import compiled
from weightsync.lanes import prefetch
from weightsync.xxh3 import Accumulators, absorb
from weightsync.zigzag import unzigzag, zigzag

_LINE_BYTES = 64
_AHEAD_BYTES = 128 << 10


class Cursor(NamedTuple):
    """How far one gap stream was applied."""

    at: int = 0
    """Next byte of the stream."""
    position: int = -1
    """The element that the bytes before it lead to."""
    change: int = 0
    """Changes made."""


@compiled
def apply_sparse(
    bits: Bits,
    data: Bytes,
    gaps: Bytes,
    signs: Bytes,
    far_gaps: Bytes,
    far_planes: npt.NDArray[np.uint8],
    sums: Accumulators,
    hashed: bool,
) -> None:
    """Makes all changes; `sums` takes `data`, which is `bits` as bytes, where `hashed`."""
    small, far = Cursor(0, -1, 0), Cursor(0, -1, 0)
    width = bits.itemsize
    for start in range(0, bits.size, BLOCK_BYTES // width):
        stop = min(bits.size, start + BLOCK_BYTES // width)
        _fetch(bits, start, stop)
        small = _apply_small(bits, stop, small, gaps, signs)
        far = _apply_far(bits, stop, far, far_gaps, far_planes)
        if hashed:
            absorb(sums, data, start * width, stop * width)


@compiled
def _fetch(bits: Bits, start: int, stop: int) -> int:
    """Reads one element of every cache line in order, and gives their sum.

    Changes far apart would wait for memory one by one; a run in order is foreseen by the processor.
    """
    total = np.uint64(0)
    for i in range(start, stop, _LINE_BYTES // bits.itemsize):
        total += np.uint64(bits[i])
    return int(total)


@compiled
def _apply_small(bits: Bits, stop: int, cursor: Cursor, gaps: Bytes, signs: Bytes) -> Cursor:
    """Adds or subtracts one unit in the last place at each position before `stop`."""
    at, position, change = cursor
    ahead = _AHEAD_BYTES // bits.itemsize
    while at < gaps.size:
        # An escape adds nothing where it leads to: no branch that depends on the data.
        moves = gaps[at] != 255
        reached = position + gaps[at] + moves
        if reached >= stop:
            break
        prefetch(bits, reached + ahead)
        minus = (signs[change >> 3] >> (change & 7)) & 1
        bits[reached] = np.uint64(bits[reached]) + np.uint64(moves * (1 - 2 * minus))
        change += moves
        position = reached
        at += 1
    return Cursor(at, position, change)


@compiled
def _apply_far(
    bits: Bits, stop: int, cursor: Cursor, gaps: Bytes, planes: npt.NDArray[np.uint8]
) -> Cursor:
    """Adds the zigzag difference at each position before `stop`."""
    at, position, change = cursor
    while at < gaps.size:
        if gaps[at] == 255:
            position += 255
            at += 1
            continue
        reached = position + gaps[at] + 1
        if reached >= stop:
            break
        code = np.uint64(0)
        for plane in range(planes.shape[0]):
            code |= np.uint64(planes[plane, change]) << np.uint64(8 * plane)
        bits[reached] = np.uint64(bits[reached]) + unzigzag(code)
        change += 1
        position = reached
        at += 1
    return Cursor(at, position, change)


@compiled
def gaps_end(gaps: Bytes) -> tuple[int, int]:
    """(changes, position after the last change) that a gap stream describes.

    A stream that ends in an escape gives (-1, -1).
    """
    if gaps.size and gaps[gaps.size - 1] == 255:
        return -1, -1
    unchanged = 0
    changes = 0
    for i in range(gaps.size):
        unchanged += gaps[i]
        changes += gaps[i] != 255
    return changes, unchanged + changes


@compiled
def count_changes(old: Bits, new: Bits) -> int:
    """Elements that differ."""
    changed = 0
    for i in range(old.size):
        changed += old[i] != new[i]
    return changed


@compiled
def pack_signs(signs: Bytes, packed: Bytes) -> None:
    """Eight flags of one byte each to a byte, the first one lowest; `packed` is zeroed."""
    for i in range(signs.size):
        packed[i >> 3] |= signs[i] << (i & 7)


@compiled
def write_planes(old: Bits, new: Bits, planes: npt.NDArray[np.uint8]) -> None:
    """Zigzag differences of all elements, one row per byte."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * old.itemsize)
    # One row after another: a loop over many elements is what the vector unit is for.
    for plane in range(planes.shape[0]):
        shift = np.uint64(8 * plane)
        for i in range(old.size):
            code = zigzag((np.uint64(new[i]) - np.uint64(old[i])) & mask, mask)
            planes[plane, i] = np.uint8((code >> shift) & np.uint64(255))


@compiled
def apply_planes(bits: Bits, planes: npt.NDArray[np.uint8]) -> None:
    """Adds the zigzag differences to all elements."""
    if planes.shape[0] == 2:
        low, high = planes[0], planes[1]
        for i in range(bits.size):
            code = np.uint64(low[i]) | (np.uint64(high[i]) << np.uint64(8))
            bits[i] = np.uint64(bits[i]) + unzigzag(code)
        return
    for i in range(bits.size):
        code = np.uint64(0)
        for plane in range(planes.shape[0]):
            code |= np.uint64(planes[plane, i]) << np.uint64(8 * plane)
        bits[i] = np.uint64(bits[i]) + unzigzag(code)
