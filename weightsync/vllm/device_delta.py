"""Applies deltas on the tensor's device: the arithmetic of kernels.py in torch operations.

For accelerators, where a tensor would otherwise travel to the host and back for every change. Only
the decoded streams travel. Positions within a delta are unique, so no two threads of a device write
one element.
"""

from collections.abc import Iterator
from functools import singledispatch

import numpy as np
import numpy.typing as npt
import torch

from weightsync.elements.bits import Bytes, bytes_of
from weightsync.elements.grouped import NEAREST_FAR
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
from weightsync.receive.stored_delta import StoredDelta
from weightsync.vllm.device_gaps import (
    CHANGES_AT_ONCE,
    bits_within,
    group_gaps,
    group_places,
    sent,
    stream_places,
)

MOST_DEVICE_BYTES = 96 * CHANGES_AT_ONCE
"""Bound on an apply's device memory, for any size of tensor and delta."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTES_AT_ONCE = 8 * CHANGES_AT_ONCE
_UNSIGNED_32 = 0xFFFFFFFF


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
def _plain(delta: PlainDelta, elements: torch.Tensor) -> None:
    _apply(delta.opened(elements.element_size()), elements)


@_apply.register
def _dense(delta: DenseDelta, elements: torch.Tensor) -> None:
    data = elements.view(torch.uint8)
    for part in _parts(data.numel(), _BYTES_AT_ONCE):
        data[part].copy_(_on(elements, bytes_of(delta.new)[part]))


@_apply.register
def _xor(delta: XorDelta, elements: torch.Tensor) -> None:
    data = elements.view(torch.uint8)
    for part in _parts(data.numel(), _BYTES_AT_ONCE):
        data[part].bitwise_xor_(_on(elements, bytes_of(delta.difference)[part]))


@_apply.register
def _overwrite(delta: OverwriteDelta, elements: torch.Tensor) -> None:
    for part in _parts(delta.positions.size, CHANGES_AT_ONCE):
        positions = np.ascontiguousarray(delta.positions[part], dtype="<u4").view(np.uint8)
        # Signed, since torch has few operations for unsigned numbers of this width.
        places = _on(elements, positions).view(torch.int32).long().bitwise_and_(_UNSIGNED_32)
        elements.view(torch.uint8)[places] = _on(elements, delta.values[part])


@_apply.register
def _sparse(delta: SparseDelta, elements: torch.Tensor) -> None:
    _step(elements, stream_places(delta.gaps, elements.device), delta.signs)
    done = 0
    for places in stream_places(delta.far_gaps, elements.device):
        part = slice(done, done + places.numel())
        elements[places] += _differences(elements, delta.far_planes[:, part])
        done = part.stop


@_apply.register
def _grouped(delta: GroupedDelta, elements: torch.Tensor) -> None:
    found, device = delta.opened(elements.element_size()), elements.device
    _step(elements, group_places(found.small, found.low_bits, device), found.signs)
    done = 0
    for places, codes in zip(
        group_places(found.far, found.low_bits, device),
        group_gaps(found.codes, found.low_bits, device),
        strict=True,
    ):
        differences = _signed(codes.add_(NEAREST_FAR)).to(elements.dtype)
        first, last = np.searchsorted(found.wide_numbers, [done, done + places.numel()])
        numbers = torch.from_numpy(found.wide_numbers[first:last].astype(np.int64) - done)
        wide = found.wide_differences[first:last].T
        differences[numbers.to(device)] = _differences(elements, wide)
        elements[places] += differences
        done += places.numel()


@_apply.register
def _planes(delta: PlanesDelta, elements: torch.Tensor) -> None:
    for part in _parts(delta.elements, CHANGES_AT_ONCE):
        elements[part] += _differences(elements, delta.planes[:, part])


def _step(elements: torch.Tensor, pieces: Iterator[torch.Tensor], signs: Bytes) -> None:
    """Add or subtract one unit at each place, by its sign bit."""
    done = 0
    for places in pieces:
        minus = bits_within(signs, done, places.numel(), elements.device).to(elements.dtype)
        elements[places] += 1 - 2 * minus
        done += places.numel()


def _differences(elements: torch.Tensor, planes: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Differences of the elements' width, from zigzag codes in byte planes."""
    codes = torch.zeros(planes.shape[1], dtype=torch.int64, device=elements.device)
    for place, plane in enumerate(planes):
        codes |= _on(elements, plane).long() << (8 * place)
    return _signed(codes).to(elements.dtype)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """Differences of zigzag codes."""
    # An arithmetic shift of a negative 64-bit code would fill up with ones.
    halves = (codes >> 1) & torch.iinfo(torch.int64).max
    return halves ^ -(codes & 1)


def _parts(size: int, at_once: int) -> Iterator[slice]:
    return (slice(start, min(size, start + at_once)) for start in range(0, size, at_once))


def _on(elements: torch.Tensor, data: Bytes) -> torch.Tensor:
    return sent(data, elements.device)
