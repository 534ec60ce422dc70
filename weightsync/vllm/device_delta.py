"""Applies deltas on the tensor's device: the arithmetic of kernels.py in torch operations.

For accelerators, where a tensor would otherwise travel to the host and back for every change. Only
the stored streams travel, and gaps are counted on the device in pieces of CHANGES_AT_ONCE, so that
its memory does not grow with a delta. Positions within a delta are unique, so no two threads of a
device write one element.
"""

from collections.abc import Iterator
from functools import singledispatch

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from harvester.contracts.errors import Unsupported
from weightsync.elements.bits import Bytes, bytes_of
from weightsync.elements.group_applying import NEAREST_FAR, Gaps
from weightsync.elements.groups import GROUP, WORD_BYTES
from weightsync.elements.scan import GAP_ESCAPE
from weightsync.encoding.context import ClassesDelta
from weightsync.encoding.delta import (
    Delta,
    DenseDelta,
    OverwriteDelta,
    PlanesDelta,
    SparseDelta,
    XorDelta,
)
from weightsync.encoding.grouped import GroupedDelta
from weightsync.encoding.plain import PlainDelta
from weightsync.layout.slices import SlicedDelta
from weightsync.receive.stored_delta import StoredDelta

CHANGES_AT_ONCE = 1 << 20
_WORD_BITS = 8 * WORD_BYTES
_WORDS_AT_ONCE = CHANGES_AT_ONCE // _WORD_BITS

MOST_DEVICE_BYTES = 96 * CHANGES_AT_ONCE
"""Bound on an apply's device memory, for any size of tensor and delta."""
ON_HOST_ONLY = (
    "changes by encoding context are made in host memory only, and this engine's weights are on an "
    "accelerator: publish with encoding=rosemux"
)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTES_AT_ONCE = 8 * CHANGES_AT_ONCE
_UNSIGNED_32 = 0xFFFFFFFF


