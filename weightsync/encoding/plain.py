"""Sparse payloads with uncompressed streams: of many small tensors, made and read in few calls.

A tensor of a few KiB changes in so few places that its streams are not worth compressing, and a
model may have tens of thousands of them. The payload is byte for byte codec.py's; any other payload
is left to codec.py, which also reports its faults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.elements import xxh3
from weightsync.elements.bits import Bits, Bytes, TensorSpec, bytes_of
from weightsync.elements.compiled import compiled
from weightsync.elements.kernels import apply_sparse, gaps_end, pack_signs
from weightsync.elements.scan import GAP_ESCAPE, Room, Scan, scan_elements
from weightsync.elements.state_hash import digest_from, digest_of
from weightsync.elements.xxh3 import Accumulators
from weightsync.encoding.delta import SparseDelta
from weightsync.encoding.sparse import FORMAT, SPARSE, scratch
from weightsync.encoding.stream import RAW_BELOW_BYTES
from weightsync.encoding.varint import number_at, put_number

Row: TypeAlias = npt.NDArray[np.int64]
"""Offsets of the streams of one payload; see the columns below."""

_IS_PLAIN, _GAPS, _GAP_BYTES, _SIGNS, _SIGN_BYTES = range(5)
_FAR_GAPS, _FAR_GAP_BYTES, _PLANES, _FAR, _PLANE_STEP = range(5, 10)
_COLUMNS = 10
PLAIN_BYTES = 8 << 10
"""Largest tensor to try; a larger one seldom changes in so few places."""
_PAYLOAD_BYTES = 3 + 5 * 9 + 11 * (1 + RAW_BELOW_BYTES)


@dataclass(frozen=True, slots=True)
class PlainDelta:
    """A checked payload that shares its bytes with many others."""

    elements: int
    payloads: Bytes
    row: Row

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        data, sums = bytes_of(bits), xxh3.started()
        _apply(bits, data, self.payloads, self.row, sums, hashed)
        return digest_from(sums, data) if hashed else ""

    def opened(self, width_bytes: int) -> SparseDelta:
        """The changes to elements of `width_bytes`, for callers with their own loops."""
        start, step, far = (int(self.row[column]) for column in (_PLANES, _PLANE_STEP, _FAR))
        planes = [self._stream(start + step * plane, far) for plane in range(width_bytes)]
        return SparseDelta(
            self.elements,
            self._stream(self.row[_GAPS], self.row[_GAP_BYTES]),
            self._stream(self.row[_SIGNS], self.row[_SIGN_BYTES]),
            self._stream(self.row[_FAR_GAPS], self.row[_FAR_GAP_BYTES]),
            np.stack(planes),
        )

    def _stream(self, start: int, size_bytes: int) -> Bytes:
        return self.payloads[start : start + size_bytes]


def plain_deltas(
    data: Bytes, offsets: Mapping[str, tuple[int, int]], specs: Mapping[str, TensorSpec]
) -> dict[str, PlainDelta]:
    """Deltas of the `rosemux` payloads of tensors of `specs`, at (begin, end) `offsets` in `data`,
    whose memory they share; without payloads that are not plain, whether valid or not."""
    payloads = np.frombuffer(data.data.toreadonly(), dtype=np.uint8)
    elements = [spec.elements for spec in specs.values()]
    rows = np.zeros((len(specs), _COLUMNS), dtype=np.int64)
    _read_all(
        payloads,
        np.array([offsets[name] for name in specs], dtype=np.int64).reshape(-1, 2),
        np.array(elements, dtype=np.int64),
        np.array([spec.width_bytes for spec in specs.values()], dtype=np.int64),
        rows,
    )
    found = zip(specs, elements, rows, rows[:, _IS_PLAIN].tolist(), strict=True)
    return {name: PlainDelta(count, payloads, row) for name, count, row, plain in found if plain}


@compiled
def _read_all(
    payloads: Bytes,
    places: npt.NDArray[np.int64],
    elements: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
) -> None:
    for number in range(places.shape[0]):
        payload = payloads[places[number, 0] : places[number, 1]]
        row = rows[number]
        if _read(payload, elements[number], widths[number], row):
            for column in (_GAPS, _SIGNS, _FAR_GAPS, _PLANES):
                row[column] += places[number, 0]
            row[_IS_PLAIN] = 1


@compiled
def _read(payload: Bytes, elements: int, width: int, row: Row) -> bool:
    """Fill in a row with offsets from the payload's first byte; False if it is not plain."""
    if payload.size < 3 or payload[0] != FORMAT or payload[1] != SPARSE or payload[2] != width:
        return False
    escapes = elements // GAP_ESCAPE
    found, at = number_at(payload, 3, elements)
    if found != elements:
        return False
    small, at = number_at(payload, at, elements)
    far, at = number_at(payload, at, elements - small)
    row[_GAP_BYTES], at = number_at(payload, at, small + escapes)
    row[_FAR_GAP_BYTES], at = number_at(payload, at, far + escapes)
    row[_SIGN_BYTES], row[_FAR] = (small + 7) // 8, far
    row[_GAPS], at = _stream(payload, at, row[_GAP_BYTES])
    row[_SIGNS], at = _stream(payload, at, row[_SIGN_BYTES])
    row[_FAR_GAPS], at = _stream(payload, at, row[_FAR_GAP_BYTES])
    row[_PLANES], at = _stream(payload, at, far)
    last = row[_PLANES]
    for _ in range(width - 1):
        before = last
        last, at = _stream(payload, at, far)
        if row[_PLANE_STEP] not in (0, last - before):
            return False
        row[_PLANE_STEP] = last - before
    if at != payload.size:
        return False
    gaps = payload[row[_GAPS] : row[_GAPS] + row[_GAP_BYTES]]
    far_gaps = payload[row[_FAR_GAPS] : row[_FAR_GAPS] + row[_FAR_GAP_BYTES]]
    return _lead_to(gaps, small, elements) and _lead_to(far_gaps, far, elements)


