"""The sum of a tensor's box: those of boxes that divide a tensor add up to the tensor's.

See element_sums.py. Names of tensors are no part of a sum: each tensor's is published by itself.
"""

from collections.abc import Iterable

import numpy as np

from weightsync.elements.bits import Bits
from weightsync.elements.element_sums import (
    MODULUS,
    UNIT_BYTES,
    Dims,
    units_change,
    units_of,
    units_sum,
)
from weightsync.layout.slices import SliceRecord, dims_of


def box_sum(bits: Bits, box: SliceRecord) -> int:
    """The sum of a box, of which `bits` are the elements in order."""
    if not bits.size:
        return 0
    return int(units_sum(units_of(bits), _unit_dims(box, bits.itemsize)))


def changed_box_sum(known: int | None, old: Bits, new: Bits, box: SliceRecord) -> int:
    """`box_sum` of `new`, where the sum of the `old` bits is known from these that differ alone."""
    if known is None or not new.size:
        return box_sum(new, box)
    dims = _unit_dims(box, new.itemsize)
    return (known + int(units_change(units_of(old), units_of(new), dims))) % MODULUS


def added_up(sums: Iterable[int]) -> int:
    return sum(sums) % MODULUS


def warm_up() -> None:
    """Compile or load the loops, so that no version waits for them."""
    box = SliceRecord("", (2, 4), (0, 1), (2, 2))
    for kind in (np.uint8, np.uint16):
        bits = np.zeros(4, kind)
        changed_box_sum(box_sum(bits, box), bits, bits, box)


def _unit_dims(box: SliceRecord, width_bytes: int) -> Dims:
    dims = dims_of(box) if box.shape else np.array([[1, 0, 1, 1]], np.uint64)
    units = np.uint64(max(1, width_bytes // UNIT_BYTES))
    dims[-1, 1:3] *= units
    dims[:-1, 0] *= units
    return dims
