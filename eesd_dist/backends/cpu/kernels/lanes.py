"""Vectors of 16 float32 numbers, for functions that Numba compiles.

Numba has no vector type, and LLVM vectorizes a loop over memory only where it can prove that
nothing overlaps. Here a vector is a value: it stays in registers, and every operation is one LLVM
instruction with a fixed meaning. `fma` rounds once on every machine, so that results have the same
bits on all of them; a processor with shorter vectors takes several instructions.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from eesd_dist.model.kv_layout import LANES

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_FLOAT_BYTES = 4
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23

Generator = Callable[[Any, Any, Any, Any], Any]
"""Numba's (context, builder, signature, arguments) -> the LLVM value."""


class LanesType(types.Type):
    """Numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_model(LanesType)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: LanesType) -> None:
        super().__init__(manager, frontend_type, _FLOATS)


_lanes = LanesType()


@intrinsic
def load(typing: Any, array: Any, at: Any) -> tuple[Any, Generator]:
    """Returns array[at : at + LANES]; `array`: float32 numbers, or the address of the first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = builder.load(_address(context, builder, signature.args[0], args))
        vector.align = _FLOAT_BYTES
        return vector

    return _lanes(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, at: Any, x: Any) -> tuple[Any, Generator]:
    """Sets array[at : at + LANES]; `array`: float32 numbers, or the address of the first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(args[2], _address(context, builder, signature.args[0], args))
        stored.align = _FLOAT_BYTES
        return context.get_dummy_value()

    return types.none(array, types.intp, _lanes), generate


@intrinsic
def splat(typing: Any, x: Any) -> tuple[Any, Generator]:
    """Returns x in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(_FLOATS, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))

    return _lanes(types.float32), generate


@intrinsic
def add(typing: Any, x: Any, y: Any) -> tuple[Any, Generator]:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return _lanes(_lanes, _lanes), generate


@intrinsic
def mul(typing: Any, x: Any, y: Any) -> tuple[Any, Generator]:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return _lanes(_lanes, _lanes), generate


@intrinsic
def div(typing: Any, x: Any, y: Any) -> tuple[Any, Generator]:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return _lanes(_lanes, _lanes), generate


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> tuple[Any, Generator]:
    """Returns x * y + z, rounded once."""
    return _lanes(_lanes, _lanes, _lanes), _called("llvm.fma", num_args=3)


@intrinsic
def floor(typing: Any, x: Any) -> tuple[Any, Generator]:
    return _lanes(_lanes), _called("llvm.floor", num_args=1)


@intrinsic
def maximum(typing: Any, x: Any, y: Any) -> tuple[Any, Generator]:
    """Returns x where it is larger, else y."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y = args
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return _lanes(_lanes, _lanes), generate


@intrinsic
def minimum(typing: Any, x: Any, y: Any) -> tuple[Any, Generator]:
    """Returns x where it is smaller, else y."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y = args
        return builder.select(builder.fcmp_ordered("<", x, y), x, y)

    return _lanes(_lanes, _lanes), generate


@intrinsic
def zero_where_less(typing: Any, x: Any, bound: Any, y: Any) -> tuple[Any, Generator]:
    """Returns 0 where x < bound, else y."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, bound, y = args
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered("<", x, bound), zero, y)

    return _lanes(_lanes, _lanes, _lanes), generate


@intrinsic
def swap_pairs(typing: Any, x: Any) -> tuple[Any, Generator]:
    """Exchanges lanes 2i and 2i + 1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        order = ir.Constant(_INTS, [lane ^ 1 for lane in range(LANES)])
        return builder.shuffle_vector(args[0], args[0], order)

    return _lanes(_lanes), generate


@intrinsic
def total(typing: Any, x: Any) -> tuple[Any, Generator]:
    """Returns the sum of all lanes: of halves, of quarters and so on."""
    return types.float32(_lanes), _reduced(lambda builder, x, y: builder.fadd(x, y))


@intrinsic
def highest_lane(typing: Any, x: Any) -> tuple[Any, Generator]:
    def highest(builder: Any, x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return types.float32(_lanes), _reduced(highest)


@intrinsic
def first_lane(typing: Any, x: Any) -> tuple[Any, Generator]:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(ir.IntType(32), 0))

    return types.float32(_lanes), generate


@intrinsic
def store_input(typing: Any, kind: Any, base: Any, at: Any, x: Any) -> tuple[Any, Generator]:
    """Sets the inputs [at, at + LANES) of a product with weights of this kind (`tiles`): float32
    numbers, or bfloat16 ones, rounded to nearest even. `base` is the address of the first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[1:], is_bfloat16=kind.dtype == types.int32, lanes=True)
        return context.get_dummy_value()

    return types.none(kind, types.int64, types.intp, _lanes), generate


@intrinsic
def store_one_input(typing: Any, kind: Any, base: Any, at: Any, x: Any) -> tuple[Any, Generator]:
    """Sets one input, as `store_input`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[1:], is_bfloat16=kind.dtype == types.int32, lanes=False)
        return context.get_dummy_value()

    return types.none(kind, types.int64, types.intp, types.float32), generate


