"""Compresses the lanes of a 64-lane vector that a mask picks to the front.

Processors with one instruction for it compare two states in half the time; on others LLVM emits
some three hundred, and `IS_QUICK` is False. The functions check no bounds, as in lanes.py: each
writes up to 64 elements after the picked ones.
"""

from typing import Any

from llvmlite import binding, ir
from numba import config
from numba.core import cgutils, types

from weightsync.elements.compiled import generated
from weightsync.elements.lanes import LANES, U64, each_lane, joined_planes

IS_KNOWN = binding.llvm_version_info >= (19,)
"""Whether this LLVM has the intrinsic; without it nothing here can be compiled."""
_FEW = 16
"""Elements written at once; more lanes of a group are seldom picked."""
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_NUMBERS = ir.Constant(_BYTES, list(range(LANES)))
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_POSITION = ir.IntType(32)
_PICK = "llvm.experimental.vector.compress.v64i8"


def has_feature(name: str) -> bool:
    """Whether the processor that numba compiles for has it; numba's settings may narrow that."""
    if config.CPU_FEATURES is not None:
        return f"+{name}" in config.CPU_FEATURES.split(",")
    return bool(binding.get_host_cpu_features().get(name, False))


IS_QUICK = IS_KNOWN and has_feature("avx512vbmi2")
"""Whether this processor compresses bytes in one instruction that LLVM supports."""


@generated(lambda into, _at, _mask: types.void(into, U64, U64))
def put_distances(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(into, at, mask): for every picked lane but the first, the number of lanes between it and the
    previous picked one, from byte `at` + 1 on."""
    lanes = _picked(builder, _NUMBERS, args[2])
    before = [max(0, lane - 1) for lane in range(LANES)]
    behind = builder.shuffle_vector(lanes, lanes, ir.Constant(_indices(LANES), before))
    between = builder.sub(builder.sub(lanes, behind), _each(1))
    _put(context, builder, signature.args[0], args[0], args[1], between, args[2])


@generated(lambda into, _at, _flags, _mask: types.void(into, U64, U64, U64))
def put_flags(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(into, at, flags, mask): 1 for every picked lane that is in `flags`, else 0."""
    ones = builder.zext(_lanes_of(builder, args[2]), _BYTES)
    picked = _picked(builder, ones, args[3])
    _put(context, builder, signature.args[0], args[0], args[1], picked, args[3])


@generated(lambda into, _at, _mask, _first: types.void(into, U64, U64, U64))
def put_lanes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(into, at, mask, first): the indices of the picked lanes, counted from `first`."""
    lanes = _picked(builder, _NUMBERS, args[2])
    wide = builder.zext(lanes, ir.VectorType(_POSITION, LANES))
    positions = builder.add(wide, each_lane(builder, builder.trunc(args[3], _POSITION)))
    _put(context, builder, signature.args[0], args[0], args[1], positions, args[2])


@generated(lambda into, _at, _word, _first: types.void(into, U64, U64, U64))
def put_ones(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(into, at, word, first): the indices of a word's set bits, counted from `first`, then
    undefined values up to 64."""
    numbers = builder.zext(_picked(builder, _NUMBERS, args[2]), _HALVES)
    first = each_lane(builder, builder.trunc(args[3], _HALVES.element))
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    address = builder.bitcast(builder.gep(data, [args[1]]), _HALVES.as_pointer())
    builder.store(builder.add(numbers, first), address, align=2)


@generated(
    lambda lows, _at, _planes, ones, _first, _after, into: types.void(
        lows, U64, U64, ones, U64, U64, into
    )
)
def put_group(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(lows, at, planes, ones, first, after, into): the positions of a group's 64 changes.

    The low bits of the gaps, at most nine, are in planes from byte `at` on; `ones` are the bits
    that end the unary codes above them, the first of which begins at bit `first`; `after` is the
    position after the previous change.
    """
    lows_type, ones_type, into_type = signature.args[0], signature.args[3], signature.args[6]
    unchanged = _sums(builder, joined_planes(context, builder, lows_type, *args[:3]))
    data = context.make_array(ones_type)(context, builder, args[3]).data
    ones = builder.load(builder.bitcast(data, _HALVES.as_pointer()), align=2)
    numbers = ir.Constant(_HALVES, list(range(LANES)))
    first = each_lane(builder, builder.trunc(args[4], _HALVES.element))
    zeros = builder.sub(ones, builder.add(numbers, first))
    positions = ir.VectorType(_POSITION, LANES)
    planes = each_lane(builder, builder.trunc(args[2], _POSITION))
    above = builder.shl(builder.zext(zeros, positions), planes)
    below = builder.zext(builder.add(unchanged, numbers), positions)
    behind = builder.zext(builder.add(above, below), ir.VectorType(ir.IntType(64), LANES))
    found = builder.add(behind, each_lane(builder, args[5]))
    into = context.make_array(into_type)(context, builder, args[6]).data
    builder.store(found, builder.bitcast(into, found.type.as_pointer()), align=8)


@generated(lambda into, _at: types.void(into, U64))
def put_escapes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(into, at): write sixteen bytes of 255."""
    few = ir.VectorType(ir.IntType(8), _FEW)
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    address = builder.bitcast(builder.gep(data, [args[1]]), few.as_pointer())
    builder.store(ir.Constant(few, [255] * _FEW), address, align=1)


def _picked(builder: Any, values: Any, mask: Any) -> Any:
    """The picked lanes at the front; the rest is undefined."""
    lanes = ir.VectorType(ir.IntType(1), LANES)
    kind = ir.FunctionType(_BYTES, [_BYTES, lanes, _BYTES])
    pick = builder.module.globals.get(_PICK) or ir.Function(builder.module, kind, _PICK)
    return builder.call(pick, [values, _lanes_of(builder, mask), _each(0)])


def _sums(builder: Any, values: Any) -> Any:
    """Prefix sums, inclusive."""
    nothing = ir.Constant(values.type, [0] * LANES)
    step = 1
    while step < LANES:
        moved = [LANES] * step + list(range(LANES - step))
        values = builder.add(
            values, builder.shuffle_vector(values, nothing, ir.Constant(_indices(LANES), moved))
        )
        step *= 2
    return values


def _lanes_of(builder: Any, mask: Any) -> Any:
    return builder.bitcast(mask, ir.VectorType(ir.IntType(1), LANES))


def _put(
    context: Any, builder: Any, array_type: Any, array: Any, at: Any, values: Any, mask: Any
) -> None:
    """Write the first 16 values, and the rest if more are picked."""
    data = context.make_array(array_type)(context, builder, array).data
    address = builder.gep(data, [at])
    few = builder.shuffle_vector(values, values, ir.Constant(_indices(_FEW), list(range(_FEW))))
    builder.store(few, builder.bitcast(address, few.type.as_pointer()), align=1)
    is_more = builder.icmp_unsigned(">", builder.ctpop(mask), mask.type(_FEW))
    with cgutils.if_unlikely(builder, is_more):
        builder.store(values, builder.bitcast(address, values.type.as_pointer()), align=1)


def _indices(count: int) -> Any:
    return ir.VectorType(ir.IntType(32), count)


def _each(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * LANES)
