"""One compiled call for rows of any requests: layers, an exit head, and the choice of tokens.

Rows are those of `run_layers` and `LogitsHead`, choices those of `rule.choose` and
`rule.draft_choice`, bit for bit. A verify pass has no exit head.

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
from eesd_dist.model.cpu.layers import LayersCall
from eesd_dist.model.cpu.products import Kind, LmHead, multiply, norm_rows, part_of
from eesd_dist.model.cpu.threads import wait
from eesd_dist.model.cpu.tiles import BLOCK, MOST_ROWS
from eesd_dist.model.kv_layout import Ints, RowArrays
from eesd_dist.model.layers.compiled_layers import layers_kernel
from eesd_dist.sampling import compiled_rule
from eesd_dist.sampling.compiled_rule import (
    Floats,
    choice_words,
    first_largest,
    score_row,
    two_largest,
)
from eesd_dist.sampling.rule import WIDEST_GAP

_FLOAT_BYTES = 4
_WIDEST_GAP = np.float32(WIDEST_GAP)
NUM_ROWS = MOST_ROWS
"""Rows with logits in memory at a time."""

_PARTS = (cpu, kv_layout, compiled_rule)
_run_layers = layers_kernel()


# Shapes: R rows, B = NUM_ROWS, S sampled rows, P threads, V vocabulary, W the same, padded to a
# block.
class Memory(NamedTuple):
    """What a call needs in between."""

    logits_BW: Floats
    scores_PV: Floats
    lost_PV: Floats
    keys_PV: Ints
    mantissas_PV: Ints
    words_P3: npt.NDArray[np.uint32]


class Source(NamedTuple):
    """Rows to run, in memory that is not changed."""

    at_R: npt.NDArray[np.int64]
    """Address of each."""
    num_channels: int
    is_bfloat16: bool
    """Else float32."""


class Step(NamedTuple):
    """Layers and the rows to run through them; there may be none."""

    layers: LayersCall
    """The rows are written to its `scratch.x`."""
    rows: RowArrays
    source: Source


class Choices(NamedTuple):
    """How to choose a token after each sampled row of the last step with rows, and the tokens."""

    rows_S: Ints
    """Index of each sampled row."""
    divisors_S: Floats
    """Temperatures; 0: greedy."""
    mixed_seeds_S: npt.NDArray[np.uint64]
    positions_S: Ints
    """Of the tokens to be chosen."""
    tokens_S: Ints
    gaps_S: Floats
    """How far the best score is above the second; empty: not wanted."""


@inner
def _copy(source: Source, x_at: int, x_bytes: int, width: int, first: int, end: int) -> None:
    for row in range(first, end):
        x, y = floats(source.at_R[row]), floats(x_at + row * x_bytes)
        if source.is_bfloat16:
            halves, bits = x.view(np.uint16), y.view(np.uint32)
            for d in range(source.num_channels):
                bits[d] = np.uint32(np.uint32(halves[d]) << np.uint32(16))
        else:
            for d in range(source.num_channels):
                y[d] = x[d]
        for d in range(source.num_channels, width):
            y[d] = float32(0.0)


@inner
def _choose(
    memory: Memory, choices: Choices, ids_V: Ints, first: int, at: int, end: int, part: int
) -> None:
    """Chooses the tokens of sampled rows [at, end); `first`: the row of the first logits."""
    scores_V, keys_V = memory.scores_PV[part], memory.keys_PV[part]
    for row in range(at, end):
        choice_words(choices.mixed_seeds_S[row], choices.positions_S[row], memory.words_P3[part])
        score_row(
            memory.logits_BW[row - first][: len(ids_V)],
            choices.divisors_S[row],
            memory.words_P3[part],
            ids_V,
            scores_V,
            memory.lost_PV[part],
            keys_V,
            memory.mantissas_PV[part],
        )
        if len(choices.gaps_S) > 0:
            best, second = two_largest(keys_V)
            gap = float32(scores_V[best] - scores_V[second])
            choices.gaps_S[row] = min(gap, _WIDEST_GAP)
        else:
            best = first_largest(keys_V)
        choices.tokens_S[row] = ids_V[best]


def run_pass(
    kind: Kind,
    steps: tuple[Step, Step],
    lm_head: LmHead,
    ids_V: Ints,
    memory: Memory,
    choices: Choices,
    counters: npt.NDArray[np.int64],
    part: int,
    num_parts: int,
) -> None:
    """Runs the rows of both steps, the second of which may read those of the first, and fills
    `choices.tokens_S` and `choices.gaps_S`."""
    num_sampled = len(choices.rows_S)
    # Not constants, for which Numba would compile the layers once more.
    never, always = num_sampled < 0, num_sampled >= 0
    scratch = steps[0].layers.scratch
    for number in range(2):
        # One place that runs layers: each is compiled again.
        layers, rows, source = steps[number]
        num_rows = len(rows.position_R)
        if num_rows == 0:
            continue
        scratch = layers.scratch
        first_row, end_row = part_of(num_rows, part, num_parts)
        _copy(source, scratch.x, scratch.x_bytes, layers.widths.hidden, first_row, end_row)
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
def pass_kernel() -> Callable[..., None]:
    return kernel(run_pass, *_PARTS)


def is_pass_kept() -> bool:
    """Returns whether the kernel need not be compiled."""
    return is_kept(run_pass, *_PARTS)
