"""Payloads of each encoding, read back to deltas that fit their tensor.

Trusts nothing: whatever does not fit a tensor of the given spec raises Corrupt, so that a delta
that was read can be applied to bits of that size without a further check.
"""

import numpy as np

from harvester.contracts.errors import Corrupt
from weightsync.elements import kernels
from weightsync.elements.bits import Bytes, TensorSpec, bits_from_bytes
from weightsync.elements.scan import GAP_ESCAPE
from weightsync.encoding.delta import (
    Delta,
    DenseDelta,
    OverwriteDelta,
    PlanesDelta,
    SparseDelta,
    XorDelta,
)
from weightsync.encoding.grouped import GROUPS, decode_grouped
from weightsync.encoding.planes import PLANES
from weightsync.encoding.sparse import FORMAT, SPARSE
from weightsync.encoding.stream import unpack_frame, unpack_stream
from weightsync.encoding.varint import PayloadReader


def decode_dense(payload: memoryview, spec: TensorSpec) -> DenseDelta:
    return DenseDelta(bits_from_bytes(unpack_stream(payload, spec.size_bytes), spec))


def decode_xor(payload: memoryview, spec: TensorSpec) -> XorDelta:
    return XorDelta(bits_from_bytes(unpack_frame(payload, spec.size_bytes), spec))


def decode_overwrite(payload: memoryview, spec: TensorSpec) -> OverwriteDelta:
    raw = unpack_frame(payload, 4 + 5 * spec.size_bytes)
    if raw.size < 4:
        raise Corrupt(f"overwrite: {raw.size} bytes hold no count")
    count = int(raw[:4].view("<u4")[0])
    if raw.size != 4 + 5 * count:
        raise Corrupt(f"overwrite: {raw.size} bytes for {count} changes")
    positions = raw[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= spec.size_bytes:
        raise Corrupt(f"overwrite: position {positions.max()} in {spec.size_bytes} bytes")
    return OverwriteDelta(spec.elements, positions, raw[4 + 4 * count :])


def rosemux_layout(reader: PayloadReader, spec: TensorSpec) -> int:
    version, layout, width = reader.take(3)
    if version != FORMAT or layout not in {SPARSE, PLANES, GROUPS}:
        raise Corrupt(f"rosemux: format {version}, layout {layout} are not known here")
    elements = reader.number(at_most=spec.elements)
    if width != spec.width_bytes or elements != spec.elements:
        raise Corrupt(
            f"rosemux: payload for {elements} elements of {width} bytes, tensor of "
            f"{spec.elements} elements of {spec.width_bytes} bytes"
        )
    return layout


def decode_rosemux(payload: memoryview, spec: TensorSpec) -> Delta:
    # Compiled loops tell arrays that may be written from others: one kind is enough.
    reader = PayloadReader(payload.toreadonly())
    layout, elements, width = rosemux_layout(reader, spec), spec.elements, spec.width_bytes
    delta: Delta
    if layout == PLANES:
        delta = PlanesDelta(np.stack([_read(reader, elements) for _ in range(width)]))
    elif layout == GROUPS:
        return decode_grouped(payload.toreadonly(), reader.at, elements, width)
    else:
        delta = _decode_sparse(reader, elements, width)
    reader.finish()
    return delta


def _decode_sparse(reader: PayloadReader, elements: int, width: int) -> SparseDelta:
    small = reader.number(at_most=elements)
    far = reader.number(at_most=elements - small)
    escapes = elements // GAP_ESCAPE
    gap_bytes = reader.number(at_most=small + escapes)
    far_gap_bytes = reader.number(at_most=far + escapes)
    gaps = _read(reader, gap_bytes)
    signs = _read(reader, (small + 7) // 8)
    far_gaps = _read(reader, far_gap_bytes)
    planes = np.empty((width, far), dtype=np.uint8)
    for plane in planes:
        plane[:] = _read(reader, far)
    for what, stream, count in (("gaps", gaps, small), ("far gaps", far_gaps, far)):
        changes, end = kernels.gaps_end(stream)
        if changes != count or end > elements:
            raise Corrupt(
                f"rosemux {what}: {changes} changes up to {end}, expected {count} in {elements}"
            )
    return SparseDelta(elements, gaps, signs, far_gaps, planes)


def _read(reader: PayloadReader, raw_length: int) -> Bytes:
    packed = reader.take(reader.number(at_most=raw_length))
    return unpack_stream(packed, raw_length)
