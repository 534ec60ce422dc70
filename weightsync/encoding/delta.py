"""Decoded changes of one tensor, validated, ready to be written in place.

A delta never decides anything: decoders.py checked that it fits a tensor of `elements` elements,
so that applying it to bits of that size neither fails nor writes out of range.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsync.elements import kernels, xxh3
from weightsync.elements.bits import Bits, Bytes, bytes_of
from weightsync.elements.state_hash import digest_from, digest_of


class Delta(Protocol):
    @property
    def elements(self) -> int:
        """Size of the tensor that it fits."""
        ...

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        """Turns the old bits into the new ones, in place.

        Returns the xxh3-128 of the bits that are there then, "" where it is not asked for.
        """
        ...


def checked_apply(delta: Delta, bits: Bits, *, hashed: bool = False) -> str:
    """`delta.apply`, refusing bits of another size: the loops check no bounds."""
    if bits.size != delta.elements:
        raise ValueError(f"delta for {delta.elements} elements, tensor of {bits.size}")
    return delta.apply(bits, hashed=hashed)


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