@compiled
def _lead_to(gaps: Bytes, changes: int, elements: int) -> bool:
    found, end = gaps_end(gaps)
    return found == changes and end <= elements


@compiled
def _stream(payload: Bytes, at: int, size: int) -> tuple[int, int]:
    """(first byte, end) of an uncompressed stream; (0, -1) if it is not one."""
    packed, start = number_at(payload, at, size)
    if start < 0 or packed != size or start + size > payload.size:
        return 0, -1
    return start, start + size


@compiled
def _apply(
    bits: Bits, data: Bytes, payloads: Bytes, row: Row, sums: Accumulators, hashed: bool
) -> None:
    far = row[_FAR]
    planes = np.empty((bits.itemsize, far), dtype=np.uint8)
    for plane in range(bits.itemsize):
        start = row[_PLANES] + plane * row[_PLANE_STEP]
        for i in range(far):
            planes[plane, i] = payloads[start + i]
    apply_sparse(
        bits,
        data,
        payloads[row[_GAPS] : row[_GAPS] + row[_GAP_BYTES]],
        payloads[row[_SIGNS] : row[_SIGNS] + row[_SIGN_BYTES]],
        payloads[row[_FAR_GAPS] : row[_FAR_GAPS] + row[_FAR_GAP_BYTES]],
        planes,
        sums,
        hashed,
    )


class PlainPayload(NamedTuple):
    changed: int
    """Number of elements that differ."""
    digest: str
    """xxh3-128 of the new bits."""
    payload: bytes
    """Empty if a stream may be worth compressing."""


def plain_payload(old: Bits, new: Bits) -> PlainPayload:
    """The payload for a tensor of at most PLAIN_BYTES."""
    data = bytes_of(new)
    payload = np.empty(_PAYLOAD_BYTES, dtype=np.uint8)
    room = scratch.reserve(Scan(), new.size, new.size)
    changed, size_bytes, high, low = _make(old, new, data, room, xxh3.started(), payload)
    digest = digest_of(new) if data.size < xxh3.MIN_BYTES else f"{int(high):016x}{int(low):016x}"
    return PlainPayload(changed, digest, payload[:size_bytes].tobytes())


@compiled
def _make(
    old: Bits, new: Bits, data: Bytes, room: Room, sums: Accumulators, payload: Bytes
) -> tuple[int, int, np.uint64, np.uint64]:
    """(changed elements, bytes of the payload, high and low word of the hash)."""
    scan = scan_elements(old, new, data, 0, new.size, Scan(0, 0, 0, 0, 0, 0), room, sums)
    changed = scan.small + scan.far
    payload_bytes = 0
    most = max(scan.gap_bytes, scan.far_gap_bytes, scan.far)
    if changed and most < RAW_BELOW_BYTES:
        payload_bytes = _write_payload(new.size, new.itemsize, scan, room, payload)
    high = low = np.uint64(0)
    if data.size >= xxh3.MIN_BYTES:
        high, low = xxh3.finished(sums, data)
    return changed, payload_bytes, high, low


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
def _write_stream(payload: Bytes, at: int, raw: Bytes) -> int:
    """Write a stream's length and its bytes uncompressed; returns the end offset."""
    at = put_number(payload, at, raw.size)
    for i in range(raw.size):
        payload[at + i] = raw[i]
    return at + raw.size
