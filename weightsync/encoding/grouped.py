"""The `groups` layout of a delta: the content of `sparse`, in a form that is applied as it is read.

Gaps and differences are entropy-coded by groups.py, so that a payload is checked in one compiled
call and applied in another, without a copy. Made in grouped_payload.py.

After the elements of the tensor: varints small, far, wide, and in words the lows and highs of small
gaps, far gaps and codes; then in order the low-bit counts of every group of these, four bits each,
signs (a word for each group of small gaps), lows and highs of the three, and the wide differences
(the number of the far change among them in four bytes, the zigzag difference). A code is a far
change's zigzag difference less 3, 0 where it is wide.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from harvester.contracts.errors import Corrupt
from weightsync.elements import xxh3
from weightsync.elements.bits import Bits, Bytes, bytes_of
from weightsync.elements.compiled import compiled
from weightsync.elements.group_applying import INDEX_BYTES, Gaps, apply_grouped
from weightsync.elements.groups import (
    GROUP,
    MAX_LOW_BITS,
    WORD_BYTES,
    groups_end,
)
from weightsync.elements.state_hash import digest_from
from weightsync.elements.xxh3 import Accumulators
from weightsync.encoding.varint import number_at

GROUPS = 2
"""Layout number of a payload that holds groups."""

Row: TypeAlias = npt.NDArray[np.int64]
"""Counts and offsets of the parts of a payload: the columns below."""
_SMALL, _FAR, _WIDE, _LOW_BITS, _SIGNS, _LOWS, _HIGHS, _END = 0, 1, 2, 3, 4, 5, 8, 11
_COLUMNS = 12
_KINDS = 3
"""Small gaps, far gaps and codes have three columns each of _LOWS and _HIGHS."""


class OpenedGroups(NamedTuple):
    low_bits: Bytes
    """One byte per group."""
    small: Gaps
    signs: Bytes
    """Lowest bit first, 1 is minus."""
    far: Gaps
    codes: Gaps
    wide_numbers: npt.NDArray[np.uint32]
    wide_differences: npt.NDArray[np.uint8]
    """Zigzag, one row of bytes per difference, lowest byte first."""


@dataclass(frozen=True, slots=True)
class GroupedDelta:
    """The changes of a payload, checked and left in its bytes."""

    elements: int
    payload: Bytes
    row: Row

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        """See delta.py."""
        data, sums = bytes_of(bits), xxh3.started()
        _apply(bits, data, self.payload, self.row, sums, hashed)
        return digest_from(sums, data) if hashed else ""

    def opened(self, width_bytes: int) -> "OpenedGroups":
        """The same changes of elements of `width_bytes`, for callers with loops of their own."""
        low_bits, small, far, codes = _parts(self.payload, self.row)
        both = np.stack([low_bits & MAX_LOW_BITS, low_bits >> 4], axis=1).reshape(-1)
        wide = self.payload[self.row[_END] :].reshape(-1, INDEX_BYTES + width_bytes)
        signs = self.payload[self.row[_SIGNS] : self.row[_LOWS]]
        numbers = np.ascontiguousarray(wide[:, :INDEX_BYTES]).view("<u4").reshape(-1)
        return OpenedGroups(both, small, signs, far, codes, numbers, wide[:, INDEX_BYTES:])


def decode_grouped(payload: memoryview, at: int, elements: int, width: int) -> GroupedDelta:
    """Check a payload whose numbers begin at byte `at`; raises Corrupt."""
    data = np.frombuffer(payload, dtype=np.uint8)
    row = np.zeros(_COLUMNS, dtype=np.int64)
    if not _read(data, at, elements, width, row):
        raise Corrupt(f"rosemux groups: these {data.size} bytes change no {elements} elements")
    return GroupedDelta(elements, data, row)


@compiled
def _read(payload: Bytes, at: int, elements: int, width: int, row: Row) -> bool:
    """Fill in the row; False if the payload is malformed."""
    small, at = number_at(payload, at, elements)
    far, at = number_at(payload, at, elements - small)
    wide, at = number_at(payload, at, far)
    row[_SMALL], row[_FAR], row[_WIDE] = small, far, wide
    sizes = np.zeros(2 * _KINDS, np.int64)
    for number in range(sizes.size):
        words, at = number_at(payload, at, payload.size // WORD_BYTES)
        sizes[number] = WORD_BYTES * words
    if at < 0:
        return False
    small_groups, far_groups = (small + GROUP - 1) // GROUP, (far + GROUP - 1) // GROUP
    row[_LOW_BITS] = at
    row[_SIGNS] = at + (small_groups + 2 * far_groups + 1) // 2
    at = row[_SIGNS] + WORD_BYTES * small_groups
    for kind in range(_KINDS):
        row[_LOWS + kind] = at
        row[_HIGHS + kind] = at + sizes[2 * kind]
        at = row[_HIGHS + kind] + sizes[2 * kind + 1]
    row[_END] = at
    if at + wide * (INDEX_BYTES + width) != payload.size:
        return False
    low_bits, gaps, far_gaps, codes = _parts(payload, row)
    for part in (gaps, far_gaps):
        end = groups_end(part.changes, low_bits, part.first, part.lows, part.highs)
        if end < 0 or end > elements:
            return False
    if groups_end(far, low_bits, codes.first, codes.lows, codes.highs) < 0:
        return False
    before = -1
    for entry in range(row[_END], payload.size, INDEX_BYTES + width):
        number = 0
        for byte in range(INDEX_BYTES):
            number |= int(np.int64(payload[entry + byte])) << (8 * byte)
        if not before < number < far:
            return False
        before = number
    return True


@compiled
def _parts(payload: Bytes, row: Row) -> tuple[Bytes, Gaps, Gaps, Gaps]:
    """(low bits, small gaps, far gaps, codes)."""
    small, far = row[_SMALL], row[_FAR]
    far_from = (small + GROUP - 1) // GROUP
    codes_from = far_from + (far + GROUP - 1) // GROUP
    l0, l1, l2 = row[_LOWS], row[_LOWS + 1], row[_LOWS + 2]
    h0, h1, h2 = row[_HIGHS], row[_HIGHS + 1], row[_HIGHS + 2]
    return (
        payload[row[_LOW_BITS] : row[_SIGNS]],
        Gaps(small, 0, payload[l0:h0], payload[h0:l1]),
        Gaps(far, far_from, payload[l1:h1], payload[h1:l2]),
        Gaps(far, codes_from, payload[l2:h2], payload[h2 : row[_END]]),
    )


@compiled
def _apply(
    bits: Bits, data: Bytes, payload: Bytes, row: Row, sums: Accumulators, hashed: bool
) -> None:
    low_bits, gaps, far_gaps, codes = _parts(payload, row)
    signs, wide = payload[row[_SIGNS] : row[_LOWS]], payload[row[_END] :]
    apply_grouped(bits, data, low_bits, gaps, signs, far_gaps, codes, wide, sums, hashed)
