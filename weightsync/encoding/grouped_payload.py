"""Builds payloads of the `groups` layout (grouped.py).

Decides when it is worth it: for changes with a structure that a compressor finds, `sparse` stays
smaller.
"""

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bytes
from weightsync.elements.compiled import compiled
from weightsync.elements.group_applying import INDEX_BYTES, NEAREST_FAR
from weightsync.elements.group_writing import groups_size, highs_room, write_groups
from weightsync.elements.groups import (
    GROUP,
    MAX_LOW_BITS,
    WORD_BYTES,
)
from weightsync.elements.scan import GAP_ESCAPE
from weightsync.encoding.sparse import SparseStreams
from weightsync.encoding.stream import pack_stream
from weightsync.encoding.varint import put_number

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


def grouped_payload(head: bytes, elements: int, found: SparseStreams) -> bytes:
    """`head` and the changes in groups; empty if too many differences are wide."""
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
    changes = 0
    for i in range(gaps.size):
        changes += gaps[i] != GAP_ESCAPE
    size = groups_size(gaps, changes)
    return (changes + GROUP - 1) // GROUP // 2 + size.low_bytes + size.high_bytes


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
    """Write everything after the head; returns the end offset, 0 if too many differences are
    wide.
    """
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
    payload[at : at + part.size] = part
    return at + part.size
