"""Changing a state in place, and the loops over all its elements.

Compiled loops that hold no lock of Python's and check no lengths: delta.py did before, so that an
apply cannot fail half-way. scan.py describes gap streams.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bits, Bytes
from weightsync.elements.compiled import compiled, inlined
from weightsync.elements.lanes import prefetch, width_of
from weightsync.elements.xxh3 import BLOCK_BYTES, Accumulators, absorb

_NONE = np.uint64(0)
_ONE = np.uint64(1)
_LINE_BYTES = 64
APPLIED_BYTES = 2 << 10
"""Bytes that are changed and then hashed at a time. The processor prefetches the next tile while
this one is hashed."""
_AHEAD_BYTES = 4 << 10
"""Distance of explicit prefetches, in bytes: no processor fetches across a page by itself."""
_ESCAPE = np.uint64(255)


@compiled
def zigzag(difference: np.uint64, mask: np.uint64) -> np.uint64:
    """The code of a difference modulo `mask` + 1: 0, -1, 1, -2 become 0, 1, 2, 3.

    Branch-free: signs are random, and a misprediction costs more than the rest.
    """
    negative = np.uint64(difference > (mask >> _ONE))
    return ((difference << _ONE) ^ (_NONE - negative)) & mask


@compiled
def unzigzag(code: np.uint64) -> np.uint64:
    """The difference modulo 2 to the 64th."""
    return (code >> _ONE) ^ (_NONE - (code & _ONE))


class Cursor(NamedTuple):
    """How far one gap stream was applied. Unsigned: an index that may be negative costs a test."""

    at: np.uint64 = _NONE
    """Next byte of the stream."""
    after: np.uint64 = _NONE
    """The position behind the element that the bytes before it lead to."""
    change: np.uint64 = _NONE
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
    small, far = Cursor(_NONE, _NONE, _NONE), Cursor(_NONE, _NONE, _NONE)
    width = width_of(bits)
    for start in range(0, bits.size, APPLIED_BYTES // width):
        stop = min(bits.size, start + APPLIED_BYTES // width)
        small = _apply_small(bits, stop, small, gaps, signs)
        far = _apply_far(bits, stop, far, far_gaps, far_planes)
        pass_tile(data, start * width, stop * width, sums, hashed)


@inlined
def pass_tile(data: Bytes, start: int, stop: int, sums: Accumulators, hashed: bool) -> None:
    """Hashes `data` from `start` to `stop`, asking for what lies ahead between the steps."""
    for at in range(start, stop, BLOCK_BYTES):
        for line in range(at, at + BLOCK_BYTES, _LINE_BYTES):
            prefetch(data, line + _AHEAD_BYTES)
        if hashed:
            absorb(sums, data, at, min(stop, at + BLOCK_BYTES))


@compiled
def _apply_small(bits: Bits, stop: int, cursor: Cursor, gaps: Bytes, signs: Bytes) -> Cursor:
    """Adds or subtracts one unit in the last place at each position before `stop`."""
    at, after, change = cursor
    while at < np.uint64(gaps.size):
        gap = np.uint64(gaps[at])
        # An escape adds 0 at its position, so that no branch depends on the data.
        moves = np.uint64(gap != _ESCAPE)
        then = after + gap + moves
        if then > np.uint64(stop):
            break
        position = then - _ONE
        minus = (np.uint64(signs[change >> np.uint64(3)]) >> (change & np.uint64(7))) & _ONE
        bits[position] = np.uint64(bits[position]) + moves * (_ONE - (minus << _ONE))
        change += moves
        after = then
        at += _ONE
    return Cursor(at, after, change)


@compiled
def _apply_far(
    bits: Bits, stop: int, cursor: Cursor, gaps: Bytes, planes: npt.NDArray[np.uint8]
) -> Cursor:
    """Adds the zigzag difference at each position before `stop`."""
    at, after, change = cursor
    while at < np.uint64(gaps.size):
        gap = np.uint64(gaps[at])
        if gap == _ESCAPE:
            after += _ESCAPE
            at += _ONE
            continue
        position = after + gap
        if position >= np.uint64(stop):
            break
        code = _NONE
        # The width, not the rows: the compiler knows it and needs no loop.
        for plane in range(width_of(bits)):
            code |= np.uint64(planes[plane, change]) << np.uint64(8 * plane)
        bits[position] = np.uint64(bits[position]) + unzigzag(code)
        change += _ONE
        after = position + _ONE
        at += _ONE
    return Cursor(at, after, change)


@compiled
def gaps_end(gaps: Bytes) -> tuple[int, int]:
    """(changes, position after the last) of a gap stream; (-1, -1) if it ends in an escape."""
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
def share_changed(old: Bits, new: Bits, runs: int, run: int) -> float:
    """Share of elements that differ, of `runs` runs of `run` neighbours from all over."""
    changed = 0
    step = old.size // runs
    for start in range(0, runs * step, step):
        for i in range(start, start + run):
            changed += old[i] != new[i]
    return changed / (runs * run)


@compiled
def pack_signs(signs: Bytes, packed: Bytes) -> None:
    """Eight flags of one byte each to a byte, the first one lowest; `packed` is zeroed."""
    whole = signs.size // 8
    for byte in range(whole):
        bits = np.uint8(0)
        for k in range(8):
            bits |= signs[8 * byte + k] << k
        packed[byte] = bits
    for i in range(8 * whole, signs.size):
        packed[whole] |= signs[i] << (i & 7)


@compiled
def write_planes(old: Bits, new: Bits, planes: npt.NDArray[np.uint8]) -> None:
    """Zigzag differences of all elements, one row per byte."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * width_of(old))
    # One row after another: the vector unit handles a loop over many elements best.
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
