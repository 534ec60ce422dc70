"""Hot loops over raw bits, compiled by numba; they hold no GIL.

Nothing here checks lengths: codec.py does that before it calls, so that an apply cannot fail
half-way. A difference is taken modulo the element width, so a change by one unit in the last place
is +1 or -1 for every float format, and any other change is still exact.

Gap streams: one byte per change, the number of unchanged elements before it; 255 means 255
unchanged elements and no change yet. Sparse streams are written and applied block by block, so that
what comes next over the same elements (hashing) finds them in the cache: a `Scan` or a `Cursor`
says how far a tensor has come.
"""

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from weightsync.bits import Bits, Bytes
from weightsync.lanes import LANES, first_lane, lane_count, prefetch, step_masks

_P = ParamSpec("_P")
_R = TypeVar("_R")

Places: TypeAlias = npt.NDArray[np.int32]
"""Positions of elements within a block."""

GAP_ESCAPE = 255
_LINE_BYTES = 64
_AHEAD_BYTES = 4096
_LIKELY_SMALL = 8
_LIKELY_FAR = 2
_ONE = np.uint64(1)
_LAST_LANE = np.uint64(LANES - 1)


class Scan(NamedTuple):
    """How far two states were compared: changes so far, and bytes written."""

    small: int = 0
    """Changes by exactly one unit in the last place."""
    far: int = 0
    """All other changes."""
    gap_bytes: int = 0
    far_gap_bytes: int = 0
    last: int = -1
    """Position of the last small change."""
    far_last: int = -1


class Room(NamedTuple):
    """Memory for one block's changes behind those that are there already.

    `small`, `far` and `minus` have room for one group of lanes more than a block has elements.
    """

    small: Places
    far: Places
    minus: Bytes
    """One byte per small change, 1 where it is by minus one."""
    gaps: Bytes
    far_gaps: Bytes
    far_planes: npt.NDArray[np.uint8]
    """Zigzag differences of the far changes, one row per byte of the element."""


class Cursor(NamedTuple):
    """How far one gap stream was applied."""

    at: int = 0
    """Next byte of the stream."""
    position: int = -1
    """The element that the bytes before it lead to."""
    change: int = 0
    """Changes made."""


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    return cast(Callable[_P, _R], numba.njit(cache=True, nogil=True)(function))


@_compiled
def scan_block(
    old: Bits, new: Bits, start: int, stop: int, mask: np.uint64, scan: Scan, room: Room
) -> Scan:
    """Writes the changes of the elements `start` to `stop` behind those of `scan`."""
    smalls, fars = _find_changes(
        old, new, start, stop, mask, room.small, room.minus[scan.small :], room.far
    )
    small, far = room.small[:smalls], room.far[:fars]
    gap_bytes, last = _write_gaps(small, start, scan.last, room.gaps, scan.gap_bytes)
    far_gap_bytes, far_last = _write_gaps(
        far, start, scan.far_last, room.far_gaps, scan.far_gap_bytes
    )
    _write_differences(old, new, start, far, mask, room.far_planes, scan.far)
    return Scan(scan.small + smalls, scan.far + fars, gap_bytes, far_gap_bytes, last, far_last)


@_compiled
def _find_changes(
    old: Bits,
    new: Bits,
    start: int,
    stop: int,
    mask: np.uint64,
    small: Places,
    minus: Bytes,
    far: Places,
) -> tuple[int, int]:
    """Places of all changes from `start` to `stop`, counted from `start`; returns (small, far)."""
    smalls = fars = 0
    line = _LINE_BYTES // old.itemsize
    ahead = _AHEAD_BYTES // old.itemsize
    for group in range(start, stop, LANES):
        for element in range(group, group + LANES, line):
            prefetch(old, element + ahead)
            prefetch(new, element + ahead)
        if group + LANES <= stop:
            changed, by_plus, by_minus = step_masks(old, new, group)
        else:
            changed, by_plus, by_minus = _last_masks(old, new, group, stop, mask)
        near = by_plus | by_minus
        other = changed ^ near
        first = group - start
        # Written whether they are there or not: that there are few is no branch to guess wrong.
        for k in range(_LIKELY_SMALL):
            lane = first_lane(near)
            small[smalls + k] = first + np.int64(lane)
            minus[smalls + k] = (by_minus >> (lane & _LAST_LANE)) & _ONE
            near &= near - _ONE
        rest = smalls + _LIKELY_SMALL
        smalls += lane_count(by_plus | by_minus)
        while near:
            lane = first_lane(near)
            small[rest] = first + np.int64(lane)
            minus[rest] = (by_minus >> lane) & _ONE
            near &= near - _ONE
            rest += 1
        for k in range(_LIKELY_FAR):
            far[fars + k] = first + np.int64(first_lane(other))
            other &= other - _ONE
        rest = fars + _LIKELY_FAR
        fars += lane_count(changed & ~(by_plus | by_minus))
        while other:
            far[rest] = first + np.int64(first_lane(other))
            other &= other - _ONE
            rest += 1
    return smalls, fars


