"""Deltas applied where the tensor lies: the same arithmetic as kernels.py in torch operations.

For accelerators, where a tensor would otherwise travel to the host and back for every change in
it. Only the compressed streams travel. Positions within a delta are unique, so no two threads of a
device write one element.
"""

from functools import singledispatch

import numpy as np
import numpy.typing as npt
import torch

from weightsync.elements.bits import Bytes, bytes_of
from weightsync.encoding.delta import (
    Delta,
    DenseDelta,
    OverwriteDelta,
    PlanesDelta,
    SparseDelta,
    XorDelta,
)
from weightsync.encoding.plain import PlainDelta
from weightsync.receive.stored_delta import StoredDelta

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLANES_AT_ONCE = 1 << 22
"""Elements whose differences are widened to 64 bits together."""


def apply_on_device(delta: Delta, tensor: torch.Tensor) -> None:
    """Turns old elements into new ones, in place; `tensor` is contiguous and on any device.

    Raises ValueError for a tensor of another size.
    """
    if tensor.numel() != delta.elements:
        raise ValueError(f"delta for {delta.elements} elements, tensor of {tensor.numel()}")
    _apply(delta, tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()]))


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
    elements.view(torch.uint8).copy_(_on(elements, bytes_of(delta.new)))


@_apply.register
def _xor(delta: XorDelta, elements: torch.Tensor) -> None:
    elements.view(torch.uint8).bitwise_xor_(_on(elements, bytes_of(delta.difference)))


@_apply.register
def _overwrite(delta: OverwriteDelta, elements: torch.Tensor) -> None:
    positions = torch.from_numpy(delta.positions.astype(np.int64)).to(elements.device)
    elements.view(torch.uint8)[positions] = _on(elements, delta.values)


@_apply.register
def _sparse(delta: SparseDelta, elements: torch.Tensor) -> None:
    if delta.gaps.size:
        places = _places(_on(elements, delta.gaps))
        bit = torch.arange(8, dtype=torch.uint8, device=elements.device)
        flags = (_on(elements, delta.signs)[:, None] >> bit) & 1
        minus = flags.view(-1)[: places.numel()].to(elements.dtype)
        elements[places] += 1 - 2 * minus
    if delta.far_gaps.size:
        places = _places(_on(elements, delta.far_gaps))
        elements[places] += _differences(elements, delta.far_planes)


@_apply.register
def _planes(delta: PlanesDelta, elements: torch.Tensor) -> None:
    for start in range(0, delta.elements, _PLANES_AT_ONCE):
        stop = min(delta.elements, start + _PLANES_AT_ONCE)
        elements[start:stop] += _differences(elements, delta.planes[:, start:stop])


def _places(gaps: torch.Tensor) -> torch.Tensor:
    """Positions of the changes that a gap stream describes."""
    changes = gaps != 255
    return (torch.cumsum(gaps.long() + changes, 0) - 1)[changes]


def _differences(elements: torch.Tensor, planes: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Zigzag codes in byte planes as differences of the elements' width."""
    codes = torch.zeros(planes.shape[1], dtype=torch.int64, device=elements.device)
    for place, plane in enumerate(planes):
        codes |= _on(elements, plane).long() << (8 * place)
    # The shift of a negative 64-bit code would fill up with ones.
    halves = (codes >> 1) & torch.iinfo(torch.int64).max
    return (halves ^ -(codes & 1)).to(elements.dtype)


def _on(elements: torch.Tensor, data: Bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(data)).to(elements.device, non_blocking=True)
