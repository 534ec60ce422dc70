"""Compares two states: finds every change once, and hashes the new state in the same pass.

Compiled loops that release Python's lock and check no lengths: sparse.py reserves their buffers. A
difference is taken modulo the element width, so a change by one unit in the last place is +1 or -1
for every float format, and any other change is still exact.

Gap streams: one byte per change, the number of unchanged elements before it; 255 means 255
unchanged elements and no change yet.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import TILE_BYTES, Bits, Bytes
from weightsync.elements.compiled import compiled, inlined
from weightsync.elements.kernels import zigzag
from weightsync.elements.lanes import (
    LANES,
    behind_last_lane,
    first_lane,
    lane_count,
    prefetch_lanes,
    step_masks,
    width_of,
)
from weightsync.elements.picked import IS_QUICK, put_distances, put_escapes, put_flags, put_lanes
from weightsync.elements.xxh3 import Accumulators, absorb

Offsets: TypeAlias = npt.NDArray[np.int32]
"""Positions of elements within a tile."""

GAP_ESCAPE = 255
_AHEAD_BYTES = 4096
_PICKED_BYTES = 4 << 10
"""Bytes compared, then hashed, while the nearest cache holds them."""
_ESCAPES = 16
"""Escape bytes written in any case, needed or not."""
_MOST_SMALL = 8
_MOST_FAR = 4
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_BYTE = np.uint64(255)
_LAST_LANE = np.uint64(LANES - 1)


class Scan(NamedTuple):
    """Progress of the comparison of two states: changes and bytes written so far."""

    small: int = 0
    """Changes by exactly one unit in the last place."""
    far: int = 0
    """All other changes."""
    gap_bytes: int = 0
    far_gap_bytes: int = 0
    after: int = 0
    """Position after the last small change."""
    far_after: int = 0


class Room(NamedTuple):
    """Buffers for further changes, after the present ones."""

    small: Offsets
    """Small changes of one tile. Every buffer has two groups of lanes to spare."""
    far: Offsets
    minus: Bytes
    """One byte per small change; 1 for a change by minus one."""
    gaps: Bytes
    far_gaps: Bytes
    far_planes: npt.NDArray[np.uint8]
    """Zigzag differences of the far changes, one row per byte of the element."""


@compiled
def scan_counting(
    old: Bits,
    new: Bits,
    data: Bytes,
    start: int,
    stop: int,
    scan: Scan,
    room: Room,
    sums: Accumulators,
) -> Scan:
    """Append the changes of the elements `start` to `stop` to the changes of `scan`.

    `data` is `new` as bytes, which `sums` absorbs up to `stop`; `start` begins a tile.
    """
    width = width_of(old)
    # Changes of a group that are written in any case, present or not.
    likely_small, likely_far = _MOST_SMALL, _MOST_FAR
    for first in range(start, stop, TILE_BYTES // width):
        end = min(stop, first + TILE_BYTES // width)
        before = scan
        scan = _scan_tile(old, new, first, end, scan, room, likely_small, likely_far)
        # Adjacent tiles are alike: twice the last tile's changes per group, plus one.
        groups = max(1, (end - first) // LANES)
        likely_small = min(_MOST_SMALL, 2 * (scan.small - before.small) // groups + 1)
        likely_far = min(_MOST_FAR, 2 * (scan.far - before.far) // groups + 1)
        absorb(sums, data, first * width, end * width)
    return scan


@compiled
def scan_picking(
    old: Bits,
    new: Bits,
    data: Bytes,
    start: int,
    stop: int,
    scan: Scan,
    room: Room,
    sums: Accumulators,
) -> Scan:
    """`scan_counting` by instructions that compress lanes."""
    width = width_of(old)
    for first in range(start, stop, _PICKED_BYTES // width):
        end = min(stop, first + _PICKED_BYTES // width)
        whole = end - (end - first) % LANES
        scan = _pick_tile(old, new, first, whole, scan, room)
        if whole < end:
            scan = _scan_tile(old, new, whole, end, scan, room, _MOST_SMALL, _MOST_FAR)
        absorb(sums, data, first * width, end * width)
    return scan


@compiled
def _pick_tile(old: Bits, new: Bits, start: int, stop: int, scan: Scan, room: Room) -> Scan:
    """Compare whole groups of lanes."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * width_of(old))
    small, at, after = np.uint64(scan.small), np.uint64(scan.gap_bytes), np.uint64(scan.after)
    fars = _NONE
    for group in range(start, stop, LANES):
        prefetch_lanes(old, group, _AHEAD_BYTES)
        prefetch_lanes(new, group, _AHEAD_BYTES)
        changed, by_plus, by_minus = step_masks(old, new, group)
        near = by_plus | by_minus
        other = changed ^ near
        first = np.uint64(group)
        at, after = _pick_gaps(near, first, after, room.gaps, at)
        put_flags(room.minus, small, by_minus, near)
        small += lane_count(near)
        put_lanes(room.far, fars, other, first - np.uint64(start))
        fars += lane_count(other)
    far_positions = room.far[:fars]
    far_gap_bytes, far_after = write_gaps(
        far_positions, start, scan.far_after, room.far_gaps, scan.far_gap_bytes
    )
    _write_differences(old, new, start, far_positions, mask, room.far_planes, scan.far)
    return Scan(
        int(np.int64(small)),
        scan.far + far_positions.size,
        int(np.int64(at)),
        far_gap_bytes,
        int(np.int64(after)),
        far_after,
    )