def to_device(data: Bytes, device: torch.device) -> torch.Tensor:
    """A copy on the device. With CUDA the bytes go through pinned memory: the host goes on at once,
    and the allocator keeps the memory until the copy is done."""
    staging = torch.empty(data.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.copyto(staging.numpy(), data)
    return staging.to(device, non_blocking=True)


def bits_within(data: Bytes, first: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` bits from bit `first` on, each a byte; the lowest bit of a byte comes first."""
    skipped = first // 8
    held = to_device(data[skipped : -(-(first + count) // 8)], device)
    return _bits(held)[first - 8 * skipped :][:count]


def stream_positions(gaps: Bytes, device: torch.device) -> Iterator[torch.Tensor]:
    """Positions of the changes that a gap stream describes."""
    after = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, gaps.size, CHANGES_AT_ONCE):
        piece = to_device(gaps[start : start + CHANGES_AT_ONCE], device)
        is_change = piece != GAP_ESCAPE
        # No byte runs over: an escape adds no change.
        positions = torch.cumsum(piece + is_change, 0, dtype=torch.int64).add_(after)
        after = positions[-1].clone()
        yield positions.sub_(1)[is_change]


def group_positions(gaps: Gaps, low_bits: Bytes, device: torch.device) -> Iterator[torch.Tensor]:
    """Positions of the changes whose gaps are stored in groups."""
    after = torch.zeros((), dtype=torch.int64, device=device)
    for piece in group_gaps(gaps, low_bits, device):
        positions = piece.add_(1).cumsum(0).add_(after)
        after = positions[-1].clone()
        yield positions.sub_(1)


def group_gaps(gaps: Gaps, low_bits: Bytes, device: torch.device) -> Iterator[torch.Tensor]:
    """Gaps, or codes, that lie in groups; `low_bits` of all groups there are."""
    kept = low_bits[gaps.first :][: -(-gaps.changes // GROUP)]
    planes_before = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])
    ones_up_to = np.cumsum(np.bitwise_count(gaps.highs.view("<u8")), dtype=np.int64)
    for first in range(0, gaps.changes, CHANGES_AT_ONCE):
        count = min(CHANGES_AT_ONCE, gaps.changes - first)
        groups = slice(first // GROUP, -(-(first + count) // GROUP))
        zeros = _zeros_before(gaps.highs, ones_up_to, first, count, device)
        rows = pad(zeros, (0, -count % GROUP)).view(-1, GROUP)
        low_planes = slice(planes_before[groups.start], planes_before[groups.stop])
        lows = gaps.lows[WORD_BYTES * low_planes.start : WORD_BYTES * low_planes.stop]
        yield _with_lows(rows, kept[groups], lows).view(-1)[:count]


def _zeros_before(
    highs: Bytes, ones_up_to: npt.NDArray[np.int64], first: int, count: int, device: torch.device
) -> torch.Tensor:
    """Zeros before each of `count` ones from the one with that number on.

    `ones_up_to`: how many there are up to the end of each word.
    """
    before = first - 1
    word = int(np.searchsorted(ones_up_to, before, side="right")) if first else 0
    stop = int(np.searchsorted(ones_up_to, before + count, side="right")) + 1
    found = []
    for start in range(word, stop, _WORDS_AT_ONCE):
        words = slice(start, min(stop, start + _WORDS_AT_ONCE))
        held = to_device(highs[WORD_BYTES * words.start : WORD_BYTES * words.stop], device)
        found.append(torch.nonzero(_bits(held)).view(-1).add_(_WORD_BITS * start))
    ones = found[0] if len(found) == 1 else torch.cat(found)
    if not first:
        return torch.diff(ones[:count], prepend=ones.new_full((1,), -1)).sub_(1)
    skipped = before - (int(ones_up_to[word - 1]) if word else 0)
    return torch.diff(ones[skipped : skipped + 1 + count]).sub_(1)


def _with_lows(zeros: torch.Tensor, kept: Bytes, lows: Bytes) -> torch.Tensor:
    """Gaps of whole groups, from the unary parts and the planes of their low bits."""
    device, planes_of = zeros.device, to_device(kept, zeros.device).long()
    starts = torch.cumsum(planes_of, 0) - planes_of
    planes = _bits(to_device(lows, device)).view(-1, GROUP)
    gaps = zeros << planes_of[:, None]
    for plane in range(int(kept.max())):
        # Groups without this plane read another one and take nothing of it.
        there = planes[(starts + plane).clamp_(max=planes.shape[0] - 1)]
        there *= (planes_of > plane)[:, None]
        gaps |= there.long() << plane
    return gaps


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Each bit of bytes, the lowest first."""
    bit = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> bit) & 1).view(-1)


def apply_on_device(delta: Delta, tensor: torch.Tensor) -> None:
    """Turn old elements into new ones, in place; `tensor` is contiguous and on any device.

    Takes up to MOST_DEVICE_BYTES there beside the tensor. Synchronous, since the tensor's next
    reader may use another stream. Raises ValueError for a tensor of another size.
    """
    if tensor.numel() != delta.elements:
        raise ValueError(f"delta for {delta.elements} elements, tensor of {tensor.numel()}")
    elements = tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])
    # Pinned memory belongs to the current device, which in a pool's thread is the first one.
    with torch.cuda.device_of(elements):  # type: ignore[no-untyped-call]
        _apply(delta, elements)
        if elements.is_cuda:
            torch.cuda.current_stream().synchronize()


@singledispatch
def _apply(delta: Delta, elements: torch.Tensor) -> None:
    raise NotImplementedError(type(delta).__name__)


@_apply.register
def _stored(delta: StoredDelta, elements: torch.Tensor) -> None:
    _apply(delta.decoded(), elements)


@_apply.register
def _sliced(delta: SlicedDelta, elements: torch.Tensor) -> None:
    box = elements.view(delta.record.shape)[delta.record.index]
    part = box.contiguous().view(-1)
    _apply(delta.delta, part)
    box.copy_(part.view(box.shape))


@_apply.register
def _plain(delta: PlainDelta, elements: torch.Tensor) -> None:
    _apply(delta.opened(elements.element_size()), elements)


@_apply.register
def _dense(delta: DenseDelta, elements: torch.Tensor) -> None:
    data = elements.view(torch.uint8)
    for part in _parts(data.numel(), _BYTES_AT_ONCE):
        data[part].copy_(to_device(bytes_of(delta.new)[part], elements.device))


@_apply.register
def _xor(delta: XorDelta, elements: torch.Tensor) -> None:
    data = elements.view(torch.uint8)
    for part in _parts(data.numel(), _BYTES_AT_ONCE):
        data[part].bitwise_xor_(to_device(bytes_of(delta.difference)[part], elements.device))


@_apply.register
def _overwrite(delta: OverwriteDelta, elements: torch.Tensor) -> None:
    for part in _parts(delta.positions.size, CHANGES_AT_ONCE):
        positions = np.ascontiguousarray(delta.positions[part], dtype="<u4").view(np.uint8)
        # Signed, since torch has few operations for unsigned numbers of this width.
        at = to_device(positions, elements.device).view(torch.int32).long()
        at.bitwise_and_(_UNSIGNED_32)
        elements.view(torch.uint8)[at] = to_device(delta.values[part], elements.device)


@_apply.register
def _sparse(delta: SparseDelta, elements: torch.Tensor) -> None:
    _step(elements, stream_positions(delta.gaps, elements.device), delta.signs)
    done = 0
    for positions in stream_positions(delta.far_gaps, elements.device):
        part = slice(done, done + positions.numel())
        elements[positions] += _differences(elements, delta.far_planes[:, part])
        done = part.stop


@_apply.register
def _grouped(delta: GroupedDelta, elements: torch.Tensor) -> None:
    found, device = delta.opened(elements.element_size()), elements.device
    _step(elements, group_positions(found.small, found.low_bits, device), found.signs)
    done = 0
    for positions, codes in zip(
        group_positions(found.far, found.low_bits, device),
        group_gaps(found.codes, found.low_bits, device),
        strict=True,
    ):
        differences = _signed(codes.add_(NEAREST_FAR)).to(elements.dtype)
        first, last = np.searchsorted(found.wide_numbers, [done, done + positions.numel()])
        numbers = torch.from_numpy(found.wide_numbers[first:last].astype(np.int64) - done)
        wide = found.wide_differences[first:last].T
        differences[numbers.to(device)] = _differences(elements, wide)
        elements[positions] += differences
        done += positions.numel()


@_apply.register
def _classes(_delta: ClassesDelta, _elements: torch.Tensor) -> None:
    raise Unsupported(ON_HOST_ONLY)


@_apply.register
def _planes(delta: PlanesDelta, elements: torch.Tensor) -> None:
    for part in _parts(delta.elements, CHANGES_AT_ONCE):
        elements[part] += _differences(elements, delta.planes[:, part])


def _step(elements: torch.Tensor, pieces: Iterator[torch.Tensor], signs: Bytes) -> None:
    """Add or subtract one unit at each position, by its sign bit."""
    done = 0
    for positions in pieces:
        minus = bits_within(signs, done, positions.numel(), elements.device).to(elements.dtype)
        elements[positions] += 1 - 2 * minus
        done += positions.numel()


def _differences(elements: torch.Tensor, planes: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Differences of the elements' width, from zigzag codes in byte planes."""
    codes = torch.zeros(planes.shape[1], dtype=torch.int64, device=elements.device)
    for position, plane in enumerate(planes):
        codes |= to_device(plane, elements.device).long() << (8 * position)
    return _signed(codes).to(elements.dtype)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """Differences of zigzag codes."""
    # An arithmetic shift of a negative 64-bit code would fill up with ones.
    halves = (codes >> 1) & torch.iinfo(torch.int64).max
    return halves ^ -(codes & 1)


def _parts(size: int, at_once: int) -> Iterator[slice]:
    return (slice(start, min(size, start + at_once)) for start in range(0, size, at_once))
