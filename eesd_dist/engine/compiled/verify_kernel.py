"""One compiled call for a verify pass: layers, LM head and the choice of every sampled row.

Rows are those of `run_layers` and `LogitsHead`, choices those of `rule.choose`, bit for bit.

Every thread of a call runs this function, as `run_layers`.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32

from eesd_dist.compiled import inner, is_kept, kernel
from eesd_dist.model import cpu, kv_layout
from eesd_dist.model.cpu.lanes import address_of, floats
from eesd_dist.model.cpu.layers import LayersCall, Scratch
from eesd_dist.model.cpu.products import Kind, LmHead, multiply, norm_rows, part_of
from eesd_dist.model.cpu.threads import wait
from eesd_dist.model.cpu.tiles import BLOCK, MOST_ROWS
from eesd_dist.model.kv_layout import Ints, RowArrays
from eesd_dist.model.layers.compiled_layers import layers_kernel
from eesd_dist.sampling import compiled_rule
from eesd_dist.sampling.compiled_rule import Floats, choice_words, first_largest, score_row

_FLOAT_BYTES = 4
NUM_ROWS = MOST_ROWS
"""Rows with logits in memory at a time."""

_PARTS = (cpu, kv_layout, compiled_rule)
_run_layers = layers_kernel()


# Shapes: B = NUM_ROWS, S sampled rows, P threads, V vocabulary, W the same, padded to a block.
class Memory(NamedTuple):
    """What a call needs in between."""

    logits_BW: Floats
    scores_PV: Floats
    lost_PV: Floats
    keys_PV: Ints
    mantissas_PV: Ints
    words_P3: npt.NDArray[np.uint32]


class Source(NamedTuple):
    """The rows to verify, in memory that is not changed."""

    rows_at: int
    row_bytes: int
    """Distance of two rows."""
    hidden_size: int


class Choices(NamedTuple):
    """How to choose a token after each sampled row, and the tokens."""

    rows_S: Ints
    """Index of each sampled row."""
    divisors_S: Floats
    """Temperatures; 0: greedy."""
    mixed_seeds_S: npt.NDArray[np.uint64]
    positions_S: Ints
    """Of the tokens to be chosen."""
    tokens_S: Ints


@inner
def _copy(source: Source, scratch: Scratch, width: int, first: int, end: int) -> None:
    for row in range(first, end):
        x = floats(source.rows_at + row * source.row_bytes)
        y = floats(scratch.x + row * scratch.x_bytes)
        for d in range(source.hidden_size):
            y[d] = x[d]
        for d in range(source.hidden_size, width):
            y[d] = float32(0.0)


@inner
def _choose(
    memory: Memory, choices: Choices, ids_V: Ints, first: int, at: int, end: int, part: int
) -> None:
    """Chooses the tokens of sampled rows [at, end); `first`: the row of the first logits."""
    for row in range(at, end):
        choice_words(choices.mixed_seeds_S[row], choices.positions_S[row], memory.words_P3[part])
        score_row(
            memory.logits_BW[row - first][: len(ids_V)],
            choices.divisors_S[row],
            memory.words_P3[part],
            ids_V,
            memory.scores_PV[part],
            memory.lost_PV[part],
            memory.keys_PV[part],
            memory.mantissas_PV[part],
        )
        choices.tokens_S[row] = first_largest(memory.keys_PV[part])


def verify_rows(
    kind: Kind,
    layers: LayersCall,
    lm_head: LmHead,
    ids_V: Ints,
    memory: Memory,
    rows: RowArrays,
    source: Source,
    choices: Choices,
    counters: npt.NDArray[np.int64],
    part: int,
    num_parts: int,
) -> None:
    """Runs the rows and fills `choices.tokens_S`."""
    num_rows, num_sampled = len(rows.position_R), len(choices.rows_S)
    if num_rows == 0:
        return
    # Not constants, for which Numba would compile the layers once more.
    never, always = num_rows < 0, num_rows >= 0
    scratch = layers.scratch
    first_row, end_row = part_of(num_rows, part, num_parts)
    _copy(source, scratch, layers.widths.hidden, first_row, end_row)
    wait(counters, num_parts)
    _run_layers(
        kind,
        layers.geometry,
        layers.widths,
        layers.norms,
        scratch,
        layers.table,
        rows,
        layers.rotation_at,
        np.int64(0),
        2 * len(layers.table),
        never,
        always,
        counters,
        part,
        num_parts,
    )
    wait(counters, num_parts)
    first_block, end_block = part_of(memory.logits_BW.shape[1] // BLOCK, part, num_parts)
    for first in range(0, num_sampled, NUM_ROWS):
        end = min(first + NUM_ROWS, num_sampled)
        mine, mine_end = part_of(end - first, part, num_parts)
        norm_rows(
            kind,
            lm_head,
            scratch.x,
            scratch.x_bytes,
            scratch.inputs,
            scratch.inputs_bytes,
            choices.rows_S[first:end],
            mine,
            mine_end,
        )
        wait(counters, num_parts)
        multiply(
            kind,
            lm_head.weights,
            lm_head.block_bytes,
            lm_head.num_steps,
            scratch.inputs,
            scratch.inputs_bytes,
            address_of(memory.logits_BW),
            memory.logits_BW.shape[1] * _FLOAT_BYTES,
            end - first,
            lm_head.bias,
            first_block,
            end_block,
        )
        wait(counters, num_parts)
        _choose(memory, choices, ids_V, first, first + mine, first + mine_end, part)
        wait(counters, num_parts)


@cache
def verify_kernel() -> Callable[..., None]:
    return kernel(verify_rows, *_PARTS)


def is_verify_kept() -> bool:
    """Returns whether the kernel need not be compiled."""
    return is_kept(verify_rows, *_PARTS)
