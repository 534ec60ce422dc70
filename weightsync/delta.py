"""Decoded changes of one tensor, validated, ready to be written in place.

A delta never decides anything: codec.py has checked that it fits a tensor of `elements` elements,
so that applying it to bits of that size neither fails nor writes out of range. It works block by
block, so that who hashes the new bits finds them in the processor's cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsync import kernels
from weightsync.bits import Bits, Bytes, blocks, bytes_of
from weightsync.kernels import Cursor


class Delta(Protocol):
    @property
    def elements(self) -> int:
        """Size of the tensor that it fits."""
        ...

    def applied(self, bits: Bits) -> Iterator[Bits]:
        """Turns the old bits into the new ones, in place; gives each block once it is final.

        Whoever calls takes all blocks: what was not taken was not applied.
        """
        ...


def applied(delta: Delta, bits: Bits) -> Iterator[Bits]:
    """`delta.applied`, refusing bits of another size: the kernels check no bounds."""
    if bits.size != delta.elements:
        raise ValueError(f"delta for {delta.elements} elements, tensor of {bits.size}")
    return delta.applied(bits)


def checked_apply(delta: Delta, bits: Bits) -> None:
    """Applies the whole delta."""
    for _ in applied(delta, bits):
        pass


@dataclass(frozen=True, slots=True)
class DenseDelta:
    """The whole new tensor."""

    new: Bits

    @property
    def elements(self) -> int:
        return self.new.size

    def applied(self, bits: Bits) -> Iterator[Bits]:
        for start, stop in blocks(bits):
            np.copyto(bits[start:stop], self.new[start:stop])
            yield bits[start:stop]


@dataclass(frozen=True, slots=True)
class XorDelta:
    """old XOR new."""

    difference: Bits

    @property
    def elements(self) -> int:
        return self.difference.size

    def applied(self, bits: Bits) -> Iterator[Bits]:
        for start, stop in blocks(bits):
            block = bits[start:stop]
            np.bitwise_xor(block, self.difference[start:stop], out=block)
            yield block


@dataclass(frozen=True, slots=True)
class OverwriteDelta:
    """New bytes at byte positions; the one delta that may be applied twice."""

    elements: int
    positions: npt.NDArray[np.uint32]
    values: Bytes

    def applied(self, bits: Bits) -> Iterator[Bits]:
        # Foreign writers may list positions in any order, so no block is final before the last one.
        bytes_of(bits)[self.positions] = self.values
        yield bits


@dataclass(frozen=True, slots=True)
class SparseDelta:
    """Changes by one unit in the last place (gap, sign), then all others (gap, difference)."""

    elements: int
    gaps: Bytes
    signs: Bytes
    far_gaps: Bytes
    far_planes: npt.NDArray[np.uint8]

    def applied(self, bits: Bits) -> Iterator[Bits]:
        small, far = Cursor(), Cursor()
        for start, stop in blocks(bits):
            small, far = kernels.apply_block(
                bits, start, stop, small, far,
                self.gaps, self.signs, self.far_gaps, self.far_planes,
            )  # fmt: skip
            yield bits[start:stop]


@dataclass(frozen=True, slots=True)
class PlanesDelta:
    """A difference for every element, one row per byte."""

    planes: npt.NDArray[np.uint8]

    @property
    def elements(self) -> int:
        return int(self.planes.shape[1])

    def applied(self, bits: Bits) -> Iterator[Bits]:
        for start, stop in blocks(bits):
            kernels.apply_planes(bits, start, stop, self.planes)
            yield bits[start:stop]
