"""The part of compiled calls that chooses tokens after rows: norm, LM head, noise and choice.

Choices are those of `rule.choose` and `rule.draft_choice`, bit for bit. Ranks that have a part of
the vocabulary each choose among their own tokens, then among their best ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32

from eesd_dist.backends.cpu.compiled import inner
from eesd_dist.backends.cpu.kernels.choice import (
    Floats,
    choice_words,
    first_largest,
    score_row,
    two_largest,
)
from eesd_dist.backends.cpu.kernels.filters import (
    LOWEST_KEY,
    NUM_BINS,
    Longs,
    filter_row,
    has_filter,
    scaled,
)
from eesd_dist.backends.cpu.kernels.lanes import address_of
from eesd_dist.backends.cpu.kernels.layers import Scratch
from eesd_dist.backends.cpu.kernels.products import Kind, LmHead, multiply, norm_rows, thread_range
from eesd_dist.backends.cpu.kernels.rank_sums import best_over_ranks
from eesd_dist.backends.cpu.kernels.threads import wait
from eesd_dist.backends.cpu.kernels.tiles import BLOCK, MOST_ROWS, in_blocks
from eesd_dist.model.kv_layout import Ints
from eesd_dist.sampling.row_filters import RowFilters
from eesd_dist.sampling.rule import WIDEST_GAP
from eesd_dist.transport.sum_layout import SumsCall

_FLOAT_BYTES = 4
_WIDEST_GAP = np.float32(WIDEST_GAP)
_NEVER = np.float32(-np.inf)
Masks = npt.NDArray[np.uint32]
NO_MASKS: Masks = np.zeros((0, 0), np.uint32)
NUM_ROWS = MOST_ROWS
"""Rows with logits in memory at a time."""


# Shapes: B = NUM_ROWS, S sampled rows, O open ones, P threads, V vocabulary, W the same, padded to
# a block, N bins, M masks, U words of 32 tokens of the target's vocabulary.
class Memory(NamedTuple):
    """Memory that a call needs in between."""

    logits_BW: Floats
    scores_PV: Floats
    lost_PV: Floats
    keys_PV: Ints
    mantissas_PV: Ints
    words_P3: npt.NDArray[np.uint32]
    scaled_PV: Floats
    masses_PN: Longs
    counts_PN: Longs
    numbers_B: Ints
    """0, 1, 2, ..."""


class Choices(NamedTuple):
    """Parameters for choosing a token after each sampled row, and the tokens."""

    rows_S: Ints
    """Index of each sampled row among those of the call, in ascending order."""
    divisors_S: Floats
    """Temperatures; 0: greedy."""
    mixed_seeds_S: npt.NDArray[np.uint64]
    positions_S: Ints
    """Positions of the tokens to be chosen."""
    masks_S: Ints
    """Which mask holds for each row; -1: none."""
    filters: RowFilters
    open_S: Ints
    """Places in `logits_OV` of the rows that get their logits instead of a token; -1: a token."""
    logits_OV: Floats
    tokens_S: Ints
    """-1: the mask leaves no token; without meaning after open rows."""
    gaps_S: Floats
    """Best score minus the second one; empty: not wanted."""
    scores_2S: Floats
    """Scores of the best two tokens; of the second only where gaps are wanted."""


class MemoryByThreads:
    """Memory for any number of threads, each made once."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._memories: dict[int, Memory] = {}

    def of(self, num_threads: int) -> Memory:
        memory = self._memories.get(num_threads)
        if memory is None:
            memory = self._memories[num_threads] = _new_memory(self._num_tokens, num_threads)
        return memory


def _new_memory(num_tokens: int, num_threads: int) -> Memory:
    wide = (num_threads, num_tokens)
    return Memory(
        logits_BW=np.zeros((NUM_ROWS, in_blocks(num_tokens)), np.float32),
        scores_PV=np.zeros(wide, np.float32),
        lost_PV=np.zeros(wide, np.float32),
        keys_PV=np.zeros(wide, np.int32),
        mantissas_PV=np.zeros(wide, np.int32),
        words_P3=np.zeros((num_threads, 3), np.uint32),
        scaled_PV=np.zeros(wide, np.float32),
        masses_PN=np.zeros((num_threads, NUM_BINS), np.int64),
        counts_PN=np.zeros((num_threads, NUM_BINS), np.int64),
        numbers_B=np.arange(NUM_ROWS, dtype=np.int32),
    )


def new_choices(count: int, *, with_gaps: bool, open_shape: tuple[int, int] = (0, 0)) -> Choices:
    """Returns greedy choices after so many rows, to be filled. `open_shape`: of `logits_OV`."""
    return Choices(
        rows_S=np.zeros(count, np.int32),
        divisors_S=np.zeros(count, np.float32),
        mixed_seeds_S=np.zeros(count, np.uint64),
        positions_S=np.zeros(count, np.int32),
        masks_S=np.full(count, -1, np.int32),
        filters=RowFilters.none(count),
        open_S=np.full(count, -1, np.int32),
        logits_OV=np.empty(open_shape, np.float32),
        tokens_S=np.zeros(count, np.int32),
        gaps_S=np.zeros(count if with_gaps else 0, np.float32),
        scores_2S=np.full((2, count), _NEVER),
    )


