"""Tiles of a product: a few rows times a few blocks of output channels, summed in registers.

Weights are packed in blocks of 32 output channels, one input (or one pair of inputs) after the
other, so that a block is read from front to back. Every output is one chain over the inputs in
their order, whatever else the tile computes: its bits depend on its row and its channel alone.

The kind of weights is the type of an empty array, by which Numba compiles: `float32`, `int16`
(float16), `uint16` (bfloat16, widened), `int32` (pairs of bfloat16 for processors that multiply
them: the products of a pair are added to the float32 sum, the second one first). The tiles are
LLVM instructions made here, because Numba's own loops keep no more than a few sums in registers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from eesd_dist.model.attention.layout import LANES

BLOCK = 2 * LANES
"""Output channels in one block of weights."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_I32, LANES)
_VECTORS = BLOCK // LANES
_FLOAT_BYTES = 4


class _BFloat(ir.Type):
    """llvmlite has no name for LLVM's bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@cache
def host_features() -> Mapping[str, bool]:
    """Returns the features of the processor that Numba compiles for."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return {}
    return dict(llvmlite.binding.get_host_cpu_features())


def multiplies_bfloat16() -> bool:
    return bool(host_features().get("avx512bf16"))


def _tile_shapes() -> Mapping[int, Sequence[int]]:
    """Returns rows -> the numbers of blocks that are computed together, the largest first: enough
    chains to hide an instruction's latency, and no more than the registers hold."""
    if host_features().get("avx512f"):
        return {1: (4, 2, 1), 2: (4, 2, 1), 3: (2, 1), 4: (2, 1)} | {
            rows: (1,) for rows in range(5, 13)
        }
    return {1: (2, 1), 2: (1,), 3: (1,)}


TILE_SHAPES = _tile_shapes()
MOST_ROWS = max(TILE_SHAPES)


