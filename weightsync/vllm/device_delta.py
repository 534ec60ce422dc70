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
from weightsync.elements.grouped import NEAREST_FAR, Gaps
from weightsync.elements.groups import GROUP
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
    found = delta.opened(elements.element_size())
    if found.small.changes:
        gaps = _gaps_of(elements, found.small, found.low_bits)
        _step(elements, torch.cumsum(gaps + 1, 0) - 1, _on(elements, found.signs))
    if found.far.changes:
        places = torch.cumsum(_gaps_of(elements, found.far, found.low_bits) + 1, 0) - 1
        codes = _gaps_of(elements, found.codes, found.low_bits) + NEAREST_FAR
        differences = _signed(codes).to(elements.dtype)
        numbers = torch.from_numpy(found.wide_numbers.astype(np.int64)).to(elements.device)
        differences[numbers] = _differences(elements, found.wide_differences.T)
        elements[places] += differences


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


def _gaps_of(elements: torch.Tensor, gaps: Gaps, low_bits: Bytes) -> torch.Tensor:
    """Gaps, or codes, that lie in groups; `low_bits` of all groups there are."""
    ones = torch.nonzero(_bits(_on(elements, gaps.highs))).view(-1)
    kept = low_bits[gaps.first :][: -(-gaps.changes // GROUP)]
    planes_of = _on(elements, kept).long()
    starts = torch.cumsum(planes_of, 0) - planes_of
    planes = _bits(_on(elements, gaps.lows)).view(-1, GROUP)
    lows = torch.zeros(kept.size, GROUP, dtype=torch.int64, device=elements.device)
    for plane in range(int(kept.max())):
        there = torch.nonzero(planes_of > plane).view(-1)
        lows[there] |= planes[starts[there] + plane].long() << plane
    zeros = torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1
    shifts = planes_of.repeat_interleave(GROUP)[: gaps.changes]
    return (zeros << shifts) + lows.view(-1)[: gaps.changes]


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
