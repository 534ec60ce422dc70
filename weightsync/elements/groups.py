"""Gaps between changes in groups of sixty-four: Golomb-Rice codes with separate parts.

A gap is the number of unchanged elements before a change. The low bits of a group's gaps are stored
as planes, one word for each bit of all its gaps; the bits above them form one bit string for all
groups, in unary: zeros and a closing one. This is as small as a compressor's entropy coding if
changes are spread uniformly, and sixty-four gaps are read in a few vector instructions and a count
of zeros each.

Compiled loops that release Python's lock. `groups_end` checks its input; the others check nothing.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bytes
from weightsync.elements.compiled import compiled
from weightsync.elements.lanes import LANES, first_lane, join_planes, lane_count, word_at
from weightsync.elements.picked import IS_QUICK, put_group, put_ones

GROUP = LANES
WORD_BYTES = 8
MAX_LOW_BITS = 15
ROOM = 2 * LANES
"""Elements that the loops over a group need in `room`: words are processed whole."""
END = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Sentinel after the positions of a group: a position that no tensor has."""
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_THREE = np.uint64(3)
_WORD = np.uint64(64)
_WORD_STEP = np.uint64(WORD_BYTES)
BEFORE_ALL = END - np.uint64(WORD_BYTES - 1)
"""Offset of the word before the first one: a walk advances as soon as a word is empty."""
_LAST_BIT = np.uint64(63)
_MOST_PICKED_LOW_BITS = np.uint64(9)
"""The sum of 64 numbers of at most nine bits, plus 64, fits into two bytes."""
_MOST_ONES = np.uint64(0xFFFF - 63)
"""Bit numbers up to here fit into two bytes too."""


Lows: TypeAlias = npt.NDArray[np.uint16]
Positions: TypeAlias = npt.NDArray[np.uint64]


class Walk(NamedTuple):
    """Progress of reading groups."""

    group: int = 0
    low_byte: np.uint64 = _NONE
    high_byte: np.uint64 = BEFORE_ALL
    """Offset of the word being read."""
    word: np.uint64 = _NONE
    """Unread bits of that word."""
    bit: np.uint64 = _WORD
    """First bit of the next code in that word."""
    after: np.uint64 = _NONE
    """Position after the last change."""


@compiled
def pick_group(
    changes: int,
    low_bits: np.uint64,
    lows: Bytes,
    highs: Bytes,
    walk: Walk,
    room: Lows,
    positions: Positions,
) -> Walk:
    """`read_group` for at most nine low bits, by instructions that compress lanes."""
    word, byte = walk.word, walk.high_byte
    found, first = _NONE, _NONE
    while True:
        put_ones(room, found, word, first)
        found += lane_count(word)
        if found >= np.uint64(changes):
            break
        byte += _WORD_STEP
        word = word_at(highs, byte)
        first += _WORD
        if first > _MOST_ONES:
            return count_group(changes, low_bits, lows, highs, walk, room, positions)
    put_group(lows, walk.low_byte, low_bits, room, walk.bit, walk.after, positions)
    positions[changes] = END
    lane = np.uint64(room[changes - 1]) & _LAST_BIT
    return Walk(
        walk.group + 1,
        walk.low_byte + low_bits * _WORD_STEP,
        byte,
        word & ((END << lane) << _ONE),
        lane + _ONE,
        positions[changes - 1] + _ONE,
    )


@compiled
def count_group(
    changes: int,
    low_bits: np.uint64,
    lows: Bytes,
    highs: Bytes,
    walk: Walk,
    room: Lows,
    positions: Positions,
) -> Walk:
    """`read_group` by counting zeros."""
    join_planes(lows, walk.low_byte, low_bits, room)
    word, byte, behind = walk.word, walk.high_byte, walk.after
    # Zeros before a one count; ones do not.
    zeros = _NONE - walk.bit
    lane = _NONE
    for i in range(changes):
        while word == _NONE:
            byte += _WORD_STEP
            word = word_at(highs, byte)
            zeros += _WORD
        lane = first_lane(word)
        word &= word - _ONE
        behind += np.uint64(room[i])
        positions[i] = behind + ((zeros + lane) << low_bits)
        behind += _ONE
        zeros -= _ONE
    positions[changes] = END
    return Walk(
        walk.group + 1,
        walk.low_byte + low_bits * _WORD_STEP,
        byte,
        word,
        lane + _ONE,
        positions[changes - 1] + _ONE,
    )


_quickest = pick_group if IS_QUICK else count_group


@compiled
def read_group(
    changes: int,
    low_bits: np.uint64,
    lows: Bytes,
    highs: Bytes,
    walk: Walk,
    room: Lows,
    positions: Positions,
) -> Walk:
    """Write positions of the next `changes` changes, and END. `room` needs ROOM, `positions` 65."""
    if low_bits <= _MOST_PICKED_LOW_BITS:
        return _quickest(changes, low_bits, lows, highs, walk, room, positions)
    return count_group(changes, low_bits, lows, highs, walk, room, positions)


@compiled
def low_bits_of(low_bits: Bytes, group: int) -> np.uint64:
    """Number of low bits of a group; two groups share a byte."""
    return np.uint64(low_bits[group >> 1] >> np.uint8(4 * (group & 1))) & np.uint64(MAX_LOW_BITS)


@compiled
def groups_end(changes: int, low_bits: Bytes, first: int, lows: Bytes, highs: Bytes) -> int:
    """The position after the last change; -1 if the number of changes differs from `changes`.

    `first` is the index of these gaps' first group in `low_bits`. Lanes after the last change count
    too.
    """
    end, begun = _NONE, _NONE
    low_byte, high_byte = _NONE, BEFORE_ALL
    word, size = _NONE, np.uint64(highs.size)
    for group in range((changes + GROUP - 1) // GROUP):
        count = np.uint64(min(GROUP, changes - GROUP * group))
        left, ones = count, lane_count(word)
        while ones < left:
            left -= ones
            high_byte += _WORD_STEP
            if high_byte == size:
                return -1
            word = word_at(highs, high_byte)
            ones = lane_count(word)
        for _ in range(np.int64(left) - 1):
            word &= word - _ONE
        bit = (high_byte << _THREE) + first_lane(word) + _ONE
        word &= word - _ONE
        kept = low_bits_of(low_bits, first + group)
        if low_byte + kept * _WORD_STEP > np.uint64(lows.size):
            return -1
        end += count + ((bit - begun - count) << kept)
        begun = bit
        for plane in range(np.int64(kept)):
            end += lane_count(word_at(lows, low_byte)) << np.uint64(plane)
            low_byte += _WORD_STEP
    if word != _NONE or high_byte + _WORD_STEP != size or low_byte != np.uint64(lows.size):
        return -1
    return int(np.int64(end))