@intrinsic
def number_bytes(typing: Any, stored: Any) -> tuple[Any, Generator]:
    """Returns the bytes of one stored number. Of `stored` the type counts: float32, or uint16 for
    bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), signature.args[0].bitwidth // 8)

    return types.int64(stored), generate


@intrinsic
def store_numbers(typing: Any, stored: Any, base: Any, at: Any, x: Any) -> tuple[Any, Generator]:
    """Sets the stored numbers [at, at + LANES), as `store_input`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[1:], is_bfloat16=stored == types.uint16, lanes=True)
        return context.get_dummy_value()

    return types.none(stored, types.int64, types.intp, _lanes), generate


@intrinsic
def store_number(typing: Any, stored: Any, base: Any, at: Any, x: Any) -> tuple[Any, Generator]:
    """Sets one stored number, as `store_numbers`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[1:], is_bfloat16=stored == types.uint16, lanes=False)
        return context.get_dummy_value()

    return types.none(stored, types.int64, types.intp, types.float32), generate


@intrinsic
def _numbers_at(typing: Any, stored: Any, address: Any) -> tuple[Any, Generator]:
    """Returns a pointer to stored numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return types.CPointer(stored)(stored, types.int64), generate


@njit(nogil=True, error_model="numpy")
def numbers(stored, address):  # type: ignore[no-untyped-def]
    """Returns the stored numbers from an address on, as `floats`; those of bfloat16 are bits."""
    return carray(_numbers_at(stored, address), (1 << 40,))


@intrinsic
def _floats_at(typing: Any, address: Any) -> tuple[Any, Generator]:
    """Returns a pointer to float32 numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), generate


@njit(nogil=True, error_model="numpy")
def floats(address):  # type: ignore[no-untyped-def]
    """Returns the float32 numbers from an address on, as an array. No index is checked."""
    return carray(_floats_at(address), (1 << 40,))  # Numba wants a length


@intrinsic
def _ints_at(typing: Any, address: Any) -> tuple[Any, Generator]:
    """Returns a pointer to int32 numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), generate


@njit(nogil=True, error_model="numpy")
def ints(address):  # type: ignore[no-untyped-def]
    """Returns the int32 numbers from an address on, as `floats`."""
    return carray(_ints_at(address), (1 << 40,))


@intrinsic
def address_of(typing: Any, array: Any) -> tuple[Any, Generator]:
    """Returns the address of an array's first number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def power_of_two(typing: Any, exponent: Any) -> tuple[Any, Generator]:
    """Returns 2^x for whole numbers from -126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(
            builder.fptosi(args[0], _INTS), ir.Constant(_INTS, [_EXPONENT_BIAS] * LANES)
        )
        shifted = builder.shl(biased, ir.Constant(_INTS, [_MANTISSA_BITS] * LANES))
        return builder.bitcast(shifted, _FLOATS)

    return _lanes(_lanes), generate


def _address(context: Any, builder: Any, array_type: Any, args: Any) -> Any:
    if isinstance(array_type, types.Integer):
        data = builder.inttoptr(args[0], ir.FloatType().as_pointer())
    else:
        data = context.make_array(array_type)(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), _FLOATS.as_pointer())


def _reduced(combine: Callable[[Any, Any, Any], Any]) -> Generator:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, width = args[0], LANES // 2
        while width:
            order = ir.Constant(_INTS, [lane ^ width for lane in range(LANES)])
            x = combine(builder, x, builder.shuffle_vector(x, x, order))
            width //= 2
        return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))

    return generate


def _store(builder: Any, args: Any, *, is_bfloat16: bool, lanes: bool) -> None:
    base, at, x = args
    element, width = (ir.IntType(16), 2) if is_bfloat16 else (ir.FloatType(), 4)
    value = _bfloat16_bits(builder, x, lanes=lanes) if is_bfloat16 else x
    data = builder.inttoptr(base, element.as_pointer())
    target = builder.bitcast(builder.gep(data, [at]), value.type.as_pointer())
    builder.store(value, target).align = width


def _bfloat16_bits(builder: Any, x: Any, *, lanes: bool) -> Any:
    """Rounds to nearest even; what is no number stays none."""

    def all_lanes(value: int) -> ir.Constant:
        return ir.Constant(_INTS, [value] * LANES) if lanes else ir.Constant(ir.IntType(32), value)

    half = ir.IntType(16)
    bits = builder.bitcast(x, all_lanes(0).type)
    odd = builder.and_(builder.lshr(bits, all_lanes(16)), all_lanes(1))
    rounded = builder.add(bits, builder.add(odd, all_lanes(0x7FFF)))
    is_number = builder.fcmp_ordered("ord", x, x)
    nan_safe = builder.select(is_number, rounded, all_lanes(0x7FC00000))
    high = builder.lshr(nan_safe, all_lanes(16))
    return builder.trunc(high, ir.VectorType(half, LANES) if lanes else half)


def _called(name: str, *, num_args: int) -> Generator:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * num_args)
        function = get_or_insert_function(builder.module, kind, f"{name}.v{LANES}f32")
        return builder.call(function, args)

    return generate
