"""Decoded changes of one tensor, validated, ready to be written in place.

A delta never decides anything: codec.py has checked that it fits a tensor of `elements` elements,
so that `apply` on bits of that size neither fails nor writes out of range.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsync import kernels
from weightsync.bits import Bits, Bytes, bytes_of


class Delta(Protocol):
    @property
    def elements(self) -> int:
        """Size of the tensor that it fits."""
        ...

    def apply(self, bits: Bits) -> None:
        """Turns the old bits into the new ones, in place."""
        ...


def checked_apply(delta: Delta, bits: Bits) -> None:
    """`delta.apply`, refusing bits of another size: the kernels check no bounds."""
    if bits.size != delta.elements:
        raise ValueError(f"delta for {delta.elements} elements, tensor of {bits.size}")
    delta.apply(bits)


@dataclass(frozen=True, slots=True)
class DenseDelta:
    """The whole new tensor."""

    new: Bits

    @property
    def elements(self) -> int:
        return self.new.size

    def apply(self, bits: Bits) -> None:
        np.copyto(bits, self.new)


@dataclass(frozen=True, slots=True)
class XorDelta:
    """old XOR new."""

    difference: Bits

    @property
    def elements(self) -> int:
        return self.difference.size

    def apply(self, bits: Bits) -> None:
        np.bitwise_xor(bits, self.difference, out=bits)


@dataclass(frozen=True, slots=True)
class OverwriteDelta:
    """New bytes at byte positions; the one delta that may be applied twice."""

    elements: int
    positions: npt.NDArray[np.uint32]
    values: Bytes

    def apply(self, bits: Bits) -> None:
        bytes_of(bits)[self.positions] = self.values


@dataclass(frozen=True, slots=True)
class SparseDelta:
    """Changes by one unit in the last place (gap, sign), then all others (gap, difference)."""

    elements: int
    gaps: Bytes
    signs: Bytes
    far_gaps: Bytes
    far_planes: npt.NDArray[np.uint8]

    def apply(self, bits: Bits) -> None:
        kernels.apply_small(bits, self.gaps, self.signs)
        kernels.apply_far(bits, self.far_gaps, self.far_planes)


@dataclass(frozen=True, slots=True)
class PlanesDelta:
    """A difference for every element, one row per byte."""

    planes: npt.NDArray[np.uint8]

    @property
    def elements(self) -> int:
        return int(self.planes.shape[1])

    def apply(self, bits: Bits) -> None:
        kernels.apply_planes(bits, self.planes)
