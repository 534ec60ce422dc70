"""Writes groups of gaps (groups.py) from gap streams (scan.py).

Compiled loops that release Python's lock and check no bounds: `highs_room` gives the sizes that
they need.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bytes
from weightsync.elements.compiled import compiled, inlined
from weightsync.elements.groups import GROUP, MAX_LOW_BITS, WORD_BYTES
from weightsync.elements.lanes import byte_sum, lanes_holding, plane_of, put_word

_NONE = np.uint64(0)
_ONE = np.uint64(1)
_WORD = np.uint64(64)
_WORD_STEP = np.uint64(WORD_BYTES)
_ESCAPE = np.uint8(255)


class Written(NamedTuple):
    low_bytes: int
    high_bytes: int


@compiled
def write_groups(gaps: Bytes, changes: int, low_bits: Bytes, lows: Bytes, highs: Bytes) -> Written:
    """Write groups of a gap stream's changes (scan.py), `low_bits` one byte each. Needs room for
    MAX_LOW_BITS planes per group, and `highs_room` bytes of `highs`."""
    group_gaps, group_lows = np.empty(GROUP, dtype=np.uint64), np.zeros(GROUP, dtype=np.uint16)
    gap_byte = low_byte = high_byte = bit = word = _NONE
    for group in range(low_bits.size):
        count = min(GROUP, changes - GROUP * group)
        if _is_short(gaps, gap_byte, count):
            kept = low_bits_for(byte_sum(gaps, gap_byte), _WORD)
            for plane in range(np.int64(kept)):
                put_word(lows, low_byte, plane_of(gaps, gap_byte, np.uint64(plane)))
                low_byte += _WORD_STEP
            for i in range(GROUP):
                zeros = np.uint64(gaps[gap_byte + np.uint64(i)]) >> kept
                high_byte, word, bit = _put_code(zeros, highs, high_byte, word, bit)
            gap_byte += _WORD
        else:
            gap_byte, total = _take_gaps(gaps, gap_byte, count, group_gaps)
            kept = low_bits_for(total, np.uint64(count))
            mask = (_ONE << kept) - _ONE
            for i in range(GROUP):
                group_lows[i] = group_gaps[i] & mask if i < count else _NONE
            for plane in range(np.int64(kept)):
                put_word(lows, low_byte, plane_of(group_lows, _NONE, np.uint64(plane)))
                low_byte += _WORD_STEP
            for i in range(count):
                zeros = group_gaps[i] >> kept
                high_byte, word, bit = _put_code(zeros, highs, high_byte, word, bit)
        low_bits[group] = kept
    if bit:
        put_word(highs, high_byte, word)
        high_byte += _WORD_STEP
    return Written(int(np.int64(low_byte)), int(np.int64(high_byte)))


@inlined
def _put_code(
    zeros: np.uint64, highs: Bytes, high_byte: np.uint64, word: np.uint64, bit: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Append `zeros` zeros and a one from bit `bit` of `word` on; a full word is written out."""
    bit += zeros
    while bit >= _WORD:
        put_word(highs, high_byte, word)
        high_byte += _WORD_STEP
        word = _NONE
        bit -= _WORD
    return high_byte, word | (_ONE << bit), bit + _ONE


@inlined
def _is_short(gaps: Bytes, at: np.uint64, count: int) -> bool:
    """Whether the next gaps are a whole group of one byte each."""
    if count < GROUP or at + _WORD > np.uint64(gaps.size):
        return False
    return bool(lanes_holding(gaps, at, _ESCAPE) == _NONE)


@compiled
def _take_gaps(
    gaps: Bytes, at: np.uint64, count: int, group_gaps: npt.NDArray[np.uint64]
) -> tuple[np.uint64, np.uint64]:
    """Decode the next `count` gaps from byte `at` on; returns (next byte, their sum)."""
    total = _NONE
    gap, found = _NONE, _NONE
    while found < np.uint64(count):
        byte = np.uint64(gaps[at])
        at += _ONE
        gap += byte
        group_gaps[found] = gap
        # Branch-free, since long gaps occur at random.
        is_over = np.uint64(byte != np.uint64(_ESCAPE))
        total += gap * is_over
        gap *= _ONE - is_over
        found += is_over
    return at, total


@compiled
def low_bits_for(total: np.uint64, count: np.uint64) -> np.uint64:
    """Number of low bits that minimises the size of `count` gaps of sum `total`, for uniform
    changes.

    With k of them a gap takes k + 1 / (1 - x) bits, where x is the chance of 2 to the k unchanged
    elements; with one more, k + 1 + 1 / (1 - x * x). That is less while x is over 0.618, which is
    while 2 to the k is under 0.481 of the mean and a half.
    """
    limit = ((total + (count >> _ONE)) * np.uint64(493)) >> np.uint64(10)
    kept, reach = _NONE, count
    while reach < limit and kept < np.uint64(MAX_LOW_BITS):
        reach += reach
        kept += _ONE
    return kept


@compiled
def highs_room(changes: int, elements: int) -> int:
    """Most bytes of `highs`: up to MAX_LOW_BITS a change has at most three zeros on average."""
    bits = 5 * changes + (elements >> MAX_LOW_BITS)
    return WORD_BYTES * (bits // 64 + 2)
