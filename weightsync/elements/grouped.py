"""Changing a state in place by gaps in groups.

Compiled loops that hold no lock of Python's and check no lengths: encoding/grouped.py did before.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bits, Bytes
from weightsync.elements.compiled import compiled, inlined
from weightsync.elements.groups import (
    BEFORE_ALL,
    END,
    GROUP,
    WORD_BYTES,
    Groups,
    Lows,
    Places,
    Walk,
    read_group,
)
from weightsync.elements.kernels import APPLIED_BYTES, pass_block
from weightsync.elements.lanes import word_at
from weightsync.elements.xxh3 import Accumulators
from weightsync.elements.zigzag import unzigzag

CODE_ESCAPE = 255
NEAREST_FAR = 3
"""The least zigzag difference of more than one unit either way."""
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_WORD = np.uint64(64)
_CODE_ESCAPE = np.uint64(CODE_ESCAPE)
_NEAREST_FAR = np.uint64(NEAREST_FAR)


class _Small(NamedTuple):
    """How far changes by one unit were made."""

    walk: Walk
    next: np.uint64
    """Change of the group that was read last."""
    signs: np.uint64
    """From that change on, the lowest bit first; 1 is minus."""


class _Far(NamedTuple):
    """How far all other changes were made."""

    walk: Walk
    next: np.uint64
    code: np.uint64
    """The next one in `codes`."""
    wide: np.uint64
    """The next byte of `wide`."""


@compiled
def apply_grouped(
    bits: Bits,
    data: Bytes,
    small: Groups,
    signs: Bytes,
    far: Groups,
    codes: Bytes,
    wide: Bytes,
    sums: Accumulators,
    hashed: bool,
) -> None:
    """Makes all changes; `sums` takes `data`, which is `bits` as bytes, where `hashed`."""
    changes, low_bits, lows, highs = small
    far_changes, far_low_bits, far_lows, far_highs = far
    room = np.empty(GROUP, np.uint16)
    places, far_places = np.empty(GROUP + 1, np.uint64), np.empty(GROUP + 1, np.uint64)
    places[0] = far_places[0] = END
    start_walk = Walk(0, _NONE, BEFORE_ALL, _NONE, _WORD, _NONE)
    smalls, fars = _Small(start_walk, _NONE, _NONE), _Far(start_walk, _NONE, _NONE, _NONE)
    width = bits.itemsize
    for start in range(0, bits.size, APPLIED_BYTES // width):
        stop = min(bits.size, start + APPLIED_BYTES // width)
        smalls = _apply_small(
            bits, np.uint64(stop), changes, low_bits, lows, highs, signs, smalls, room, places
        )
        fars = _apply_far(
            bits,
            np.uint64(stop),
            far_changes,
            far_low_bits,
            far_lows,
            far_highs,
            codes,
            wide,
            fars,
            room,
            far_places,
        )
        pass_block(data, start * width, stop * width, sums, hashed)


@inlined
def _apply_small(
    bits: Bits,
    stop: np.uint64,
    changes: int,
    low_bits: Bytes,
    lows: Bytes,
    highs: Bytes,
    signs: Bytes,
    done: _Small,
    room: Lows,
    places: Places,
) -> _Small:
    """Adds or subtracts one unit in the last place at each position before `stop`."""
    walk, change, minus = done
    while True:
        place = places[change]
        while place < stop:
            bits[place] = np.uint64(bits[place]) + _ONE - ((minus & _ONE) << _ONE)
            minus >>= _ONE
            change += _ONE
            place = places[change]
        if place != END or walk.group == low_bits.size:
            return _Small(walk, change, minus)
        group = walk.group
        minus = word_at(signs, np.uint64(WORD_BYTES * group))
        count = min(GROUP, changes - GROUP * group)
        walk = read_group(count, np.uint64(low_bits[group]), lows, highs, walk, room, places)
        change = _NONE


@inlined
def _apply_far(
    bits: Bits,
    stop: np.uint64,
    changes: int,
    low_bits: Bytes,
    lows: Bytes,
    highs: Bytes,
    codes: Bytes,
    wide: Bytes,
    done: _Far,
    room: Lows,
    places: Places,
) -> _Far:
    """Adds the zigzag difference at each position before `stop`."""
    walk, change, code_at, wide_at = done
    while True:
        place = places[change]
        while place < stop:
            code = np.uint64(codes[code_at]) + _NEAREST_FAR
            if code == _CODE_ESCAPE + _NEAREST_FAR:
                code = _NONE
                # The width, not a length: the compiler knows it and needs no loop.
                for byte in range(bits.itemsize):
                    code |= np.uint64(wide[wide_at]) << np.uint64(8 * byte)
                    wide_at += _ONE
            bits[place] = np.uint64(bits[place]) + unzigzag(code)
            code_at += _ONE
            change += _ONE
            place = places[change]
        if place != END or walk.group == low_bits.size:
            return _Far(walk, change, code_at, wide_at)
        group = walk.group
        count = min(GROUP, changes - GROUP * group)
        walk = read_group(count, np.uint64(low_bits[group]), lows, highs, walk, room, places)
        change = _NONE


@compiled
def write_codes(planes: npt.NDArray[np.uint8], codes: Bytes, wide: Bytes) -> int:
    """Zigzag differences of far changes, one row per byte, as codes of one byte.

    Returns how many bytes of `wide` it took, or -1 where there is no room for all.
    """
    for i in range(codes.size):
        codes[i] = planes[0, i] - np.uint8(NEAREST_FAR)
    for plane in range(1, planes.shape[0]):
        for i in range(codes.size):
            codes[i] = codes[i] if planes[plane, i] == 0 else np.uint8(CODE_ESCAPE)
    wide_at = 0
    for i in range(codes.size):
        if codes[i] == CODE_ESCAPE:
            if wide_at + planes.shape[0] > wide.size:
                return -1
            for plane in range(planes.shape[0]):
                wide[wide_at] = planes[plane, i]
                wide_at += 1
    return wide_at