@inlined
def _pick_gaps(
    mask: np.uint64, first: np.uint64, after: np.uint64, gaps: Bytes, at: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Write the gaps before the picked lanes of one group, whose first element is `first`.

    Returns (next byte, position after the last change). No branch depends on the changes.
    """
    is_any = np.uint64(mask != _NONE)
    gap = (first + first_lane(mask) - after) * is_any
    escapes = gap // _BYTE
    put_escapes(gaps, at)
    for more in range(_ESCAPES, np.int64(escapes)):
        gaps[at + np.uint64(more)] = 255
    at += escapes
    put_distances(gaps, at, mask)
    gaps[at] = gap - escapes * _BYTE
    behind = first + behind_last_lane(mask)
    return at + lane_count(mask), after + (behind - after) * is_any


scan_elements = scan_picking if IS_QUICK else scan_counting


@compiled
def _scan_tile(
    old: Bits,
    new: Bits,
    start: int,
    stop: int,
    scan: Scan,
    room: Room,
    likely_small: int,
    likely_far: int,
) -> Scan:
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * width_of(old))
    minus = room.minus[scan.small :]
    smalls, fars = _find_changes(
        old, new, start, stop, mask, room.small, minus, room.far, likely_small, likely_far
    )
    small, far = room.small[:smalls], room.far[:fars]
    gap_bytes, after = write_gaps(small, start, scan.after, room.gaps, scan.gap_bytes)
    far_gap_bytes, far_after = write_gaps(
        far, start, scan.far_after, room.far_gaps, scan.far_gap_bytes
    )
    _write_differences(old, new, start, far, mask, room.far_planes, scan.far)
    return Scan(scan.small + smalls, scan.far + fars, gap_bytes, far_gap_bytes, after, far_after)


@compiled
def _find_changes(
    old: Bits,
    new: Bits,
    start: int,
    stop: int,
    mask: np.uint64,
    small: Offsets,
    minus: Bytes,
    far: Offsets,
    likely_small: int,
    likely_far: int,
) -> tuple[int, int]:
    """Find all positions of changes before `stop`, relative to `start`; returns (small, far)."""
    smalls = fars = _NONE
    # Repeated here so that the compiler unrolls the loop: it needs to know its end.
    likely_small, likely_far = min(likely_small, _MOST_SMALL), min(likely_far, _MOST_FAR)
    for group in range(start, stop, LANES):
        prefetch_lanes(old, group, _AHEAD_BYTES)
        prefetch_lanes(new, group, _AHEAD_BYTES)
        if group + LANES <= stop:
            changed, by_plus, by_minus = step_masks(old, new, group)
        else:
            changed, by_plus, by_minus = _last_masks(old, new, group, stop, mask)
        near = by_plus | by_minus
        other = changed ^ near
        first = np.uint64(group - start)
        smalls_then, fars_then = smalls + lane_count(near), fars + lane_count(other)
        # Written in any case, present or not, which avoids a branch that would mispredict.
        for k in range(likely_small):
            lane = first_lane(near)
            small[smalls + np.uint64(k)] = first + lane
            minus[smalls + np.uint64(k)] = (by_minus >> (lane & _LAST_LANE)) & _ONE
            near &= near - _ONE
        rest = smalls + np.uint64(likely_small)
        while near:
            lane = first_lane(near)
            small[rest] = first + lane
            minus[rest] = (by_minus >> lane) & _ONE
            near &= near - _ONE
            rest += _ONE
        for k in range(likely_far):
            far[fars + np.uint64(k)] = first + first_lane(other)
            other &= other - _ONE
        rest = fars + np.uint64(likely_far)
        while other:
            far[rest] = first + first_lane(other)
            other &= other - _ONE
            rest += _ONE
        smalls, fars = smalls_then, fars_then
    return int(np.int64(smalls)), int(np.int64(fars))


@compiled
def write_gaps(
    found: npt.NDArray[np.integer], start: int, after: int, gaps: Bytes, at: int
) -> tuple[int, int]:
    """Write the gaps before ascending positions, counted from `start`, from byte `at` on.

    Returns (next byte, position after the last change). Unsigned throughout: an index that may be
    negative costs a test.
    """
    base, unchanged_from, byte = np.uint64(start), np.uint64(after), np.uint64(at)
    for i in range(found.size):
        position = base + np.uint64(found[i])
        gap = position - unchanged_from
        unchanged_from = position + _ONE
        while gap >= _BYTE:
            gaps[byte] = 255
            byte += _ONE
            gap -= _BYTE
        gaps[byte] = gap
        byte += _ONE
    return int(np.int64(byte)), int(np.int64(unchanged_from))


@compiled
def _write_differences(
    old: Bits,
    new: Bits,
    start: int,
    positions: Offsets,
    mask: np.uint64,
    planes: npt.NDArray[np.uint8],
    at: int,
) -> None:
    """Write zigzag differences, one row per byte of the element, from column `at` on."""
    base, column = np.uint64(start), np.uint64(at)
    for i in range(positions.size):
        position = base + np.uint64(positions[i])
        code = zigzag((np.uint64(new[position]) - np.uint64(old[position])) & mask, mask)
        for plane in range(width_of(old)):
            planes[plane, column] = np.uint8((code >> np.uint64(8 * plane)) & _BYTE)
        column += _ONE


@compiled
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
