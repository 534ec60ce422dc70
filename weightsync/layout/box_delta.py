"""The part of a tensor's delta that lies in a box of it, as a delta of the box.

A holder of the box then changes it as a holder of everything changes the tensor, and neither needs
memory for the rest. Takes the time of one pass over the changes, however many experts' boxes there
are: the changes of a box are looked for between its first and its last element.
"""

from collections.abc import Sequence
from functools import singledispatch
from math import prod

import numpy as np

from harvester.contracts.errors import Corrupt, Unsupported
from weightsync.elements import box_positions
from weightsync.elements.bits import Bytes, TensorSpec
from weightsync.elements.group_applying import NEAREST_FAR
from weightsync.elements.groups import Positions
from weightsync.elements.scan import GAP_ESCAPE, write_gaps
from weightsync.encoding.codec import encode
from weightsync.encoding.context import ClassesDelta
from weightsync.encoding.delta import (
    Delta,
    DenseDelta,
    OverwriteDelta,
    PlanesDelta,
    SparseDelta,
    XorDelta,
    decode_rosemux,
)
from weightsync.encoding.grouped import GroupedDelta, grouped_payload
from weightsync.encoding.plain import PlainDelta
from weightsync.encoding.sparse import compared
from weightsync.layout.slices import SliceRecord, dims_of


def box_delta(delta: Delta, box: SliceRecord, width_bytes: int) -> Delta:
    """The delta of `box` alone, in its own memory. `width_bytes`: of an element."""
    return box_deltas(delta, [box], width_bytes)[0]


def warm_up() -> None:
    """Compile or load the loops, so that no version waits for them."""
    old = np.zeros(1 << 14, np.uint16)
    new = old.copy()
    new[::8], new[1] = 1, 9
    spec, box = TensorSpec("BF16", old.shape), SliceRecord("", old.shape, (1,), (2,))
    encoded = encode(old[:64], new[:64])
    assert encoded is not None
    box_delta(decode_rosemux(memoryview(encoded.payload), TensorSpec("BF16", (64,))), box, 2)
    grouped = grouped_payload(old.size, compared(old, new))
    box_delta(decode_rosemux(memoryview(grouped), spec), box, 2)


@singledispatch
def box_deltas(delta: Delta, boxes: Sequence[SliceRecord], width: int) -> list[Delta]:
    """`box_delta` for each of several boxes."""
    raise NotImplementedError(type(delta).__name__)


@box_deltas.register
def _dense(delta: DenseDelta, boxes: Sequence[SliceRecord], _width: int) -> list[Delta]:
    return [DenseDelta(box.box(delta.new).flatten()) for box in boxes]


@box_deltas.register
def _xor(delta: XorDelta, boxes: Sequence[SliceRecord], _width: int) -> list[Delta]:
    return [XorDelta(box.box(delta.difference).flatten()) for box in boxes]


@box_deltas.register
def _planes(delta: PlanesDelta, boxes: Sequence[SliceRecord], _width: int) -> list[Delta]:
    return [
        PlanesDelta(np.stack([box.box(plane).flatten() for plane in delta.planes])) for box in boxes
    ]


@box_deltas.register
def _overwrite(delta: OverwriteDelta, boxes: Sequence[SliceRecord], width: int) -> list[Delta]:
    elements = (delta.positions // width).astype(np.uint64)
    deltas: list[Delta] = []
    for box in boxes:
        kept, inside = _within(elements, box)
        positions = inside.astype(np.uint32) * width + delta.positions[kept] % width
        deltas.append(
            OverwriteDelta(prod(box.lengths), positions.astype(np.uint32), delta.values[kept])
        )
    return deltas


@box_deltas.register
def _sparse(delta: SparseDelta, boxes: Sequence[SliceRecord], _width: int) -> list[Delta]:
    small = np.empty(np.count_nonzero(delta.gaps != GAP_ESCAPE), np.uint64)
    far = np.empty(delta.far_planes.shape[1], np.uint64)
    box_positions.stream_positions(_read_only(delta.gaps), small)
    box_positions.stream_positions(_read_only(delta.far_gaps), far)
    return [_streams(box, small, delta.signs, far, delta.far_planes) for box in boxes]


@box_deltas.register
def _plain(delta: PlainDelta, boxes: Sequence[SliceRecord], width: int) -> list[Delta]:
    return _sparse(delta.opened(width), boxes, width)


@box_deltas.register
def _grouped(delta: GroupedDelta, boxes: Sequence[SliceRecord], width: int) -> list[Delta]:
    found = delta.opened(width)
    small, far, ends = (
        np.empty(part.changes, np.uint64) for part in (found.small, found.far, found.codes)
    )
    for part, positions in ((found.small, small), (found.far, far), (found.codes, ends)):
        box_positions.group_positions(part, found.low_bits, positions)
    # Codes are stored as gaps are; wide ones beside them.
    codes = np.diff(ends, prepend=np.uint64(0)) + np.uint64(NEAREST_FAR - 1)
    codes[:1] += np.uint64(1)
    if codes.size and int(codes.max()) >> (8 * width):
        raise Corrupt("a difference is wider than an element")
    planes = codes.astype("<u8").view(np.uint8).reshape(-1, 8).T[:width].copy()
    planes[:, found.wide_numbers] = found.wide_differences.T
    return [_streams(box, small, found.signs, far, planes) for box in boxes]


@box_deltas.register
def _classes(delta: ClassesDelta, _boxes: Sequence[SliceRecord], _width: int) -> list[Delta]:
    raise Unsupported(
        f"a change of {delta.elements} elements by their old values cannot be cut: for holders of "
        "parts of a tensor, publish with encoding=rosemux"
    )


def _streams(
    box: SliceRecord, small: Positions, signs: Bytes, far: Positions, far_planes: Bytes
) -> SparseDelta:
    kept, inside = _between(small, box)
    far_kept, far_inside = _between(far, box)
    picked = np.zeros((kept.size + 7) // 8, np.uint8)
    box_positions.pick_signs(_read_only(signs), kept, picked)
    elements = prod(box.lengths)
    return SparseDelta(
        elements,
        _gaps(inside, elements),
        picked,
        _gaps(far_inside, elements),
        np.ascontiguousarray(far_planes[:, far_kept]),
    )


def _read_only(data: Bytes) -> Bytes:
    """A read-only view, because numba compiles a loop again for writable arrays."""
    seen = data.view()
    seen.flags.writeable = False
    return seen


def _gaps(positions: Positions, elements: int) -> Bytes:
    gaps = np.empty(positions.size + elements // GAP_ESCAPE, np.uint8)
    size_bytes, _ = write_gaps(positions, 0, 0, gaps, 0)
    return gaps[:size_bytes].copy()


def _between(positions: Positions, box: SliceRecord) -> tuple[box_positions.Numbers, Positions]:
    """`_within` of ascending positions, of which only those from the box's first to its last
    element are looked at."""
    dims = dims_of(box).astype(np.int64)
    first = int(dims[:, 0] @ dims[:, 1])
    last = first + int(dims[:, 0] @ (dims[:, 2] - 1))
    start, stop = np.searchsorted(positions, np.array([first, last + 1], np.uint64))
    kept, inside = _within(positions[start:stop], box)
    return kept + start, inside


def _within(positions: Positions, box: SliceRecord) -> tuple[box_positions.Numbers, Positions]:
    """Indices of the positions that are in the box, and their positions there."""
    kept, inside = np.empty(positions.size, np.int64), np.empty(positions.size, np.uint64)
    found = box_positions.within_box(positions, dims_of(box), kept, inside)
    return kept[:found], inside[:found]
