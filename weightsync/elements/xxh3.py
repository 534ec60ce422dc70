"""xxh3-128 inside compiled loops, so that a block is hashed by the loop that still has it in cache.

The library's function is as fast, but every call of it gives up Python's lock and takes it back,
and two threads then wait for each other. For inputs of more than 240 bytes and the specification's
default secret; shorter ones are the library's. A hash in the making is eight accumulators, taken
over the blocks of one contiguous input in order.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from weightsync.elements.bits import Bytes
from weightsync.elements.compiled import compiled, generated, inlined

Accumulators: TypeAlias = npt.NDArray[np.uint64]

MIN_BYTES = 241
BLOCK_BYTES = 1024
STRIPE_BYTES = 64
_STRIPES = BLOCK_BYTES // STRIPE_BYTES

_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype=np.uint8,
)
# Where in the secret the specification takes its keys from.
_SCRAMBLE_AT = 192 - STRIPE_BYTES
_LAST_STRIPE_AT = _SCRAMBLE_AT - 7
_LOW_AT = 11
_HIGH_AT = _SCRAMBLE_AT - 11
_PRIME32_1 = np.uint64(0x9E3779B1)
_PRIME32_2 = np.uint64(0x85EBCA77)
_PRIME32_3 = np.uint64(0xC2B2AE3D)
_PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME64_3 = np.uint64(0x165667B19E3779F9)
_PRIME64_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
_PRIME_MX = np.uint64(0x165667919E3779F9)
_START = (
    _PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1
)  # fmt: skip
_STARTED = np.array(_START, dtype=np.uint64)
SECRET_WORDS = _SECRET.view("<u8")
"""A stripe's keys begin at the word of its number in the block; a block is scrambled by those from
SCRAMBLE_WORD on."""
SCRAMBLE_WORD = _SCRAMBLE_AT // 8
SCRAMBLE_PRIME = int(_PRIME32_1)

_WORD = ir.IntType(64)
_STRIPE = ir.VectorType(_WORD, 8)


def started() -> Accumulators:
    """The hash of nothing yet."""
    return _STARTED.copy()


@generated(
    lambda sums, data, _at, _stripes, _key: types.void(
        sums, data, types.int64, types.int64, types.int64
    )
)
def _accumulate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(sums, data, at, stripes, key): stripes of 64 bytes from byte `at`, keys from byte `key`."""
    keys = _secret(context, builder)
    total = _all_of(context, builder, signature, args)
    data = context.make_array(signature.args[1])(context, builder, args[1]).data
    held = cgutils.alloca_once_value(builder, builder.load(total, align=8))
    swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    with cgutils.for_range(builder, args[3]) as loop:
        offset = builder.mul(loop.index, _WORD(STRIPE_BYTES))
        words = _stripe(builder, data, builder.add(args[2], offset))
        key_at = builder.add(args[4], builder.mul(loop.index, _WORD(8)))
        keyed = builder.xor(words, _stripe(builder, keys, key_at))
        product = builder.mul(
            builder.and_(keyed, _each(0xFFFFFFFF)), builder.lshr(keyed, _each(32))
        )
        swapped = builder.shuffle_vector(words, words, swap)
        summed = builder.add(builder.load(held), builder.add(product, swapped))
        builder.store(summed, held)
    builder.store(builder.load(held), total, align=8)


@generated(lambda sums: types.void(sums))  # noqa: PLW0108 - arguments are counted
def _scramble(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Mixes all accumulators, as after each block. Together: eight results written one by one are
    not there yet when the next stripe asks for them as one."""
    keys = _secret(context, builder)
    total = _all_of(context, builder, signature, args)
    held = builder.load(total, align=8)
    mixed = builder.xor(held, builder.lshr(held, _each(47)))
    mixed = builder.xor(mixed, _stripe(builder, keys, _WORD(_SCRAMBLE_AT)))
    builder.store(builder.mul(mixed, _each(int(_PRIME32_1))), total, align=8)


def _secret(context: Any, builder: Any) -> Any:
    """Address of the secret's first byte."""
    kind = types.Array(types.uint8, 1, "C")
    secret = context.make_constant_array(builder, kind, _SECRET)
    return context.make_array(kind)(context, builder, secret).data


def _all_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Address of the accumulators, the first argument, as one vector."""
    sums = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(sums, _STRIPE.as_pointer())


def _stripe(builder: Any, base: Any, offset: Any) -> Any:
    address = builder.bitcast(builder.gep(base, [offset]), _STRIPE.as_pointer())
    return builder.load(address, align=1)


def _each(value: int) -> Any:
    return ir.Constant(_STRIPE, [value] * 8)


@generated(lambda _left, _right: types.uint64(types.uint64, types.uint64))
def _folded(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """The two halves of the 128-bit product, one xor the other."""
    wide = ir.IntType(128)
    product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
    high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)
    return builder.xor(builder.trunc(product, _WORD), high)


@inlined
def absorb(sums: Accumulators, data: Bytes, start: int, stop: int) -> int:
    """Takes the whole blocks of `data` from `start` up to `stop`, but for the last of an input,
    which is left to `finished`; returns where it stopped."""
    stop = min(stop, data.size - 1)
    while start + BLOCK_BYTES <= stop:
        _accumulate(sums, data, start, _STRIPES, 0)
        _scramble(sums)
        start += BLOCK_BYTES
    return start


@compiled
def finished(sums: Accumulators, data: Bytes) -> tuple[np.uint64, np.uint64]:
    """(high, low) words of the hash of `data`, at least MIN_BYTES, all of which was absorbed."""
    start = (data.size - 1) // BLOCK_BYTES * BLOCK_BYTES
    return finished_by_end(sums, data, start, np.uint64(data.size))


@compiled
def finished_by_end(
    sums: Accumulators, end: Bytes, start: int, size: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """`finished` of an input of `size` bytes, given its last bytes: `sums` has taken all before
    byte `start` of `end`, which has at least a stripe."""
    _accumulate(sums, end, start, (end.size - 1 - start) // STRIPE_BYTES, 0)
    _accumulate(sums, end, end.size - STRIPE_BYTES, 1, _LAST_STRIPE_AT)
    low = _merged(sums, _LOW_AT, size * _PRIME64_1)
    return _merged(sums, _HIGH_AT, ~(size * _PRIME64_2)), low


@compiled
def _key(at: int) -> np.uint64:
    key = np.uint64(0)
    for byte in range(8):
        key |= np.uint64(_SECRET[at + byte]) << np.uint64(8 * byte)
    return key


@compiled
def _merged(sums: Accumulators, at: int, start: np.uint64) -> np.uint64:
    merged = start
    for pair in range(4):
        left = sums[2 * pair] ^ _key(at + 16 * pair)
        merged += _folded(left, sums[2 * pair + 1] ^ _key(at + 16 * pair + 8))
    merged ^= merged >> np.uint64(37)
    merged *= _PRIME_MX
    return merged ^ (merged >> np.uint64(32))