def masks_of(masks: Sequence[bytes], *, count: int) -> Masks:
    """Returns `count` masks of equal size, one after the other in `masks`, as words [M, U]."""
    if not count:
        return NO_MASKS
    # Bytes would make an array that cannot be written: for Numba another type, compiled for again.
    return np.frombuffer(bytearray().join(masks), np.uint32).reshape(count, -1)


@inner
def _is_masked(mask_U: Masks, token: int) -> bool:
    return (mask_U[token >> 5] >> np.uint32(token & 31)) & np.uint32(1) == np.uint32(0)


@inner
def _mask(mask_U: Masks, ids_V: Ints, scores_V: Floats, keys_V: Ints) -> None:
    """Gives the tokens without a bit the lowest score."""
    for v in range(len(ids_V)):
        if _is_masked(mask_U, ids_V[v]):
            scores_V[v] = _NEVER
            keys_V[v] = LOWEST_KEY


@inner
def _filter(
    memory: Memory,
    choices: Choices,
    masks_MU: Masks,
    ids_V: Ints,
    logits_V: Floats,
    row: int,
    thread: int,
) -> None:
    """Gives the tokens that a row's filters exclude the lowest score, after `score_row`."""
    divisor, mask, scaled_V = (
        choices.divisors_S[row],
        choices.masks_S[row],
        memory.scaled_PV[thread],
    )
    for v in range(len(ids_V)):
        scaled_V[v] = scaled(logits_V[v], divisor)
    if mask >= 0:
        for v in range(len(ids_V)):
            if _is_masked(masks_MU[mask], ids_V[v]):
                scaled_V[v] = _NEVER
    filter_row(
        scaled_V,
        choices.filters,
        row,
        memory.masses_PN[thread],
        memory.counts_PN[thread],
        memory.lost_PV[thread],
        memory.mantissas_PV[thread],
        memory.scores_PV[thread],
        memory.keys_PV[thread],
    )


@inner
def _choose(
    memory: Memory,
    choices: Choices,
    masks_MU: Masks,
    ids_V: Ints,
    first: int,
    at: int,
    end: int,
    thread: int,
) -> None:
    """Chooses the tokens of sampled rows [at, end), or copies their logits; `first`: the row of the
    first logits."""
    scores_V, keys_V = memory.scores_PV[thread], memory.keys_PV[thread]
    for row in range(at, end):
        if choices.open_S[row] >= 0:
            choices.logits_OV[choices.open_S[row], :] = memory.logits_BW[row - first][: len(ids_V)]
            continue
        choice_words(choices.mixed_seeds_S[row], choices.positions_S[row], memory.words_P3[thread])
        score_row(
            memory.logits_BW[row - first][: len(ids_V)],
            choices.divisors_S[row],
            memory.words_P3[thread],
            ids_V,
            scores_V,
            memory.lost_PV[thread],
            keys_V,
            memory.mantissas_PV[thread],
        )
        if has_filter(choices.filters, row):
            logits_V = memory.logits_BW[row - first][: len(ids_V)]
            _filter(memory, choices, masks_MU, ids_V, logits_V, row, thread)
        if choices.masks_S[row] >= 0:
            _mask(masks_MU[choices.masks_S[row]], ids_V, scores_V, keys_V)
        if len(choices.gaps_S) > 0:
            best, second = two_largest(keys_V)
            choices.scores_2S[1, row] = scores_V[second]
        else:
            best = first_largest(keys_V)
        choices.scores_2S[0, row] = scores_V[best]
        choices.tokens_S[row] = ids_V[best]


@inner
def _judge(choices: Choices, first: int, end: int) -> None:
    """Fills the gaps of rows [first, end), and the token of a row of which a mask leaves none."""
    for row in range(first, end):
        best, second = choices.scores_2S[0, row], choices.scores_2S[1, row]
        if len(choices.gaps_S) > 0:
            choices.gaps_S[row] = min(float32(best - second), _WIDEST_GAP)
        if choices.masks_S[row] >= 0 and not best > _NEVER:
            choices.tokens_S[row] = -1


@inner
def choose_tokens(
    kind: Kind,
    lm_head: LmHead,
    ids_V: Ints,
    memory: Memory,
    scratch: Scratch,
    sums: SumsCall,
    choices: Choices,
    masks_MU: Masks,
    num_sampled: int,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> None:
    """Fills the tokens and gaps of the first `num_sampled` choices, after the first
    rows at `scratch.x`. Every thread calls it; all have finished when it returns."""
    first_block, end_block = thread_range(memory.logits_BW.shape[1] // BLOCK, thread, num_threads)
    for first in range(0, num_sampled, NUM_ROWS):
        end = min(first + NUM_ROWS, num_sampled)
        own_first, own_end = thread_range(end - first, thread, num_threads)
        norm_rows(
            kind,
            lm_head,
            scratch.x + first * scratch.x_bytes,
            scratch.x_bytes,
            scratch.inputs,
            scratch.inputs_bytes,
            memory.numbers_B,
            own_first,
            own_end,
        )
        wait(counters, num_threads)
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
        wait(counters, num_threads)
        _choose(memory, choices, masks_MU, ids_V, first, first + own_first, first + own_end, thread)
        if sums.size == 1:
            _judge(choices, first + own_first, first + own_end)
        wait(counters, num_threads)
    if sums.size > 1:
        if thread == 0:
            best_over_ranks(sums, choices.tokens_S, choices.scores_2S, num_sampled)
            _judge(choices, 0, num_sampled)
        wait(counters, num_threads)
