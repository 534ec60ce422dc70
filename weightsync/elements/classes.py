"""Changes coded within classes of elements: the exponent of the old value says how likely one is.

A step of training moves a small value by many units in the last place and a large one by none, and
a receiver holds the old values. The key of an element is the eight bits below its sign: bfloat16's
and float32's exponent. Up to eight ranges of keys, the highest first, are classes; each has a bit
string of its own, the lowest bit of each byte first:

  gap, far; then for each change: sign (1 is minus); where the far changes' turn has come the
  magnitude less 2, and the next far; the next gap

A gap is the number of unchanged elements of the class before its next change, or after its last
one; far the number of its changes by one unit before the next one by more. Each is a Golomb-Rice
code: zeros and a one, then the low bits. Twenty-four zeros lead to 32 bits as they are. A magnitude
doubles from a key to the one below, so its low bits are `step_key` less the old value's key.

Compiled loops that release Python's lock. Applying checks no numbers, and yet writes and reads
within bounds whatever the bits are: positions come from counting elements.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from weightsync.elements.bits import Bits, Bytes
from weightsync.elements.compiled import compiled, generated, inlined
from weightsync.elements.kernels import pass_tile
from weightsync.elements.lanes import (
    LANES,
    U64,
    each_lane,
    first_lane,
    lane_count,
    lanes_at,
    put_word,
    step_masks,
    width_of,
    word_at,
)
from weightsync.elements.picked import has_feature
from weightsync.elements.xxh3 import Accumulators

CLASSES = 8
_COLUMNS = np.uint64(CLASSES)
_ROWS = 16
"""Groups of lanes that are counted, then changed and hashed: a power of two."""
_TILE = _ROWS * LANES
PADDING_BYTES = 16
"""Bytes after the codes, so that every read of one is within bounds."""
CODE_BYTES = 22
"""The most that a change takes: three codes of 56 bits, and its sign."""
MOST_LOW_BITS = 31
_ESCAPE_ZEROS = np.uint64(24)
_ESCAPE_BITS = np.uint64(56)
_ESCAPE = np.uint64(1 << 24)
_RAW = np.uint64(0xFFFFFFFF)
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_THREE = np.uint64(3)
_SEVEN = np.uint64(7)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_NEVER = np.uint64(1 << 62)
"""A gap that no class is long enough for."""
_SAMPLED = 8
"""One group of lanes in so many is counted, to know how many elements have a key."""

Words: TypeAlias = npt.NDArray[np.uint64]


class Tables(NamedTuple):
    """Parameters, one for each class."""

    bounds: Bytes
    """The least key; 0 in the last class and all behind it."""
    gap_bits: Bytes
    """Low bits of the gaps."""
    far_bits: Bytes
    starts: Words
    """First byte of its codes; behind all of them without changes."""
    step_key: np.uint64


@generated(
    lambda bits, _at, _held, bounds, _row, masks, passed: types.void(
        bits, types.int64, U64, bounds, types.int64, masks, passed
    )
)
def put_classes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(bits, at, held, bounds, row, masks, passed): write the lanes of each class among 64 elements
    from `at` on, as far as `held`, as a row of `masks`; and their counts, added to a row of
    `passed`, as the row behind it."""
    lanes = lanes_at(context, builder, signature.args[0], args[0], args[1])
    shift = lanes.type.element(lanes.type.element.width - 9)
    key = ir.VectorType(ir.IntType(8), LANES)
    keys = builder.trunc(builder.lshr(lanes, each_lane(builder, shift)), key)
    words = ir.VectorType(ir.IntType(64), CLASSES)
    bounds, masks, passed = (
        context.make_array(signature.args[n])(context, builder, args[n]).data for n in (3, 5, 6)
    )
    found, above = ir.Constant(words, ir.Undefined), ir.IntType(64)(0)
    for number in range(CLASSES):
        bound = each_lane(builder, builder.load(builder.gep(bounds, [words.element(number)])))
        reached = builder.icmp_unsigned(">=", keys, bound)
        reached = builder.and_(builder.bitcast(reached, words.element), args[2])
        mask = builder.xor(reached, above)
        found, above = builder.insert_element(found, mask, ir.IntType(32)(number)), reached
    masks, passed = (
        builder.gep(builder.bitcast(rows, words.as_pointer()), [args[4]])
        for rows in (masks, passed)
    )
    builder.store(found, masks, align=8)
    name, kind = f"llvm.ctpop.v{CLASSES}i64", ir.FunctionType(words, [words])
    count = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    total = builder.add(builder.load(passed, align=8), builder.call(count, [found]))
    builder.store(total, builder.gep(passed, [words.element(1)]), align=8)


