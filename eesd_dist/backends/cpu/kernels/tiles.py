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
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from eesd_dist.model.kv_layout import LANES

BLOCK = 2 * LANES
"""Output channels in one block of weights."""

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_I32, LANES)
_VECTORS = BLOCK // LANES
_FLOAT_BYTES = 4
_LINE_BYTES = 64


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


MOST_ROWS = 8 if host_features().get("avx512f") else 3
"""Rows of one tile. With short vectors as many sums as the registers hold with what is added to
them; with AVX-512 as many rows as have their addresses in registers, too (ten take twice as long a
row). Fewer rows with more blocks would hide more of an instruction's latency, but reading several
blocks at once is slower than that."""


@intrinsic
def tile(  # type: ignore[no-untyped-def]
    typing,
    kind,
    weights,
    inputs,
    input_bytes,
    num_steps,
    sums,
    sum_bytes,
    begins,
    prefetch_at,
    prefetch_bytes,
    rows,
):
    """sums += inputs @ weights for `rows` rows (1 to MOST_ROWS) and one block; `begins` is 1 to
    overwrite the sums, else 0.

    All but `kind` are whole numbers: addresses, the distance between rows in bytes, and the number
    of inputs (of pairs) of a row. Every step begins to read as much memory as it has weights,
    `prefetch_bytes` after that of the step before.
    """
    step = _STEPS[kind.dtype]

    def emit(builder: Any, num_rows: int, args: Sequence[Any]) -> None:
        weights, inputs, input_bytes, num_steps, sums, sum_bytes, *others = args
        begins, prefetch_at, prefetch_bytes = others
        first = _pointer(builder, weights)
        vectors = [
            _offset(builder, first, ir.Constant(_I64, LANES * step.weight_bytes * vector))
            for vector in range(_VECTORS)
        ]
        weight_step = ir.Constant(_I64, BLOCK * step.weight_bytes)
        rows = _rows(builder, inputs, input_bytes, num_rows)
        num_lines = BLOCK * step.weight_bytes // _LINE_BYTES
        lines = _Prefetch(_pointer(builder, prefetch_at), prefetch_bytes, num_lines)
        vector_bytes = LANES * _FLOAT_BYTES
        targets = [
            [_offset(builder, row, ir.Constant(_I64, vector_bytes * at)) for at in range(_VECTORS)]
            for row in _rows(builder, sums, sum_bytes, num_rows)
        ]
        _emit_sums(builder, step, rows, vectors, weight_step, num_steps, targets, begins, lines)

    return types.none(kind, *(types.int64,) * 10), _for_row_counts(emit, skipped=1)


@intrinsic
def add_tile(  # type: ignore[no-untyped-def]
    typing, stored, a, a_bytes, b0, b1, b_bytes, length, c0, c1, c_bytes, begins, prefetch_at, rows
):
    """c += a @ b for `rows` rows of a (1 to MOST_ROWS) and two vectors of columns.

    b0, b1, c0 and c1 are the addresses of the vectors in the first rows of b and c; the vectors may
    overlap. The type of `stored` is that of b: float32, or uint16 for bfloat16. `begins` is 1 to
    overwrite c, else 0. Every step begins to read as many bytes as it has of b, from `prefetch_at`
    on: the next tile's columns come from far, in pieces too short for the processor to guess.
    """
    step = _STORED_STEPS[stored]

    def emit(builder: Any, num_rows: int, args: Sequence[Any]) -> None:
        a, a_bytes, b0, b1, b_bytes, length, c0, c1, c_bytes, begins, prefetch_at = args
        targets = [
            list(pair)
            for pair in zip(
                _rows(builder, c0, c_bytes, num_rows),
                _rows(builder, c1, c_bytes, num_rows),
                strict=True,
            )
        ]
        step_bytes = 2 * LANES * step.weight_bytes
        prefetch = _Prefetch(
            _pointer(builder, prefetch_at),
            ir.Constant(_I64, step_bytes),
            num_lines=step_bytes // _LINE_BYTES,
        )
        vectors = [_pointer(builder, b0), _pointer(builder, b1)]
        rows = _rows(builder, a, a_bytes, num_rows)
        _emit_sums(builder, step, rows, vectors, b_bytes, length, targets, begins, prefetch)

    return types.none(stored, *(types.int64,) * 12), _for_row_counts(emit, skipped=1)


