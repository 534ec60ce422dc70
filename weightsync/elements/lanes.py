"""Sixty-four neighbouring elements at a time, as bit masks: the vector unit as numba code sees it.

numba has neither a compare that gives a mask nor counts of bits; LLVM has them for every processor,
so these are a few functions in its own terms. They check no bounds and work inside compiled code
only.
"""

from typing import Any

from llvmlite import ir
from numba.core import types

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


def _equal(builder: Any, vector: Any, value: int) -> Any:
    """Bit k is set where lane k holds `value`."""
    wanted = ir.Constant(vector.type, [value] * LANES)
    return builder.bitcast(builder.icmp_unsigned("==", vector, wanted), _MASK)