@generated(lambda _mask, _lane: U64(U64, U64))
def _deposited(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """(mask, lane): the mask's set bit of that number, alone."""
    word, name = ir.IntType(64), "llvm.x86.bmi.pdep.64"
    kind = ir.FunctionType(word, [word, word])
    pdep = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(pdep, [builder.shl(word(1), args[1]), args[0]])


@compiled
def _picked_lane(mask: np.uint64, number: np.uint64) -> np.uint64:
    lane: np.uint64 = first_lane(_deposited(mask, number))
    return lane


@compiled
def _counted_lane(mask: np.uint64, number: np.uint64) -> np.uint64:
    for _ in range(np.int64(number)):
        mask &= mask - _ONE
    lane: np.uint64 = first_lane(mask)
    return lane


_nth_lane = _picked_lane if has_feature("bmi2") else _counted_lane


@inlined
def _key(value: np.uint64, width: int) -> np.uint64:
    return (value >> np.uint64(8 * width - 9)) & np.uint64(255)


@inlined
def _step_bits(key: np.uint64, step_key: np.uint64) -> np.uint64:
    return min(step_key - key, np.uint64(MOST_LOW_BITS)) if step_key > key else _NONE


@inlined
def _code_at(codes: Bytes, bit: np.uint64, kept: np.uint64) -> tuple[np.uint64, np.uint64]:
    """(number, next bit); _NEVER behind the end."""
    byte = bit >> _THREE
    if byte + np.uint64(PADDING_BYTES) > np.uint64(codes.size):
        return _NEVER, bit
    word = word_at(codes, byte) >> (bit & _SEVEN)
    zeros = first_lane(word | _ESCAPE)
    if zeros == _ESCAPE_ZEROS:
        bit += _ESCAPE_ZEROS
        raw = word_at(codes, bit >> _THREE) >> (bit & _SEVEN)
        return raw & _RAW, bit + _ESCAPE_BITS - _ESCAPE_ZEROS
    low = (word >> (zeros + _ONE)) & ((_ONE << kept) - _ONE)
    return (zeros << kept) | low, bit + zeros + _ONE + kept


@compiled
def apply_classes(
    bits: Bits, data: Bytes, codes: Bytes, tables: Tables, sums: Accumulators, hashed: bool
) -> None:
    """Make all changes; `sums` takes `data`, which is `bits` as bytes, where `hashed`."""
    # Taken once: numba counts references to arrays wherever one is taken from a tuple.
    bounds, gap_bits, far_bits, starts, step_key = tables
    left, far = np.empty(CLASSES, np.uint64), np.empty(CLASSES, np.uint64)
    bit = np.empty(CLASSES, np.uint64)
    for c in range(CLASSES):
        left[c], at = _code_at(codes, starts[c] << _THREE, np.uint64(gap_bits[c]))
        far[c], bit[c] = _code_at(codes, at, np.uint64(far_bits[c]))
    masks = np.empty(_ROWS * CLASSES, np.uint64)
    passed = np.zeros((_ROWS + 1) * CLASSES, np.uint64)
    width, last = width_of(bits), np.zeros(LANES, bits.dtype)
    for start in range(0, bits.size, _TILE):
        stop = min(bits.size, start + _TILE)
        for row in range(_ROWS):
            group = start + LANES * row
            if group + LANES <= stop:
                put_classes(bits, group, _ALL, bounds, row, masks, passed)
            else:
                put_classes(last, 0, _copy_last(bits, group, last), bounds, row, masks, passed)
        for c in range(CLASSES):
            end = passed[CLASSES * _ROWS + c]
            if left[c] < end:
                kept = np.uint64(gap_bits[c]), np.uint64(far_bits[c]), step_key
                _change(bits, start, codes, kept, c, end, masks, passed, left, far, bit)
            left[c] -= end
        pass_tile(data, start * width, stop * width, sums, hashed)


@inlined
def _copy_last(bits: Bits, start: int, last: Bits) -> np.uint64:
    """Copy the elements from `start` on, fewer than lanes; returns the lanes that hold them."""
    for i in range(start, bits.size):
        last[i - start] = bits[i]
    return (_ONE << np.uint64(max(0, bits.size - start))) - _ONE


@inlined
def _change(
    bits: Bits,
    start: int,
    codes: Bytes,
    kept: tuple[np.uint64, np.uint64, np.uint64],
    c: int,
    end: np.uint64,
    masks: Words,
    passed: Words,
    left: Words,
    far: Words,
    bit: Words,
) -> None:
    """Make the changes of a class in the tile that begins at `start` and has `end` of it."""
    gap, fars, at = left[c], far[c], bit[c]
    gap_bits, far_bits, step_key = kept
    column = np.uint64(c)
    while gap < end:
        # The row, by a search without a branch.
        row, step = _NONE, np.uint64(_ROWS // 2)
        while step:
            row += step * np.uint64(passed[_COLUMNS * (row + step) + column] <= gap)
            step >>= _ONE
        lane = _nth_lane(masks[_COLUMNS * row + column], gap - passed[_COLUMNS * row + column])
        position = np.uint64(start) + np.uint64(LANES) * row + lane
        minus = (np.uint64(codes[at >> _THREE]) >> (at & _SEVEN)) & _ONE
        at += _ONE
        step, value = _ONE, np.uint64(bits[position])
        if fars == _NONE:
            step, at = _code_at(codes, at, _step_bits(_key(value, width_of(bits)), step_key))
            step += _TWO
            fars, at = _code_at(codes, at, far_bits)
        else:
            fars -= _ONE
        bits[position] = value + ((step ^ (_NONE - minus)) + minus)
        more, at = _code_at(codes, at, gap_bits)
        gap += more + _ONE
    left[c], far[c], bit[c] = gap, fars, at


@compiled
def count_keys(old: Bits, new: Bits, elements: Words, changed: Words) -> None:
    """Add up how many elements have each key, by a sample, and exactly how many changed."""
    width = width_of(old)
    for group in range(0, old.size, LANES):
        stop = min(old.size, group + LANES)
        if stop == group + LANES:
            mask, _, _ = step_masks(old, new, group)
            while mask:
                lane = first_lane(mask)
                mask &= mask - _ONE
                changed[_key(np.uint64(old[np.uint64(group) + lane]), width)] += _ONE
        else:
            for i in range(group, stop):
                changed[_key(np.uint64(old[i]), width)] += np.uint64(old[i] != new[i])
        if group // LANES % _SAMPLED == 0:
            for i in range(group, stop):
                elements[_key(np.uint64(old[i]), width)] += np.uint64(_SAMPLED)


@compiled
def find_changes(
    old: Bits,
    new: Bits,
    bounds: Bytes,
    gaps: Words,
    steps: Words,
    ends: Words,
    stops: Words,
    after: Words,
    passed: Words,
) -> bool:
    """Write gap and step of each change of a class from `ends` on, which moves; False where a class
    would pass its `stops`. A step: bit 0 minus, bits 1 to 8 the key, then the magnitude.

    All but the last part of a tensor is whole groups of lanes. Between the parts, zeros at first,
    `after` and the first half of `passed` have how many elements of each class there are up to its
    last change, and in all."""
    masks = np.empty(CLASSES, np.uint64)
    last, width = np.zeros(LANES, old.dtype), width_of(old)
    full = _ALL >> np.uint64(64 - 8 * width)
    for group in range(0, old.size, LANES):
        changed = _NONE
        if group + LANES <= old.size:
            put_classes(old, group, _ALL, bounds, 0, masks, passed)
            changed, _, _ = step_masks(old, new, group)
        else:
            put_classes(last, 0, _copy_last(old, group, last), bounds, 0, masks, passed)
            for i in range(group, old.size):
                changed |= np.uint64(old[i] != new[i]) << np.uint64(i - group)
        for c in range(CLASSES):
            hits = masks[c] & changed
            while hits:
                lane = first_lane(hits)
                hits &= hits - _ONE
                before = passed[c] + lane_count(masks[c] & ~(_ALL << lane))
                at, position = ends[c], np.uint64(group) + lane
                if at >= stops[c]:
                    return False
                gaps[at], after[c] = before - after[c], before + _ONE
                value = np.uint64(old[position])
                step = (np.uint64(new[position]) - value) & full
                minus = np.uint64(step > (full >> _ONE))
                step = ((step ^ (_NONE - minus)) + minus) & full
                steps[at] = (step << np.uint64(9)) | (_key(value, width) << _ONE) | minus
                ends[c] = at + _ONE
            passed[c] = passed[CLASSES + c]
    return True


@inlined
def _put_code(codes: Bytes, bit: np.uint64, number: np.uint64, kept: np.uint64) -> np.uint64:
    """Write a code; returns the next bit."""
    zeros = number >> kept
    code, size = number << _ESCAPE_ZEROS, _ESCAPE_BITS
    if zeros < _ESCAPE_ZEROS:
        code = (((number & ((_ONE << kept) - _ONE)) << _ONE) | _ONE) << zeros
        size = zeros + _ONE + kept
    byte = bit >> _THREE
    put_word(codes, byte, word_at(codes, byte) | (code << (bit & _SEVEN)))
    return bit + size


@inlined
def _next_far(steps: Words, at: int) -> int:
    """The next change by more than one unit, from `at` on; the end without one."""
    while at < steps.size and steps[at] >> np.uint64(9) == _ONE:
        at += 1
    return at


@compiled
def write_codes(
    gaps: Words,
    steps: Words,
    after: np.uint64,
    gap_bits: np.uint64,
    far_bits: np.uint64,
    step_key: np.uint64,
    codes: Bytes,
) -> int:
    """Write the codes of one class into zeros, of CODE_BYTES for each change and once more; returns
    their bits."""
    far = _next_far(steps, 0)
    bit = _put_code(codes, _NONE, gaps[0], gap_bits)
    bit = _put_code(codes, bit, np.uint64(far), far_bits)
    for i in range(gaps.size):
        step = steps[i]
        codes[bit >> _THREE] |= np.uint8((step & _ONE) << (bit & _SEVEN))
        bit += _ONE
        if i == far:
            kept = _step_bits((step >> _ONE) & np.uint64(255), step_key)
            bit = _put_code(codes, bit, (step >> np.uint64(9)) - _TWO, kept)
            far = _next_far(steps, i + 1)
            bit = _put_code(codes, bit, np.uint64(far - i - 1), far_bits)
        following = gaps[i + 1] if i + 1 < gaps.size else after
        bit = _put_code(codes, bit, following, gap_bits)
    return int(np.int64(bit))
