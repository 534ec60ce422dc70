"""The sum of a tensor's box: those of boxes that divide a tensor add up to the tensor's.

See element_sums.py. Names of tensors are no part of a sum: each tensor's is published by itself.
"""

from collections.abc import Iterable

import numpy as np

from weightsync.elements.bits import Bits
from weightsync.elements.element_sums import MODULUS, Dims, bits_change, bits_sum
from weightsync.layout.slices import SliceRecord, dims_of


def box_sum(bits: Bits, box: SliceRecord) -> int:
    """The sum of a box, of which `bits` are the elements in order."""
    return bits_sum(bits, run_dims(box))


def changed_box_sum(known: int | None, old: Bits, new: Bits, box: SliceRecord) -> int:
    """`box_sum` of `new`, where that of `old` is known from the elements that differ alone."""
    if known is None:
        return box_sum(new, box)
    if old is new:
        return known
    return (known + bits_change(old, new, run_dims(box))) % MODULUS


def run_dims(box: SliceRecord) -> Dims:
    """A box's place, as element_sums.py takes it: a scalar is a run of one element."""
    return dims_of(box) if box.shape else np.array([[1, 0, 1, 1]], np.uint64)


def added_up(sums: Iterable[int]) -> int:
    return sum(sums) % MODULUS
