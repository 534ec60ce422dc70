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
U64 = types.uint64
_LINE_BYTES = 64

_MASK = ir.IntType(64)


@generated(lambda old, new, at: types.UniTuple(U64, 3)(old, new, at))  # noqa: PLW0108
def step_masks(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(changed, by plus one, by minus one) for elements `at` to `at` + 63, modulo their width."""
    before = lanes_at(context, builder, signature.args[0], args[0], args[2])
    after = lanes_at(context, builder, signature.args[1], args[1], args[2])
    step = builder.sub(after, before)
    minus_one = (1 << signature.args[0].dtype.bitwidth) - 1
    changed = builder.not_(_equal(builder, step, 0))
    masks = [changed, _equal(builder, step, 1), _equal(builder, step, minus_one)]
    return context.make_tuple(builder, signature.return_type, masks)


@generated(lambda _mask: U64(U64))
def first_lane(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """Number of the lowest set bit; 64 if no bit is set."""
    return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))


@generated(lambda _mask: U64(U64))
def behind_last_lane(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """One more than the number of the highest set bit; 0 if no bit is set."""
    above = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
    return builder.sub(_MASK(LANES), above)


@generated(lambda _mask: U64(U64))
def lane_count(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    """How many bits are set."""
    return builder.ctpop(args[0])


@generated(lambda data, _at, _value: U64(data, U64, types.uint8))
def lanes_holding(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(data, at, value): bit k is set where byte `at` + k of 64 is `value`."""
    lanes = lanes_at(context, builder, signature.args[0], args[0], args[1])
    expected = each_lane(builder, args[2])
    return builder.bitcast(builder.icmp_unsigned("==", lanes, expected), _MASK)


@generated(lambda data, _at: U64(data, U64))
def word_at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(data, at): the eight bytes from byte `at` on, least significant first."""
    return builder.load(_word(context, builder, signature.args[0], args), align=1)


@generated(lambda data, _at, _value: types.void(data, U64, U64))
def put_word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(data, at, value): writes eight bytes from byte `at` on, least significant first."""
    builder.store(args[2], _word(context, builder, signature.args[0], args), align=1)


@generated(lambda values, _at, _plane: U64(values, U64, U64))
def plane_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(values, at, plane): bit `plane` of each of the 64 values from `at` on."""
    lanes = lanes_at(context, builder, signature.args[0], args[0], args[1])
    one = lanes.type.element(1)
    asked = each_lane(builder, builder.shl(one, builder.trunc(args[2], one.type)))
    none = ir.Constant(lanes.type, [0] * LANES)
    return builder.bitcast(builder.icmp_unsigned("!=", builder.and_(lanes, asked), none), _MASK)


@generated(lambda data, _at: U64(data, U64))
def byte_sum(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(data, at): the sum of the 64 bytes from byte `at` on."""
    lanes = lanes_at(context, builder, signature.args[0], args[0], args[1])
    word = ir.VectorType(ir.IntType(16), LANES)
    name = "llvm.vector.reduce.add.v64i16"
    kind = ir.FunctionType(word.element, [word])
    total = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.zext(builder.call(total, [builder.zext(lanes, word)]), _MASK)


@generated(lambda into, _minus: types.void(into, U64))
def put_signs(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(into, minus): writes 64 bytes, -1 for every lane that `minus` holds and 1 for the others."""
    lanes = ir.VectorType(ir.IntType(8), LANES)
    up, down = (ir.Constant(lanes, [n] * LANES) for n in (1, -1))
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    minus = builder.bitcast(args[1], ir.VectorType(ir.IntType(1), LANES))
    address = builder.bitcast(data, lanes.as_pointer())
    builder.store(builder.select(minus, down, up), address, align=1)


@generated(
    lambda data, _at, _planes, _values: types.void(
        data, U64, U64, types.Array(types.uint16, 1, "C")
    )
)
def join_planes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(data, at, planes, values): 64 values of `planes` planes, one word each from byte `at` on."""
    joined = joined_planes(context, builder, signature.args[0], *args[:3])
    into = context.make_array(signature.args[3])(context, builder, args[3]).data
    builder.store(joined, builder.bitcast(into, joined.type.as_pointer()), align=2)


@generated(lambda bits, at: types.void(bits, at))  # noqa: PLW0108 - arguments are counted
def prefetch(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Asks for the cache line of element `at`, which may lie behind the end."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    _ask_for(builder, builder.gep(data, [args[1]]), 0)


@generated(lambda bits, _at, _ahead_bytes: types.void(bits, types.int64, types.int64))
def prefetch_lanes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """(bits, at, ahead_bytes): prefetches memory `ahead_bytes` after 64 elements from `at` on."""
    kind = signature.args[0]
    data = context.make_array(kind)(context, builder, args[0]).data
    first = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
    first = builder.gep(first, [args[2]])
    for line in range(0, LANES * kind.dtype.bitwidth // 8, _LINE_BYTES):
        _ask_for(builder, first, line)


@generated(lambda bits: types.int64(bits))  # noqa: PLW0108 - arguments are counted
def width_of(_context: Any, _builder: Any, signature: Any, _args: Any) -> Any:
    """Bytes of an element: a constant, where `itemsize` is read and divided by in every turn."""
    return _MASK(signature.args[0].dtype.bitwidth // 8)


def _ask_for(builder: Any, address: Any, offset: int) -> None:
    flag, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    prefetch = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
        builder.module, kind, "llvm.prefetch.p0"
    )
    address = builder.gep(builder.bitcast(address, byte), [_MASK(offset)])
    builder.call(prefetch, [address, flag(0), flag(3), flag(1)])


def lanes_at(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """64 elements of a contiguous array as one vector, whatever their alignment."""
    element = ir.IntType(array_type.dtype.bitwidth)
    vector = ir.VectorType(element, LANES)
    data = context.make_array(array_type)(context, builder, array).data
    address = builder.bitcast(builder.gep(data, [at]), vector.as_pointer())
    return builder.load(address, align=element.width // 8)


def each_lane(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, empty, zeros)


def joined_planes(
    context: Any, builder: Any, array_type: Any, array: Any, at: Any, planes: Any
) -> Any:
    """64 values of `planes` planes as one vector."""
    vector, bits = (ir.VectorType(ir.IntType(n), LANES) for n in (16, 1))
    joined = cgutils.alloca_once_value(builder, ir.Constant(vector, [0] * LANES))
    with cgutils.for_range(builder, planes) as loop:
        # The highest plane first.
        plane = builder.sub(builder.sub(planes, loop.index), _MASK(1))
        address = _word(
            context, builder, array_type, (array, builder.add(at, builder.shl(plane, _MASK(3))))
        )
        set_bits = builder.zext(builder.bitcast(builder.load(address, align=1), bits), vector)
        held = builder.load(joined)
        builder.store(builder.add(builder.add(held, held), set_bits), joined)
    return builder.load(joined)


def _word(context: Any, builder: Any, array_type: Any, args: Any) -> Any:
    """Address of eight bytes of an array of bytes, whatever their alignment."""
    data = context.make_array(array_type)(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), _MASK.as_pointer())


def _equal(builder: Any, vector: Any, value: int) -> Any:
    """Bit k is set where lane k holds `value`."""
    expected = ir.Constant(vector.type, [value] * LANES)
    return builder.bitcast(builder.icmp_unsigned("==", vector, expected), _MASK)
