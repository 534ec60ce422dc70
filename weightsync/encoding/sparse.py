"""Builds the streams of a sparse delta.

Two states are compared once, into buffers large enough for any change, and the new state is hashed
in the same pass, so a publisher reads each state once.
"""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.elements import kernels, xxh3
from weightsync.elements.bits import TILE_BYTES, Bits, Bytes, bytes_of
from weightsync.elements.lanes import LANES
from weightsync.elements.scan import GAP_ESCAPE, Room, Scan, scan_elements
from weightsync.elements.state_hash import digest_from

FORMAT = 1
SPARSE = 0
"""Layout number of a payload that holds these streams."""
_MAX_WIDTH_BYTES = 8
_SPARE = 2 * LANES
"""Loops write whole groups of lanes."""
CHUNK_BYTES = 64 * TILE_BYTES
"""Bytes compared in one call; buffers for all possible changes are reserved before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseStreams:
    """Changes between two states; the arrays are valid until this thread compares again."""

    small: int
    far: int
    gaps: Bytes
    signs: Bytes
    far_gaps: Bytes
    far_planes: npt.NDArray[np.uint8]
    digest: str
    """xxh3-128 of the new state."""

    @property
    def changed(self) -> int:
        return self.small + self.far


class _Scratch(threading.local):
    """Buffers that a thread keeps: fresh pages would cost more than the changes written there."""

    def __init__(self) -> None:
        places = np.empty(TILE_BYTES + _SPARE, dtype=np.int32)
        nothing = np.empty(0, dtype=np.uint8)
        planes = np.empty((_MAX_WIDTH_BYTES, 0), dtype=np.uint8)
        self.room = Room(places, places.copy(), nothing, nothing, nothing, planes)

    def reserve(self, scan: Scan, stop: int, elements: int) -> Room:
        """Buffers for `elements` more elements before index `stop`."""
        room = self.room
        # Includes a gap that began before these elements and ends in them.
        escapes = (stop - min(scan.after, scan.far_after)) // GAP_ESCAPE + 1
        more = elements + escapes + _SPARE
        needed = max(scan[:4]) + more
        if needed <= min(
            room.minus.size, room.gaps.size, room.far_gaps.size, room.far_planes.shape[1]
        ):
            return room
        self.room = room._replace(
            minus=_grown(room.minus, scan.small, more),
            gaps=_grown(room.gaps, scan.gap_bytes, more),
            far_gaps=_grown(room.far_gaps, scan.far_gap_bytes, more),
            far_planes=_grown(room.far_planes, scan.far, more),
        )
        return self.room


scratch = _Scratch()


def compared(old: Bits, new: Bits) -> SparseStreams:
    """All changes from `old` to `new`, of equal size and width."""
    data, sums = bytes_of(new), xxh3.started()
    scan, room = Scan(), scratch.room
    step = CHUNK_BYTES // old.itemsize
    for start in range(0, new.size, step):
        stop = min(new.size, start + step)
        room = scratch.reserve(scan, stop, stop - start)
        scan = scan_elements(old, new, data, start, stop, scan, room, sums)
    signs = np.zeros((scan.small + 7) // 8, dtype=np.uint8)
    kernels.pack_signs(room.minus[: scan.small], signs)
    return SparseStreams(
        small=scan.small,
        far=scan.far,
        gaps=room.gaps[: scan.gap_bytes],
        signs=signs,
        far_gaps=room.far_gaps[: scan.far_gap_bytes],
        far_planes=room.far_planes[: old.itemsize, : scan.far],
        digest=digest_from(sums, data),
    )


def _grown(rows: npt.NDArray[np.uint8], used: int, more: int) -> npt.NDArray[np.uint8]:
    """An array whose last axis has room for `more` after the `used` part."""
    if rows.shape[-1] >= used + more:
        return rows
    grown = np.empty((*rows.shape[:-1], 2 * (used + more)), dtype=np.uint8)
    grown[..., :used] = rows[..., :used]
    return grown
