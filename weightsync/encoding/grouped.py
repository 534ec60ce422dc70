"""The `groups` layout of a delta: the content of `sparse`, in a form that is applied as it is read.

Gaps and differences are entropy-coded by groups.py, so that a payload is checked in one compiled
call and applied in another, without a copy. For changes with a structure that a compressor finds,
`sparse` stays smaller.

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
from weightsync.elements.group_applying import INDEX_BYTES, NEAREST_FAR, Gaps, apply_grouped
from weightsync.elements.group_writing import highs_room, write_groups
from weightsync.elements.groups import GROUP, MAX_LOW_BITS, WORD_BYTES, groups_end
from weightsync.elements.scan import GAP_ESCAPE
from weightsync.elements.state_hash import digest_from
from weightsync.elements.xxh3 import Accumulators
from weightsync.encoding.sparse import FORMAT, SparseStreams
from weightsync.encoding.stream import pack_stream
from weightsync.encoding.varint import number_at, put_number, varint

GROUPS = 2
"""Layout number of a payload that holds groups."""

Row: TypeAlias = npt.NDArray[np.int64]
"""Counts and offsets of the parts of a payload: the columns below."""
_SMALL, _FAR, _WIDE, _LOW_BITS, _SIGNS, _LOWS, _HIGHS, _END = 0, 1, 2, 3, 4, 5, 8, 11
_COLUMNS = 12
_KINDS = 3
"""Small gaps, far gaps and codes have three columns each of _LOWS and _HIGHS."""
_LEAST_CHANGES = 1024
"""Payloads with fewer changes unpack in negligible time anyway."""
_MOST_ELEMENTS = (1 << 32) - 1
"""Wide differences name their change in four bytes."""
_WIDE_SHARE = 1 / 16
"""Largest share of the far changes that may be wide; with more, planes are smaller."""
_SAMPLE_BYTES = 8 << 10
_WORTH_RATIO = 1.04
"""Largest size of gaps and signs in groups, over their compressed size."""
_MOST_NEAR = 254
"""Codes from here on are wide: smaller ones form gap streams without an escape."""


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
        """The changes to elements of `width_bytes`, for callers with their own loops."""
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


def grouped_payload(elements: int, found: SparseStreams) -> bytes:
    """The changes of a tensor in groups; empty if too many differences are wide."""
    head = bytes((FORMAT, GROUPS, found.far_planes.shape[0])) + varint(elements)
    payload = np.empty(len(head) + _room_bytes(found, elements), dtype=np.uint8)
    payload[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    size = _write(
        found.gaps,
        found.small,
        found.signs,
        found.far_gaps,
        found.far,
        found.far_planes,
        elements,
        _most_wide(found.far),
        payload,
        len(head),
    )
    return payload[:size].tobytes()


def _room_bytes(found: SparseStreams, elements: int) -> int:
    groups = -(-found.small // GROUP) + 2 * -(-found.far // GROUP)
    highs = highs_room(found.small, elements) + 2 * highs_room(found.far, elements)
    wide = _most_wide(found.far) * (INDEX_BYTES + int(found.far_planes.shape[0]))
    return 256 + groups * WORD_BYTES * (MAX_LOW_BITS + 2) + highs + wide


def _most_wide(far: int) -> int:
    return max(1, int(far * _WIDE_SHARE))


def is_worth_groups(found: SparseStreams, elements: int) -> bool:
    """Whether a sample from the middle of a tensor is about as small in groups as compressed."""
    if found.changed < _LEAST_CHANGES or elements > _MOST_ELEMENTS:
        return False
    gaps, signs = _middle(found.gaps, _SAMPLE_BYTES), _middle(found.signs, _SAMPLE_BYTES // 8)
    made = _gap_bytes(gaps)
    packed = len(pack_stream(gaps))
    if gaps.size < found.far_gaps.size:
        gaps = _middle(found.far_gaps, _SAMPLE_BYTES)
        made += _gap_bytes(gaps)
        packed += len(pack_stream(gaps))
    return made + signs.size <= _WORTH_RATIO * (packed + len(pack_stream(signs)))


def _middle(stream: Bytes, size: int) -> Bytes:
    start = max(0, stream.size - size) // 2
    return stream[start : start + size]


@compiled
def _gap_bytes(gaps: Bytes) -> int:
    """Size in groups, in bytes, of a gap stream of whole changes."""
    changes = elements = 0
    for i in range(gaps.size):
        changes += gaps[i] != GAP_ESCAPE
        elements += gaps[i] + 1
    low_bits = np.empty((changes + GROUP - 1) // GROUP, np.uint8)
    lows = np.empty(WORD_BYTES * MAX_LOW_BITS * low_bits.size, np.uint8)
    highs = np.empty(highs_room(changes, elements), np.uint8)
    made = write_groups(gaps, changes, low_bits, lows, highs)
    return low_bits.size // 2 + made.low_bytes + made.high_bytes


@compiled
def _write(
    gaps: Bytes,
    small: int,
    signs: Bytes,
    far_gaps: Bytes,
    far: int,
    far_planes: npt.NDArray[np.uint8],
    elements: int,
    most_wide: int,
    payload: Bytes,
    at: int,
) -> int:
    """Write all after the head; returns the end offset, 0 if too many differences are wide."""
    small_groups, far_groups = (small + GROUP - 1) // GROUP, (far + GROUP - 1) // GROUP
    low_bits = np.zeros(small_groups + 2 * far_groups + 1, np.uint8)
    codes, wide = np.empty(far, np.uint8), np.empty(most_wide, np.int64)
    wides = _write_codes(far_planes, codes, wide)
    if wides < 0:
        return 0
    far_from, codes_from = small_groups, small_groups + far_groups
    lows = np.empty(WORD_BYTES * MAX_LOW_BITS * low_bits.size, np.uint8)
    far_lows = lows[WORD_BYTES * MAX_LOW_BITS * far_from :]
    code_lows = lows[WORD_BYTES * MAX_LOW_BITS * codes_from :]
    highs = np.empty(highs_room(small, elements), np.uint8)
    far_highs = np.empty(highs_room(far, elements), np.uint8)
    code_highs = np.empty(highs_room(far, elements), np.uint8)
    made = write_groups(gaps, small, low_bits[:far_from], lows, highs)
    far_made = write_groups(far_gaps, far, low_bits[far_from:codes_from], far_lows, far_highs)
    code_made = write_groups(codes, far, low_bits[codes_from:-1], code_lows, code_highs)
    at = put_number(payload, at, small)
    at = put_number(payload, at, far)
    at = put_number(payload, at, wides)
    for sizes in (made, far_made, code_made):
        at = put_number(payload, at, sizes.low_bytes // WORD_BYTES)
        at = put_number(payload, at, sizes.high_bytes // WORD_BYTES)
    for group in range(0, low_bits.size - 1, 2):
        payload[at] = low_bits[group] | low_bits[group + 1] << 4
        at += 1
    padding = WORD_BYTES * small_groups - signs.size
    at = _put(payload, _put(payload, at, signs), np.zeros(padding, np.uint8))
    at = _put(payload, at, lows[: made.low_bytes])
    at = _put(payload, at, highs[: made.high_bytes])
    at = _put(payload, at, far_lows[: far_made.low_bytes])
    at = _put(payload, at, far_highs[: far_made.high_bytes])
    at = _put(payload, at, code_lows[: code_made.low_bytes])
    at = _put(payload, at, code_highs[: code_made.high_bytes])
    for entry in wide[:wides]:
        for byte in range(INDEX_BYTES):
            payload[at] = (entry >> (8 * byte)) & 255
            at += 1
        for plane in range(far_planes.shape[0]):
            payload[at] = far_planes[plane, entry]
            at += 1
    return at


@compiled
def _write_codes(planes: npt.NDArray[np.uint8], codes: Bytes, wide: npt.NDArray[np.int64]) -> int:
    """Write a code for every far change, and the numbers of the wide ones; returns the count of
    wide ones, or -1 if they do not fit."""
    near, is_wide = np.uint8(NEAREST_FAR), np.uint8(255)
    for i in range(codes.size):
        codes[i] = planes[0, i] - near
    for plane in range(1, planes.shape[0]):
        for i in range(codes.size):
            codes[i] = codes[i] if planes[plane, i] == 0 else is_wide
    wides = 0
    for i in range(codes.size):
        if codes[i] >= _MOST_NEAR:
            if wides == wide.size:
                return -1
            codes[i] = 0
            wide[wides] = i
            wides += 1
    return wides


@compiled
def _put(payload: Bytes, at: int, part: Bytes) -> int:
    # A loop, because for a slice numba would compile the text of shape errors.
    for i in range(part.size):
        payload[at + i] = part[i]
    return at + part.size
