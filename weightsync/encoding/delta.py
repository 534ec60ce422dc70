"""Changes of one tensor: read from the payload of each encoding, then written in place.

The readers trust nothing: what does not fit a tensor of the given spec raises Corrupt, so that
applying a delta to bits of that size neither fails nor writes out of range.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from harvester.contracts.errors import Corrupt
from weightsync.elements import kernels, xxh3
from weightsync.elements.bits import Bits, Bytes, TensorSpec, bits_from_bytes, bytes_of
from weightsync.elements.scan import GAP_ESCAPE
from weightsync.elements.state_hash import digest_from, digest_of
from weightsync.encoding.context import IN_CLASSES, decode_classes
from weightsync.encoding.grouped import GROUPS, decode_grouped
from weightsync.encoding.planes import PLANES
from weightsync.encoding.sparse import FORMAT, SPARSE
from weightsync.encoding.stream import unpack_frame, unpack_stream
from weightsync.encoding.varint import PayloadReader


class Delta(Protocol):
    @property
    def elements(self) -> int:
        """Size of the tensor that it fits."""

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        """Turn the old bits into the new ones; returns their xxh3-128, "" if not `hashed`."""


def checked_apply(delta: Delta, bits: Bits, *, hashed: bool = False) -> str:
    """`delta.apply`, refusing bits of another size: the loops check no bounds."""
    if bits.size != delta.elements:
        raise ValueError(f"delta for {delta.elements} elements, tensor of {bits.size}")
    return delta.apply(bits, hashed=hashed)


def apply_all(deltas: Sequence[Delta], bits: Bits, *, hashed: bool = False) -> str:
    """`checked_apply` in order; returns the digest of the result."""
    for delta in deltas[:-1]:
        checked_apply(delta, bits)
    return checked_apply(deltas[-1], bits, hashed=hashed) if deltas else _digest(bits, hashed)


def _digest(bits: Bits, hashed: bool) -> str:
    return digest_of(bits) if hashed else ""


@dataclass(frozen=True, slots=True)
class DenseDelta:
    """The whole new tensor."""

    new: Bits

    @property
    def elements(self) -> int:
        return self.new.size

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        np.copyto(bits, self.new)
        return _digest(bits, hashed)


@dataclass(frozen=True, slots=True)
class XorDelta:
    """old XOR new."""

    difference: Bits

    @property
    def elements(self) -> int:
        return self.difference.size

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        np.bitwise_xor(bits, self.difference, out=bits)
        return _digest(bits, hashed)


@dataclass(frozen=True, slots=True)
class OverwriteDelta:
    """New bytes at byte positions; the one delta that may be applied twice."""

    elements: int
    positions: npt.NDArray[np.uint32]
    values: Bytes

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        bytes_of(bits)[self.positions] = self.values
        return _digest(bits, hashed)


@dataclass(frozen=True, slots=True)
class SparseDelta:
    """Changes by one unit in the last place (gap, sign), then all others (gap, difference)."""

    elements: int
    gaps: Bytes
    signs: Bytes
    far_gaps: Bytes
    far_planes: npt.NDArray[np.uint8]

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        data, sums = bytes_of(bits), xxh3.started()
        kernels.apply_sparse(
            bits, data, self.gaps, self.signs, self.far_gaps, self.far_planes, sums, hashed
        )
        return digest_from(sums, data) if hashed else ""


@dataclass(frozen=True, slots=True)
class PlanesDelta:
    """A difference for every element, one row per byte."""

    planes: npt.NDArray[np.uint8]

    @property
    def elements(self) -> int:
        return int(self.planes.shape[1])

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        kernels.apply_planes(bits, self.planes)
        return _digest(bits, hashed)


def decode_dense(payload: memoryview, spec: TensorSpec) -> DenseDelta:
    return DenseDelta(bits_from_bytes(unpack_stream(payload, spec.size_bytes), spec))


def decode_xor(payload: memoryview, spec: TensorSpec) -> XorDelta:
    return XorDelta(bits_from_bytes(unpack_frame(payload, spec.size_bytes), spec))


def max_overwrite_bytes(spec: TensorSpec) -> int:
    """Content of a frame that changes every byte."""
    return 4 + 5 * spec.size_bytes


def decode_overwrite(payload: memoryview, spec: TensorSpec) -> OverwriteDelta:
    raw = unpack_frame(payload, max_overwrite_bytes(spec))
    if raw.size < 4:
        raise Corrupt(f"overwrite: {raw.size} bytes hold no count")
    count = int(raw[:4].view("<u4")[0])
    if raw.size != 4 + 5 * count:
        raise Corrupt(f"overwrite: {raw.size} bytes, not those of {count} changes")
    positions = raw[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= spec.size_bytes:
        raise Corrupt(f"overwrite: position {positions.max()} in {spec.size_bytes} bytes")
    return OverwriteDelta(spec.elements, positions, raw[4 + 4 * count :])


def rosemux_layout(reader: PayloadReader, spec: TensorSpec, *, in_classes: bool = False) -> int:
    """`in_classes`: of `context`, whose classes do not add up as `rosemux` does."""
    version, layout, width = reader.take(3)
    known = {SPARSE, PLANES, GROUPS, IN_CLASSES} if in_classes else {SPARSE, PLANES, GROUPS}
    if version != FORMAT or layout not in known:
        raise Corrupt(f"rosemux: format {version}, layout {layout} are not known here")
    elements = reader.number(at_most=spec.elements)
    if width != spec.width_bytes or elements != spec.elements:
        raise Corrupt(
            f"rosemux: payload for {elements} elements of {width} bytes, tensor of "
            f"{spec.elements} elements of {spec.width_bytes} bytes"
        )
    return layout


def decode_rosemux(payload: memoryview, spec: TensorSpec, *, in_classes: bool = False) -> Delta:
    # Read-only, because numba compiles a loop again for writable arrays.
    reader = PayloadReader(payload.toreadonly())
    layout = rosemux_layout(reader, spec, in_classes=in_classes)
    elements, width = spec.elements, spec.width_bytes
    delta: Delta
    if layout == PLANES:
        delta = PlanesDelta(np.stack([_read(reader, elements) for _ in range(width)]))
    elif layout == GROUPS:
        return decode_grouped(payload.toreadonly(), reader.at, elements, width)
    elif layout == IN_CLASSES:
        delta = decode_classes(reader, elements, width)
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
