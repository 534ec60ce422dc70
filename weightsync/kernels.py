"""Hot loops over raw bits, compiled by numba; they hold no GIL.

Nothing here checks lengths: codec.py does that before it calls, so that an apply cannot fail
half-way. A difference is taken modulo the element width, so a change by one unit in the last place
is +1 or -1 for every float format, and any other change is still exact.

Gap streams: one byte per change, the number of unchanged elements before it; 255 means 255
unchanged elements and no change yet.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from weightsync.bits import Bits, Bytes

_P = ParamSpec("_P")
_R = TypeVar("_R")

GAP_ESCAPE = 255


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    return cast(Callable[_P, _R], numba.njit(cache=True, nogil=True)(function))


@_compiled
def count_changes(old: Bits, new: Bits) -> int:
    """Elements that differ."""
    changed = 0
    for i in range(old.size):
        changed += old[i] != new[i]
    return changed


@_compiled
def _put_gap(gaps: Bytes, at: int, gap: int) -> int:
    while gap >= 255:
        gaps[at] = 255
        at += 1
        gap -= 255
    gaps[at] = gap
    return at + 1


@_compiled
def write_sparse(
    old: Bits,
    new: Bits,
    mask: np.uint64,
    gaps: Bytes,
    signs: Bytes,
    far_gaps: Bytes,
    far_planes: npt.NDArray[np.uint8],
) -> tuple[int, int, int, int]:
    """Fills the streams of a sparse delta; returns (small, far, gap bytes, far gap bytes).

    Small changes are those by exactly one unit in the last place. `signs` must be zeroed: bit k is
    set where the k-th small change is -1. `far_planes` has one row per byte of the element and
    takes the zigzag differences of the other changes. Every stream has room for all changes.
    """
    at = 0
    far_at = 0
    small = 0
    far = 0
    last = -1
    far_last = -1
    one = np.uint64(1)
    for i in range(old.size):
        if old[i] == new[i]:
            continue
        difference = (np.uint64(new[i]) - np.uint64(old[i])) & mask
        if difference == one or difference == mask:  # noqa: SIM109 - plain compares compile best
            at = _put_gap(gaps, at, i - last - 1)
            last = i
            if difference == mask:
                signs[small >> 3] |= np.uint8(1 << (small & 7))
            small += 1
        else:
            far_at = _put_gap(far_gaps, far_at, i - far_last - 1)
            far_last = i
            code = _zigzag(difference, mask)
            for plane in range(far_planes.shape[0]):
                far_planes[plane, far] = np.uint8((code >> np.uint64(8 * plane)) & np.uint64(255))
            far += 1
    return small, far, at, far_at


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
    changes = 0
    position = 0
    open_run = False
    for i in range(gaps.size):
        gap = gaps[i]
        if gap == 255:
            position += 255
            open_run = True
        else:
            position = int(position + gap + 1)
            changes += 1
            open_run = False
    if open_run:
        return -1, -1
    return changes, position


@_compiled
def apply_small(bits: Bits, gaps: Bytes, signs: Bytes) -> None:
    """Adds or subtracts one unit in the last place at each position."""
    position = -1
    small = 0
    for i in range(gaps.size):
        gap = gaps[i]
        if gap == 255:
            position += 255
            continue
        position = int(position + gap + 1)
        if signs[small >> 3] & (1 << (small & 7)):
            bits[position] -= np.uint8(1)
        else:
            bits[position] += np.uint8(1)
        small += 1


@_compiled
def apply_far(bits: Bits, gaps: Bytes, planes: npt.NDArray[np.uint8]) -> None:
    """Adds the zigzag difference at each position."""
    position = -1
    far = 0
    for i in range(gaps.size):
        gap = gaps[i]
        if gap == 255:
            position += 255
            continue
        position = int(position + gap + 1)
        code = np.uint64(0)
        for plane in range(planes.shape[0]):
            code |= np.uint64(planes[plane, far]) << np.uint64(8 * plane)
        bits[position] = np.uint64(bits[position]) + _unzigzag(code)
        far += 1


@_compiled
def write_planes(old: Bits, new: Bits, mask: np.uint64, planes: npt.NDArray[np.uint8]) -> None:
    """Zigzag differences of all elements, one row per byte."""
    for i in range(old.size):
        code = _zigzag((np.uint64(new[i]) - np.uint64(old[i])) & mask, mask)
        for plane in range(planes.shape[0]):
            planes[plane, i] = np.uint8((code >> np.uint64(8 * plane)) & np.uint64(255))


@_compiled
def apply_planes(bits: Bits, planes: npt.NDArray[np.uint8]) -> None:
    """Adds the zigzag differences to all elements."""
    for i in range(bits.size):
        code = np.uint64(0)
        for plane in range(planes.shape[0]):
            code |= np.uint64(planes[plane, i]) << np.uint64(8 * plane)
        bits[i] = np.uint64(bits[i]) + _unzigzag(code)
