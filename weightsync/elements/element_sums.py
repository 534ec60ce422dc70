"""A sum over the elements of a tensor that adds up over any division of it.

Each element contributes a word that depends on its bits and on its place in the whole tensor, and
the words are added modulo 2 to the 64th. The sums of parts add up to the whole's, and a change of
some elements is known from these alone. The word is not linear in the bits: otherwise a difference
would change the sum equally on any base.

The word of a unit is splitmix64's output number `place * 2^16 + unit`. A unit is an element of one
or two bytes, or two bytes of a wider one. If these words were random, the sums of two given states
that differ would agree with a probability of 2^-64; see decision 54. It is no defence against
bits that are chosen to meet.
"""

import numpy as np
import numpy.typing as npt

from weightsync.elements.bits import Bits, Bytes
from weightsync.elements.compiled import compiled, inlined
from weightsync.elements.kernels import unzigzag
from weightsync.elements.lanes import prefetch, width_of
from weightsync.elements.scan import GAP_ESCAPE

MODULUS = 1 << 64
UNIT_BYTES = 2
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_UNIT_MASK = np.uint64(0xFFFF)
_UNIT_BITS = np.uint64(16)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_R30, _R27, _R31 = np.uint64(30), np.uint64(27), np.uint64(31)
_AHEAD_CHANGES = 48
"""Changes whose old elements are fetched ahead: each lies in a cache line of its own."""
_LOOKED_AT = 16
"""Units that are compared at a time: most are equal."""

Dims = npt.NDArray[np.uint64]
"""A row (stride, first, count, stride in the box) per dimension; the last stride is 1."""


def bits_sum(bits: Bits, dims: Dims) -> int:
    """The sum of a box with these bits; `dims`: its place, in elements."""
    if not bits.size:
        return 0
    return int(units_sum(_units(bits), _unit_dims(dims, bits.itemsize)))


def bits_change(old: Bits, new: Bits, dims: Dims) -> int:
    """Number to add to the sum of a box when its `old` bits become `new`."""
    if not old.size:
        return 0
    return int(units_change(_units(old), _units(new), _unit_dims(dims, old.itemsize)))


def _units(bits: Bits) -> Bits:
    """The same memory as units."""
    return bits if bits.itemsize < UNIT_BYTES else bits.view(np.uint16)


def _unit_dims(dims: Dims, width_bytes: int) -> Dims:
    units = np.uint64(max(1, width_bytes // UNIT_BYTES))
    scaled = dims.copy()
    scaled[-1, 1:3] *= units
    scaled[:-1, 0] *= units
    return scaled


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
    start: np.uint64 = dims[last, 1]
    rest = run
    for back in range(1, dims.shape[0]):
        dim = last - back
        start += (dims[dim, 1] + rest % dims[dim, 2]) * dims[dim, 0]
        rest //= dims[dim, 2]
    return start


@compiled
def units_sum(units: Bits, dims: Dims) -> np.uint64:
    """The sum of a box, which has at least one unit; `dims` in units."""
    total = _NONE
    length = np.int64(dims[dims.shape[0] - 1, 2])
    for run in range(units.size // length):
        start, first = _run_start(dims, np.uint64(run)), run * length
        for i in range(length):
            total += _word(start + np.uint64(i), np.uint64(units[first + i]))
    return total


@compiled
def units_change(old: Bits, new: Bits, dims: Dims) -> np.uint64:
    """`bits_change` of units; `dims` in units."""
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


@compiled
def streams_change(
    old: Bits,
    gaps: Bytes,
    signs: Bytes,
    far_gaps: Bytes,
    far_planes: npt.NDArray[np.uint8],
    dims: Dims,
) -> np.uint64:
    """`bits_change` from the streams of a sparse delta (scan.py), in the time of its changes;
    `dims` in elements."""
    total, after, change = _NONE, _NONE, _NONE
    # Places are those of the flat bits, shifted once for each run of neighbours.
    stop, shift = _NONE, _NONE
    ahead = _NONE
    for i in range(min(_AHEAD_CHANGES, gaps.size)):
        ahead += np.uint64(gaps[i]) + np.uint64(gaps[i] != GAP_ESCAPE)
    for i in range(gaps.size):
        if i + _AHEAD_CHANGES < gaps.size:
            prefetch(old, np.int64(ahead))
            gap = gaps[i + _AHEAD_CHANGES]
            ahead += np.uint64(gap) + np.uint64(gap != GAP_ESCAPE)
        after += np.uint64(gaps[i])
        if gaps[i] != GAP_ESCAPE:
            if after >= stop:
                stop, shift = _run_of(after, dims)
            minus = (np.uint64(signs[change >> np.uint64(3)]) >> (change & np.uint64(7))) & _ONE
            total += _moved(old, after, _ONE - (minus << _ONE), after + shift)
            change += _ONE
            after += _ONE
    after, change, stop = _NONE, _NONE, _NONE
    for i in range(far_gaps.size):
        after += np.uint64(far_gaps[i])
        if far_gaps[i] != GAP_ESCAPE:
            if after >= stop:
                stop, shift = _run_of(after, dims)
            code = _NONE
            for plane in range(width_of(old)):
                code |= np.uint64(far_planes[plane, change]) << np.uint64(8 * plane)
            total += _moved(old, after, unzigzag(code), after + shift)
            change += _ONE
            after += _ONE
    return total


@compiled
def _run_of(at: np.uint64, dims: Dims) -> tuple[np.uint64, np.uint64]:
    """The end of the run with a flat position, and the distance of its places from positions,
    modulo 2 to the 64th."""
    length = dims[dims.shape[0] - 1, 2]
    run = at // length
    return (run + _ONE) * length, _run_start(dims, run) - run * length


@inlined
def _moved(old: Bits, at: np.uint64, difference: np.uint64, place: np.uint64) -> np.uint64:
    """Number to add when one element moves by a difference."""
    width = width_of(old)
    before = np.uint64(old[at])
    after = (before + difference) & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * width))
    if width <= UNIT_BYTES:
        return _word(place, after) - _word(place, before)
    total, units = _NONE, np.uint64(width // UNIT_BYTES)
    for unit in range(width // UNIT_BYTES):
        shift, at_unit = _UNIT_BITS * np.uint64(unit), place * units + np.uint64(unit)
        total += _word(at_unit, (after >> shift) & _UNIT_MASK)
        total -= _word(at_unit, (before >> shift) & _UNIT_MASK)
    return total