@_compiled
def _write_gaps(places: Places, start: int, last: int, gaps: Bytes, at: int) -> tuple[int, int]:
    """The gaps before ascending places, written from `at` on; returns (next byte, last place)."""
    for i in range(places.size):
        place = start + places[i]
        gap = place - last - 1
        last = place
        while gap >= 255:
            gaps[at] = 255
            at += 1
            gap -= 255
        gaps[at] = gap
        at += 1
    return at, last


@_compiled
def _write_differences(
    old: Bits,
    new: Bits,
    start: int,
    places: Places,
    mask: np.uint64,
    planes: npt.NDArray[np.uint8],
    at: int,
) -> None:
    """Zigzag differences, one row per byte of the element, from column `at` on."""
    for i in range(places.size):
        place = start + places[i]
        code = _zigzag((np.uint64(new[place]) - np.uint64(old[place])) & mask, mask)
        for plane in range(old.itemsize):
            planes[plane, at + i] = np.uint8((code >> np.uint64(8 * plane)) & np.uint64(255))


@_compiled
def _last_masks(
    old: Bits, new: Bits, start: int, stop: int, mask: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """`step_masks` of fewer than 64 elements."""
    changed = plus = minus = np.uint64(0)
    for i in range(start, stop):
        step = (np.uint64(new[i]) - np.uint64(old[i])) & mask
        bit = np.uint64(1) << np.uint64(i - start)
        if step != np.uint64(0):
            changed |= bit
        if step == np.uint64(1):
            plus |= bit
        if step == mask:
            minus |= bit
    return changed, plus, minus


@_compiled
def pack_signs(signs: Bytes, packed: Bytes) -> None:
    """Eight flags of one byte each to a byte, the first one lowest; `packed` is zeroed."""
    for i in range(signs.size):
        packed[i >> 3] |= signs[i] << (i & 7)


@_compiled
def count_changes(old: Bits, new: Bits) -> int:
    """Elements that differ."""
    changed = 0
    for i in range(old.size):
        changed += old[i] != new[i]
    return changed


@_compiled
def _zigzag(difference: np.uint64, mask: np.uint64) -> np.uint64:
    """Small differences of either sign to small numbers: 0, -1, 1, -2 to 0, 1, 2, 3."""
    one = np.uint64(1)
    if difference > (mask >> one):
        return (((~difference) & mask) << one) | one
    return difference << one


@_compiled
def _unzigzag(code: np.uint64) -> np.uint64:
    one = np.uint64(1)
    if code & one:
        return ~(code >> one)
    return code >> one


@_compiled
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


@_compiled
def apply_block(
    bits: Bits,
    start: int,
    stop: int,
    cursor: Cursor,
    far_cursor: Cursor,
    gaps: Bytes,
    signs: Bytes,
    far_gaps: Bytes,
    far_planes: npt.NDArray[np.uint8],
) -> tuple[Cursor, Cursor]:
    """Makes the changes of the elements `start` to `stop`."""
    _fetch(bits, start, stop)
    cursor = _apply_small(bits, stop, cursor, gaps, signs)
    return cursor, _apply_far(bits, stop, far_cursor, far_gaps, far_planes)


@_compiled
def _fetch(bits: Bits, start: int, stop: int) -> int:
    """Reads one element of every cache line in order, and gives their sum.

    Changes far apart would wait for memory one by one; a run in order is foreseen by the processor.
    """
    total = np.uint64(0)
    for i in range(start, stop, _LINE_BYTES // bits.itemsize):
        total += np.uint64(bits[i])
    return int(total)


@_compiled
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


@_compiled
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
        bits[reached] = np.uint64(bits[reached]) + _unzigzag(code)
        change += 1
        position = reached
        at += 1
    return Cursor(at, position, change)


@_compiled
def write_planes(old: Bits, new: Bits, mask: np.uint64, planes: npt.NDArray[np.uint8]) -> None:
    """Zigzag differences of all elements, one row per byte."""
    for i in range(old.size):
        code = _zigzag((np.uint64(new[i]) - np.uint64(old[i])) & mask, mask)
        for plane in range(planes.shape[0]):
            planes[plane, i] = np.uint8((code >> np.uint64(8 * plane)) & np.uint64(255))


@_compiled
def apply_planes(bits: Bits, start: int, stop: int, planes: npt.NDArray[np.uint8]) -> None:
    """Adds the zigzag differences to the elements `start` to `stop`."""
    for i in range(start, stop):
        code = np.uint64(0)
        for plane in range(planes.shape[0]):
            code |= np.uint64(planes[plane, i]) << np.uint64(8 * plane)
        bits[i] = np.uint64(bits[i]) + _unzigzag(code)