def _for_row_counts(
    emit: Callable[[Any, int, Sequence[Any]], None], *, skipped: int
) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns Numba's generator of a call with the number of rows as the last argument: the code
    of every number, and a jump to it. `skipped`: leading arguments without a value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *numbers, num_rows = args[skipped:]
        done = builder.append_basic_block("done")
        chosen = builder.switch(num_rows, done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            chosen.add_case(ir.Constant(_I64, count), case)
            builder.position_at_end(case)
            emit(builder, count, numbers)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return generate


@dataclass(frozen=True)
class _Prefetch:
    """Memory that a loop begins to read for what comes after it."""

    pointer: Any
    step_bytes: Any
    """Distance of the lines of two steps."""
    num_lines: int
    """Lines of one step."""


def _emit_sums(
    builder: Any,
    step: "_Step",
    rows: Sequence[Any],
    vectors: Sequence[Any],
    weight_bytes: Any,
    num_steps: Any,
    targets: Sequence[Sequence[Any]],
    begins: Any,
    prefetch: _Prefetch,
) -> None:
    """Emits the loop over the inputs, and the stores of its sums at `targets`, pointers by row and
    vector. The sums begin with what is there, or with 0. `rows`, `vectors`: pointers to the first
    inputs and weights; there is at least one step."""
    nothing, is_new = ir.Constant(_FLOATS, [0.0] * LANES), builder.trunc(begins, ir.IntType(1))
    starts = [
        [
            builder.select(is_new, nothing, _loaded(builder, to, _FLOATS, align=4))
            for to in targets_V
        ]
        for targets_V in targets
    ]
    zero, unit = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
    before, loop = builder.block, builder.append_basic_block("inputs")
    after = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    at.add_incoming(zero, before)
    chains = [[builder.phi(_FLOATS) for _ in vectors] for _ in rows]
    weight_at = builder.mul(at, weight_bytes)
    input_at = builder.mul(at, ir.Constant(_I64, _FLOAT_BYTES))
    loaded = step.load(builder, [_offset(builder, vector, weight_at) for vector in vectors])
    totals = []
    for row, chain in enumerate(chains):
        x = step.broadcast(builder, _offset(builder, rows[row], input_at))
        totals.append(
            [step.add(builder, link, x, w) for link, w in zip(chain, loaded, strict=True)]
        )
        for vector, link in enumerate(chain):
            link.add_incoming(starts[row][vector], before)
            link.add_incoming(totals[-1][vector], loop)
    prefetch_at = builder.mul(at, prefetch.step_bytes)
    for line in range(prefetch.num_lines):
        offset = builder.add(prefetch_at, ir.Constant(_I64, line * _LINE_BYTES))
        _emit_prefetch(builder, _offset(builder, prefetch.pointer, offset))
    following = builder.add(at, unit)
    at.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, after)
    builder.position_at_end(after)
    for targets_V, chain in zip(targets, totals, strict=True):
        for target, total in zip(targets_V, chain, strict=True):
            _store(builder, total, target)


def _emit_prefetch(builder: Any, pointer: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(_I32, hint) for hint in (0, 2, 1))])


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I8.as_pointer())


def _rows(builder: Any, address: Any, distance: Any, num_rows: int) -> Sequence[Any]:
    first = _pointer(builder, address)
    return [
        _offset(builder, first, builder.mul(distance, ir.Constant(_I64, row)))
        for row in range(num_rows)
    ]


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, _FLOATS.as_pointer())).align = _FLOAT_BYTES


def _offset(builder: Any, pointer: Any, offset: Any) -> Any:
    return builder.gep(pointer, [offset])


class _Step:
    """Operations on the vectors of weights of one step: float32 numbers."""

    weight_bytes = 4
    """Bytes of the weights of one output channel and one step."""

    def load(self, builder: Any, pointers: Sequence[Any]) -> Sequence[Any]:
        return [_loaded(builder, pointer, _FLOATS, align=4) for pointer in pointers]

    def broadcast(self, builder: Any, pointer: Any) -> Any:
        x = builder.load(builder.bitcast(pointer, ir.FloatType().as_pointer()))
        return _splat(builder, x, _FLOATS)

    def add(self, builder: Any, chain: Any, x: Any, weights: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(fma, [x, weights, chain])


class _Half(_Step):
    weight_bytes = 2

    def load(self, builder: Any, pointers: Sequence[Any]) -> Sequence[Any]:
        kind = ir.VectorType(ir.HalfType(), LANES)
        halves = [_loaded(builder, pointer, kind, align=2) for pointer in pointers]
        return [builder.fpext(half, _FLOATS) for half in halves]


class _Widened(_Step):
    """Words of two bfloat16 numbers: the low half belongs to the first vector, the high half to the
    second one. So a word is widened by a shift and a mask, which cost less than the unpacking of
    numbers side by side."""

    weight_bytes = 2

    def load(self, builder: Any, pointers: Sequence[Any]) -> Sequence[Any]:
        words = _loaded(builder, pointers[0], _INTS, align=4)
        low = builder.shl(words, ir.Constant(_INTS, [16] * LANES))
        high = builder.and_(words, ir.Constant(_INTS, [0xFFFF0000] * LANES))
        return [builder.bitcast(half, _FLOATS) for half in (low, high)]


class _Stored(_Step):
    """bfloat16 numbers side by side."""

    weight_bytes = 2

    def load(self, builder: Any, pointers: Sequence[Any]) -> Sequence[Any]:
        kind, shift = ir.VectorType(ir.IntType(16), LANES), ir.Constant(_INTS, [16] * LANES)
        halves = [_loaded(builder, pointer, kind, align=2) for pointer in pointers]
        words = [builder.shl(builder.zext(half, _INTS), shift) for half in halves]
        return [builder.bitcast(word, _FLOATS) for word in words]


class _Pairs(_Step):
    def load(self, builder: Any, pointers: Sequence[Any]) -> Sequence[Any]:
        words = [_loaded(builder, pointer, _INTS, align=4) for pointer in pointers]
        return [builder.bitcast(word, _PAIRS) for word in words]

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
_STORED_STEPS: Mapping[Any, _Step] = {types.float32: _Step(), types.uint16: _Stored()}


def _loaded(builder: Any, pointer: Any, kind: Any, *, align: int) -> Any:
    vector = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    vector.align = align
    return vector


def _splat(builder: Any, x: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def in_blocks(count: int) -> int:
    """Returns `count` channels rounded up to whole blocks."""
    return -(-count // BLOCK) * BLOCK
