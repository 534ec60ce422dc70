"""A sum over the elements of a tensor that adds up over any division of it.

Each element contributes a word that depends on its bits and on its place in the whole tensor, and
the words are added modulo 2 to the 64th. The sums of parts add up to the whole's, and a change of
some elements is known from these alone. The word is not linear in the bits: otherwise a difference
would change the sum equally on any base.

The word of a unit is splitmix64's output number `place * 2^16 + unit`. A unit is an element of one
or two bytes, or two bytes of a wider one. If these words were random, the sums of two given states
that differ would agree with a probability of 2^-64; see decision 54. It is no defence against
someone who chooses the bits.
"""

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bits
from weightsync.elements.compiled import compiled, inlined

MODULUS = 1 << 64
UNIT_BYTES = 2
_NONE = np.uint64(0)
_UNIT_BITS = np.uint64(16)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_R30, _R27, _R31 = np.uint64(30), np.uint64(27), np.uint64(31)
_LOOKED_AT = 16
"""Units that are compared at a time: most are equal."""

Dims = npt.NDArray[np.uint64]
"""A row (stride, first, count, stride in the box) per dimension, in units; the last stride is 1."""


def units_of(bits: Bits) -> Bits:
    """The tensor's bits as units, which share its memory."""
    return bits if bits.itemsize < UNIT_BYTES else bits.view(np.uint16)


@inlined
def _word(place: np.uint64, unit: np.uint64) -> np.uint64:
    state = ((place << _UNIT_BITS) | unit) * _STEP
    state = (state ^ (state >> _R30)) * _FIRST
    state = (state ^ (state >> _R27)) * _SECOND
    return state ^ (state >> _R31)


@inlined
def _run_start(dims: Dims, run: np.uint64) -> np.uint64:
    """The place in the whole tensor where a box's run of neighbours begins."""
    last = dims.shape[0] - 1
    start, rest = dims[last, 1], run
    for back in range(1, dims.shape[0]):
        dim = last - back
        start += (dims[dim, 1] + rest % dims[dim, 2]) * dims[dim, 0]
        rest //= dims[dim, 2]
    return start


@compiled
def units_sum(units: Bits, dims: Dims) -> np.uint64:
    """The sum of a box, which has at least one unit."""
    total = _NONE
    length = np.int64(dims[dims.shape[0] - 1, 2])
    for run in range(units.size // length):
        start, first = _run_start(dims, np.uint64(run)), run * length
        for i in range(length):
            total += _word(start + np.uint64(i), np.uint64(units[first + i]))
    return total


@compiled
def units_change(old: Bits, new: Bits, dims: Dims) -> np.uint64:
    """What is to be added to the sum of a box with the bits `old`, when they become `new`."""
    total = _NONE
    length = np.int64(dims[dims.shape[0] - 1, 2])
    for run in range(old.size // length):
        start, first = _run_start(dims, np.uint64(run)), run * length
        whole = length - length % _LOOKED_AT
        for behind in range(0, whole, _LOOKED_AT):
            differs = np.uint64(0)
            for i in range(_LOOKED_AT):
                differs |= np.uint64(old[first + behind + i] ^ new[first + behind + i])
            if differs:
                # Equal units add nothing: no branch among them, so that they are counted abreast.
                for i in range(_LOOKED_AT):
                    at = first + behind + i
                    place = start + np.uint64(behind + i)
                    total += _word(place, np.uint64(new[at])) - _word(place, np.uint64(old[at]))
        for i in range(whole, length):
            place, at = start + np.uint64(i), first + i
            total += _word(place, np.uint64(new[at])) - _word(place, np.uint64(old[at]))
    return total