@intrinsic
def tile(  # type: ignore[no-untyped-def]
    typing, kind, weights, block_bytes, inputs, input_bytes, num_steps, sums, sum_bytes, rows, blocks
):
    """sums = inputs @ weights for `rows` rows and `blocks` blocks, one of `TILE_SHAPES`.

    All but `kind` are whole numbers: addresses, distances between blocks and between rows in bytes,
    and the number of inputs (of pairs) of a row.
    """
    step = _STEPS[kind.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = [builder.sext(x, _I64) if x.type != _I64 else x for x in args[1:]]
        done = builder.append_basic_block("done")
        key = builder.add(builder.mul(place[7], ir.Constant(_I64, 16)), place[8])
        chosen = builder.switch(key, done)
        for num_rows, counts in TILE_SHAPES.items():
            for num_blocks in counts:
                case = builder.append_basic_block(f"rows{num_rows}_blocks{num_blocks}")
                chosen.add_case(ir.Constant(_I64, 16 * num_rows + num_blocks), case)
                builder.position_at_end(case)
                _emit(builder, step, num_rows, num_blocks, *place[:7])
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    numbers = (types.int64,) * 9
    return types.none(kind, *numbers), generate


def _emit(
    builder: Any,
    step: "_Step",
    num_rows: int,
    num_blocks: int,
    weights: Any,
    block_bytes: Any,
    inputs: Any,
    input_bytes: Any,
    num_steps: Any,
    sums: Any,
    sum_bytes: Any,
) -> None:
    zero = ir.Constant(_I64, 0)
    row_inputs = [_moved(builder, inputs, input_bytes, row) for row in range(num_rows)]
    block_weights = [_moved(builder, weights, block_bytes, at) for at in range(num_blocks)]
    before, loop = builder.block, builder.append_basic_block("inputs")
    after = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    at.add_incoming(zero, before)
    vectors = range(num_blocks * _VECTORS)
    chains = [[builder.phi(_FLOATS) for _ in vectors] for _ in range(num_rows)]
    weight_at = builder.mul(at, ir.Constant(_I64, step.weight_bytes * BLOCK))
    input_at = builder.mul(at, ir.Constant(_I64, _FLOAT_BYTES))
    loaded = [
        step.load(
            builder,
            _offset(builder, block_weights[vector // _VECTORS], weight_at),
            vector % _VECTORS * LANES * step.weight_bytes,
        )
        for vector in vectors
    ]
    for row, chain in enumerate(chains):
        x = step.broadcast(builder, _offset(builder, row_inputs[row], input_at))
        for vector, found in zip(chain, loaded, strict=True):
            found_sum = step.add(builder, vector, x, found)
            vector.add_incoming(ir.Constant(_FLOATS, [0.0] * LANES), before)
            vector.add_incoming(found_sum, loop)
    following = builder.add(at, ir.Constant(_I64, 1))
    at.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, after)
    builder.position_at_end(after)
    for row, chain in enumerate(chains):
        target = _moved(builder, sums, sum_bytes, row)
        for place, vector in enumerate(chain):
            address = _offset(builder, target, ir.Constant(_I64, place * LANES * _FLOAT_BYTES))
            pointer = builder.bitcast(address, _FLOATS.as_pointer())
            builder.store(vector.incomings[1][0], pointer).align = _FLOAT_BYTES


def _moved(builder: Any, address: Any, distance: Any, times: int) -> Any:
    moved = builder.add(address, builder.mul(distance, ir.Constant(_I64, times)))
    return builder.inttoptr(moved, _I8.as_pointer())


def _offset(builder: Any, pointer: Any, offset: Any) -> Any:
    return builder.gep(pointer, [offset])


class _Step:
    """What is done with one vector of weights: float32 numbers."""

    weight_bytes = 4
    """Of one output channel and one step."""

    def load(self, builder: Any, pointer: Any, offset: int) -> Any:
        return _loaded(builder, pointer, offset, _FLOATS, align=4)

    def broadcast(self, builder: Any, pointer: Any) -> Any:
        x = builder.load(builder.bitcast(pointer, ir.FloatType().as_pointer()))
        return _splat(builder, x, _FLOATS)

    def add(self, builder: Any, chain: Any, x: Any, weights: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(fma, [x, weights, chain])


class _Half(_Step):
    weight_bytes = 2

    def load(self, builder: Any, pointer: Any, offset: int) -> Any:
        kind = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(_loaded(builder, pointer, offset, kind, align=2), _FLOATS)


class _Widened(_Step):
    weight_bytes = 2

    def load(self, builder: Any, pointer: Any, offset: int) -> Any:
        kind = ir.VectorType(_I16, LANES)
        wide = builder.zext(_loaded(builder, pointer, offset, kind, align=2), _INTS)
        shifted = builder.shl(wide, ir.Constant(_INTS, [16] * LANES))
        return builder.bitcast(shifted, _FLOATS)


class _Pairs(_Step):
    def load(self, builder: Any, pointer: Any, offset: int) -> Any:
        return builder.bitcast(_loaded(builder, pointer, offset, _INTS, align=4), _PAIRS)

    def broadcast(self, builder: Any, pointer: Any) -> Any:
        pair = builder.load(builder.bitcast(pointer, _I32.as_pointer()))
        return builder.bitcast(_splat(builder, pair, _INTS), _PAIRS)

    def add(self, builder: Any, chain: Any, x: Any, weights: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"
        return builder.call(get_or_insert_function(builder.module, kind, name), [chain, x, weights])


_STEPS: Mapping[Any, _Step] = {
    types.float32: _Step(),
    types.int16: _Half(),
    types.uint16: _Widened(),
    types.int32: _Pairs(),
}


def _loaded(builder: Any, pointer: Any, offset: int, kind: Any, *, align: int) -> Any:
    address = _offset(builder, pointer, ir.Constant(_I64, offset))
    found = builder.load(builder.bitcast(address, kind.as_pointer()))
    found.align = align
    return found


def _splat(builder: Any, x: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


Tile = Callable[..., None]
