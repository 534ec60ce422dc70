"""Builds the payload of a small tensor in one call if its streams are not worth compressing.

Byte for byte equal to codec.py's payload from streams; that takes many calls, each slower than
comparing a few hundred elements.
"""

from typing import NamedTuple

import numpy as np

from weightsync.elements import xxh3
from weightsync.elements.bits import Bits, Bytes, bytes_of
from weightsync.elements.compiled import compiled
from weightsync.elements.kernels import pack_signs
from weightsync.elements.scan import Room, Scan, scan_elements
from weightsync.elements.state_hash import digest_of
from weightsync.elements.xxh3 import Accumulators
from weightsync.encoding.numbers import put_number
from weightsync.encoding.sparse import FORMAT, SPARSE, scratch
from weightsync.encoding.stream import RAW_BELOW_BYTES

MAX_BYTES = 8 << 10
"""Largest tensor; a larger one seldom changes in so few places."""
OVERWRITE_BELOW_CHANGES = 16
"""`overwrite` spends 4 bytes on a position, but its header is shorter than that of `rosemux`."""
_OVERWRITE_BYTES = 4 + 5 * 8 * OVERWRITE_BELOW_CHANGES
_PAYLOAD_BYTES = 3 + 5 * 9 + 11 * (1 + RAW_BELOW_BYTES)


class PlainPayload(NamedTuple):
    changed: int
    """Number of elements that differ."""
    digest: str
    """xxh3-128 of the new bits."""
    payload: bytes
    """Empty if a stream may be worth compressing."""
    overwrite: Bytes
    """Content of an `overwrite` frame; empty if too many elements changed for it."""


class _Made(NamedTuple):
    changed: int
    payload_bytes: int
    overwrite_bytes: int
    high: np.uint64
    low: np.uint64


def plain_payload(old: Bits, new: Bits) -> PlainPayload:
    """The payload for a tensor of at most MAX_BYTES."""
    data = bytes_of(new)
    payload = np.empty(_PAYLOAD_BYTES, dtype=np.uint8)
    overwrite = np.empty(_OVERWRITE_BYTES, dtype=np.uint8)
    room = scratch.reserve(Scan(), new.size, new.size)
    made = _Made(*_make(old, new, bytes_of(old), data, room, xxh3.started(), payload, overwrite))
    digest = (
        digest_of(new)
        if data.size < xxh3.MIN_BYTES
        else f"{int(made.high):016x}{int(made.low):016x}"
    )
    return PlainPayload(
        made.changed,
        digest,
        payload[: made.payload_bytes].tobytes(),
        overwrite[: made.overwrite_bytes],
    )


@compiled
def _make(
    old: Bits,
    new: Bits,
    old_data: Bytes,
    data: Bytes,
    room: Room,
    sums: Accumulators,
    payload: Bytes,
    overwrite: Bytes,
) -> tuple[int, int, int, np.uint64, np.uint64]:
    scan = scan_elements(old, new, data, 0, new.size, Scan(0, 0, 0, 0, 0, 0), room, sums)
    changed = scan.small + scan.far
    payload_bytes = overwrite_bytes = 0
    most = max(scan.gap_bytes, scan.far_gap_bytes, scan.far)
    if changed and most < RAW_BELOW_BYTES:
        payload_bytes = _write_payload(new.size, new.itemsize, scan, room, payload)
        if changed < OVERWRITE_BELOW_CHANGES:
            overwrite_bytes = _write_overwrite(old_data, data, overwrite)
    high = low = np.uint64(0)
    if data.size >= xxh3.MIN_BYTES:
        taken = (data.size - 1) // xxh3.BLOCK_BYTES * xxh3.BLOCK_BYTES
        high, low = xxh3.finished(sums, data, taken)
    return changed, payload_bytes, overwrite_bytes, high, low


@compiled
def _write_payload(elements: int, width: int, scan: Scan, room: Room, payload: Bytes) -> int:
    """Write the payload; returns its length."""
    payload[0], payload[1], payload[2] = FORMAT, SPARSE, width
    at = put_number(payload, 3, elements)
    for number in (scan.small, scan.far, scan.gap_bytes, scan.far_gap_bytes):
        at = put_number(payload, at, number)
    at = _write_stream(payload, at, room.gaps[: scan.gap_bytes])
    sign_bytes = (scan.small + 7) // 8
    at = put_number(payload, at, sign_bytes)
    payload[at : at + sign_bytes] = 0
    pack_signs(room.minus[: scan.small], payload[at : at + sign_bytes])
    at = _write_stream(payload, at + sign_bytes, room.far_gaps[: scan.far_gap_bytes])
    for plane in range(width):
        at = put_number(payload, at, scan.far)
        for i in range(scan.far):
            payload[at + i] = room.far_planes[plane, i]
        at += scan.far
    return at


@compiled
def _write_overwrite(old: Bytes, new: Bytes, overwrite: Bytes) -> int:
    """Write count, byte positions (u4 each) and bytes; returns the length."""
    count = 0
    for i in range(new.size):
        count += old[i] != new[i]
    _write_word(overwrite, 0, count)
    found = 0
    for i in range(new.size):
        if old[i] != new[i]:
            _write_word(overwrite, 4 + 4 * found, i)
            overwrite[4 + 4 * count + found] = new[i]
            found += 1
    return 4 + 5 * count


@compiled
def _write_word(into: Bytes, at: int, value: int) -> None:
    """Write four bytes, least significant first."""
    for byte in range(4):
        into[at + byte] = (value >> (8 * byte)) & 0xFF


@compiled
def _write_stream(payload: Bytes, at: int, raw: Bytes) -> int:
    """Write a stream's length and its bytes uncompressed; returns the end offset."""
    at = put_number(payload, at, raw.size)
    for i in range(raw.size):
        payload[at + i] = raw[i]
    return at + raw.size
