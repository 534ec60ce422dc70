"""Sixty-four neighbouring elements at a time, as bit masks: the vector unit as numba code sees it.

numba has neither a compare that gives a mask nor counts of bits; LLVM has them for every processor,
so these are a few functions in its own terms. They check no bounds and work inside compiled code
only.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from weightsync.elements.compiled import generated

LANES = 64

_MASK = ir.IntType(64)


@generated
def step_masks(_typing: Any, old: Any, new: Any, at: Any) -> Any:
    """(changed, by plus one, by minus one) for elements `at` to `at` + 63, modulo their width."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before = _lanes(context, builder, signature.args[0], args[0], args[2])
        after = _lanes(context, builder, signature.args[1], args[1], args[2])
        step = builder.sub(after, before)
        minus_one = (1 << signature.args[0].dtype.bitwidth) - 1
        changed = builder.not_(_equal(builder, step, 0))
        masks = [changed, _equal(builder, step, 1), _equal(builder, step, minus_one)]
        return context.make_tuple(builder, signature.return_type, masks)

    return types.UniTuple(types.uint64, 3)(old, new, at), generate


@generated
def first_lane(_typing: Any, _mask: Any) -> Any:
    """Number of the lowest set bit; 64 where none is."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@generated
def lane_count(_typing: Any, _mask: Any) -> Any:
    """How many bits are set."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@generated
def lanes_holding(_typing: Any, data: Any, _at: Any, _value: Any) -> Any:
    """(data, at, value): bit k is set where byte `at` + k of 64 is `value`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _lanes(context, builder, signature.args[0], args[0], args[1])
        empty = ir.Constant(lanes.type, ir.Undefined)
        first = builder.insert_element(empty, args[2], ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        wanted = builder.shuffle_vector(first, empty, zeros)
        return builder.bitcast(builder.icmp_unsigned("==", lanes, wanted), _MASK)

    return types.uint64(data, types.uint64, types.uint8), generate


@generated
def word_at(_typing: Any, data: Any, _at: Any) -> Any:
    """(data, at): the eight bytes from byte `at` on, least significant first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_word(context, builder, signature.args[0], args), align=1)

    return types.uint64(data, types.uint64), generate


@generated
def put_word(_typing: Any, data: Any, _at: Any, _value: Any) -> Any:
    """(data, at, value): writes eight bytes from byte `at` on, least significant first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _word(context, builder, signature.args[0], args), align=1)
        return context.get_dummy_value()

    return types.void(data, types.uint64, types.uint64), generate


@generated
def plane_of(_typing: Any, _values: Any, _plane: Any) -> Any:
    """(values, plane): bit `plane` of each of the first 64 values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _lanes(context, builder, signature.args[0], args[0], _MASK(0))
        bit = builder.shl(ir.IntType(16)(1), builder.trunc(args[1], ir.IntType(16)))
        empty = ir.Constant(lanes.type, ir.Undefined)
        first = builder.insert_element(empty, bit, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        asked = builder.and_(lanes, builder.shuffle_vector(first, empty, zeros))
        none = ir.Constant(lanes.type, [0] * LANES)
        return builder.bitcast(builder.icmp_unsigned("!=", asked, none), _MASK)

    return types.uint64(types.Array(types.uint16, 1, "C"), types.uint64), generate


@generated
def join_planes(_typing: Any, data: Any, _at: Any, _planes: Any, _values: Any) -> Any:
    """(data, at, planes, values): makes the first 64 values of so many planes, one word each from
    byte `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, bits = (ir.VectorType(ir.IntType(n), LANES) for n in (16, 1))
        joined = cgutils.alloca_once_value(builder, ir.Constant(vector, [0] * LANES))
        with cgutils.for_range(builder, args[2]) as loop:
            # The highest plane first.
            plane = builder.sub(builder.sub(args[2], loop.index), _MASK(1))
            at = builder.add(args[1], builder.shl(plane, _MASK(3)))
            address = _word(context, builder, signature.args[0], (args[0], at))
            set_bits = builder.zext(builder.bitcast(builder.load(address, align=1), bits), vector)
            held = builder.load(joined)
            builder.store(builder.add(builder.add(held, held), set_bits), joined)
        into = context.make_array(signature.args[3])(context, builder, args[3]).data
        address = builder.bitcast(into, vector.as_pointer())
        builder.store(builder.load(joined), address, align=2)
        return context.get_dummy_value()

    values_type = types.Array(types.uint16, 1, "C")
    return types.void(data, types.uint64, types.uint64, values_type), generate


@generated
def prefetch(_typing: Any, bits: Any, at: Any) -> Any:
    """Asks for the cache line of element `at`, which may lie behind the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        flag, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        wanted = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, kind, "llvm.prefetch.p0"
        )
        address = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(wanted, [address, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(bits, at), generate


def _lanes(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """64 elements of a contiguous array as one vector, whatever their alignment."""
    element = ir.IntType(array_type.dtype.bitwidth)
    vector = ir.VectorType(element, LANES)
    data = context.make_array(array_type)(context, builder, array).data
    address = builder.bitcast(builder.gep(data, [at]), vector.as_pointer())
    return builder.load(address, align=element.width // 8)


def _word(context: Any, builder: Any, array_type: Any, args: Any) -> Any:
    """Address of eight bytes of an array of bytes, whatever their alignment."""
    data = context.make_array(array_type)(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), _MASK.as_pointer())


def _equal(builder: Any, vector: Any, value: int) -> Any:
    """Bit k is set where lane k holds `value`."""
    wanted = ir.Constant(vector.type, [value] * LANES)
    return builder.bitcast(builder.icmp_unsigned("==", vector, wanted), _MASK)
