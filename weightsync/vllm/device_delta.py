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
from weightsync.elements.grouped import CODE_ESCAPE, NEAREST_FAR
from weightsync.elements.groups import GROUP, WORD_BYTES, Groups
from weightsync.encoding.delta import (
    Delta,
    DenseDelta,
    GroupedDelta,
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
        _step(elements, places, _on(elements, delta.signs))
    if delta.far_gaps.size:
        places = _places(_on(elements, delta.far_gaps))
        elements[places] += _differences(elements, delta.far_planes)


@_apply.register
def _grouped(delta: GroupedDelta, elements: torch.Tensor) -> None:
    if delta.small.changes:
        _step(elements, _places_of(elements, delta.small), _on(elements, delta.signs))
    if delta.far.changes:
        planes = np.zeros((elements.element_size(), delta.far.changes), dtype=np.uint8)
        is_wide = delta.codes == CODE_ESCAPE
        planes[:, is_wide] = delta.wide.reshape(-1, elements.element_size()).T
        codes = _on(elements, delta.codes).long() + NEAREST_FAR
        near = _signed(codes).masked_fill(_on(elements, is_wide), 0)
        wide = _differences(elements, planes)
        places = _places_of(elements, delta.far)
        elements[places] += near.to(elements.dtype) + wide


@_apply.register
def _planes(delta: PlanesDelta, elements: torch.Tensor) -> None:
    for start in range(0, delta.elements, _PLANES_AT_ONCE):
        stop = min(delta.elements, start + _PLANES_AT_ONCE)
        elements[start:stop] += _differences(elements, delta.planes[:, start:stop])


def _step(elements: torch.Tensor, places: torch.Tensor, signs: torch.Tensor) -> None:
    """One unit more or less at each place, as its bit says."""
    minus = _bits(signs)[: places.numel()].to(elements.dtype)
    elements[places] += 1 - 2 * minus


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Each bit of bytes, the lowest first."""
    bit = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> bit) & 1).view(-1)


def _places_of(elements: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Positions of the changes whose gaps are in groups."""
    ones = torch.nonzero(_bits(_on(elements, groups.highs))).view(-1)
    low_bits = _on(elements, groups.low_bits).long()
    starts = torch.cumsum(low_bits, 0) - low_bits
    planes = _bits(_on(elements, groups.lows)).view(-1, 8 * WORD_BYTES)
    lows = torch.zeros(low_bits.numel(), GROUP, dtype=torch.int64, device=elements.device)
    for plane in range(int(groups.low_bits.max())):
        there = torch.nonzero(low_bits > plane).view(-1)
        lows[there] |= planes[starts[there] + plane].long() << plane
    kept = low_bits.repeat_interleave(GROUP)[: groups.changes]
    zeros = torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1
    gaps = (zeros << kept) + lows.view(-1)[: groups.changes]
    return torch.cumsum(gaps + 1, 0) - 1


def _places(gaps: torch.Tensor) -> torch.Tensor:
    """Positions of the changes that a gap stream describes."""
    changes = gaps != 255
    return (torch.cumsum(gaps.long() + changes, 0) - 1)[changes]


def _differences(elements: torch.Tensor, planes: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Zigzag codes in byte planes as differences of the elements' width."""
    codes = torch.zeros(planes.shape[1], dtype=torch.int64, device=elements.device)
    for place, plane in enumerate(planes):
        codes |= _on(elements, plane).long() << (8 * place)
    return _signed(codes).to(elements.dtype)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """Differences of zigzag codes."""
    # The shift of a negative 64-bit code would fill up with ones.
    halves = (codes >> 1) & torch.iinfo(torch.int64).max
    return halves ^ -(codes & 1)


def _on(elements: torch.Tensor, data: Bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(data)).to(elements.device, non_blocking=True)
