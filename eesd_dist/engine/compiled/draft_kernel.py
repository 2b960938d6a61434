"""One compiled call for the drafting of one request: layers, exit head, choice and stop rule.

Every step runs one token through the layers and its row through the head, which then guesses the
next token with the verifier's noise; the rule decides whether to guess and whether to draft. Rows
are those of `run_layers` and choices those of `draft_choice`, bit for bit.

Every thread of a call runs this function, as `run_layers`; the first one chooses and decides.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32

from eesd_dist.compiled import inner, is_kept, kernel, use_in_kernels
from eesd_dist.control import chain_rule
from eesd_dist.control.chain_rule import LOOK, NO, PROBE, ChainRule, acceptance, takes, wants_guess
from eesd_dist.model import cpu, kv_layout
from eesd_dist.model.cpu.lanes import address_of, floats, load, store
from eesd_dist.model.cpu.layers import LayersCall, Scratch
from eesd_dist.model.cpu.products import Kind, LmHead, multiply, norm_row, part_of
from eesd_dist.model.cpu.threads import wait
from eesd_dist.model.cpu.tiles import BLOCK
from eesd_dist.model.kv_layout import LANES, Ints, RowArrays
from eesd_dist.model.layers.compiled_layers import layers_kernel
from eesd_dist.sampling import compiled_rule
from eesd_dist.sampling.compiled_rule import Floats, choice_words, score_row, two_largest
from eesd_dist.sampling.rule import WIDEST_GAP

_FLOAT_BYTES = 4
_WIDEST_GAP = np.float32(WIDEST_GAP)

# Places in `Drafted.counts`: how many tokens were drafted, how many guesses and looks were made,
# whether the first token was a probe; what the threads tell each other.
NUM_DRAFTED, NUM_GUESSES, NUM_LOOKS, PROBED, _GOES_ON = range(5)
NUM_COUNTS = 5
# Places in `Drafted.sums`: the value of looks, and what optimism has cost.
LOOKED, SPENT = range(2)
NUM_SUMS = 2

_PARTS = (cpu, kv_layout, compiled_rule, chain_rule)
_run_layers = layers_kernel()
use_in_kernels(chain_rule.PORTABLE)


# Shapes: K longest draft, M rows that the head has not read, D padded hidden channels, P positions
# in memory, V draft vocabulary, W pages.
class Stage(NamedTuple):
    """What is the same in all calls: weights, tables and memory."""

    layers: LayersCall
    head: LayersCall
    """With memory for M + 1 rows, `scratch.x` included."""
    hidden_bytes: int
    """Of a row between the stages, which is not padded."""
    positions_P: Ints
    zeros_P: Ints
    no_slots: Ints
    """Empty."""
    lm_head: LmHead
    embedding_VD: npt.NDArray[np.generic]
    """float32, or the bits of bfloat16 as uint16."""
    ids_V: Ints
    logits_V: Floats
    """Padded to a block."""
    scores_V: Floats
    lost_V: Floats
    keys_V: Ints
    mantissas_V: Ints
    words_3: npt.NDArray[np.uint32]


class Chain(NamedTuple):
    """One request's chain: the token to start with, known or taken, and where its rows go."""

    tables_1W: Ints
    position: int
    """Of the first token."""
    num_given: int
    """Drafted tokens that are known already; the exit head then drafts none."""
    most: int
    """Tokens to draft; -1: only compile."""
    divisor: np.float32
    """Temperature of the choice; 0: greedy."""
    mixed_seed: np.uint64
    num_lagging: int
    """Rows before the first token's that the head has not read."""
    lagging_at: int
    lagging_bytes: int
    """Where they are, and the distance between them."""


class Drafted(NamedTuple):
    """Results."""

    tokens_K1: npt.NDArray[np.int64]
    """The first token, then the drafted ones, then the guess that was not taken."""
    hidden_KD: Floats
    """[K + 1, D] rows after the layers."""
    gaps_K: Floats
    means_K: npt.NDArray[np.float64]
    """Acceptance of each guess by the rule's mean."""
    counts: npt.NDArray[np.int64]
    sums: npt.NDArray[np.float64]


@inner
def _at(scratch: Scratch, x: int) -> Scratch:
    return Scratch(
        x,
        scratch.x_bytes,
        scratch.inputs,
        scratch.inputs_bytes,
        scratch.wide,
        scratch.wide_bytes,
        scratch.added,
        scratch.added_bytes,
        scratch.angles,
        scratch.angles_bytes,
    )


@inner
def _rows(stage: Stage, chain: Chain, first: int, count: int) -> RowArrays:
    end = first + count
    zeros_R, position_R = stage.zeros_P[:count], stage.positions_P[first:end]
    in_order_R = stage.positions_P[first + 1 : end + 1]
    return RowArrays(
        chain.tables_1W, zeros_R, position_R, position_R, in_order_R, zeros_R, stage.no_slots
    )


@inner
def _begin(stage: Stage, chain: Chain, drafted: Drafted, width: int) -> None:
    """Lays out the positions, and the rows that the head has not read."""
    first = chain.position - chain.num_lagging
    for at in range(chain.num_lagging + chain.num_given + chain.most + 2):
        stage.positions_P[at] = first + at
    for row in range(chain.num_lagging):
        source = floats(chain.lagging_at + row * chain.lagging_bytes)
        target = floats(stage.head.scratch.x + row * stage.head.scratch.x_bytes)
        num_channels = stage.hidden_bytes // _FLOAT_BYTES
        for d in range(num_channels):
            target[d] = source[d]
        for d in range(num_channels, width):
            target[d] = float32(0.0)
    drafted.counts[:] = 0
    drafted.sums[:] = 0.0


@inner
def _embed(row_D: npt.NDArray[np.generic], x_at: int, width: int) -> None:
    x, bits = floats(x_at), floats(x_at).view(np.uint32)
    for d in range(len(row_D)):
        if row_D.itemsize == 2:
            bits[d] = np.uint32(np.uint32(row_D[d]) << np.uint32(16))
        else:
            x[d] = row_D[d]
    for d in range(len(row_D), width):
        x[d] = float32(0.0)


@inner
def _logits(
    kind: Kind,
    stage: Stage,
    x_at: int,
    counters: npt.NDArray[np.int64],
    part: int,
    num_parts: int,
) -> None:
    lm_head, scratch = stage.lm_head, stage.head.scratch
    if part == 0:
        norm_row(kind, x_at, lm_head.width, lm_head.floor, lm_head.norm_at, scratch.inputs)
    wait(counters, num_parts)
    first, end = part_of(len(stage.logits_V) // BLOCK, part, num_parts)
    multiply(
        kind,
        lm_head.weights,
        lm_head.block_bytes,
        lm_head.num_steps,
        scratch.inputs,
        scratch.inputs_bytes,
        address_of(stage.logits_V),
        len(stage.logits_V) * _FLOAT_BYTES,
        1,
        lm_head.bias,
        first,
        end,
    )
    wait(counters, num_parts)


@inner
def _choose(stage: Stage, chain: Chain, drafted: Drafted, num_drafted: int, at: int) -> float:
    """Stores the guess after the row at place `at`, and its gap, which it returns."""
    choice_words(chain.mixed_seed, stage.positions_P[at] + 1, stage.words_3)
    score_row(
        stage.logits_V[: len(stage.ids_V)],
        chain.divisor,
        stage.words_3,
        stage.ids_V,
        stage.scores_V,
        stage.lost_V,
        stage.keys_V,
        stage.mantissas_V,
    )
    best, second = two_largest(stage.keys_V)
    gap = min(float32(stage.scores_V[best] - stage.scores_V[second]), _WIDEST_GAP)
    drafted.tokens_K1[num_drafted + 1] = stage.ids_V[best]
    drafted.gaps_K[num_drafted] = gap
    return float(gap)


def draft_chain(
    kind: Kind,
    stage: Stage,
    chain: Chain,
    rule: ChainRule,
    drafted: Drafted,
    counters: npt.NDArray[np.int64],
    part: int,
    num_parts: int,
) -> None:
    """Drafts until the rule stops, at most `chain.most` tokens."""
    width, x_bytes = stage.layers.widths.hidden, stage.layers.scratch.x_bytes
    counts, head_x = drafted.counts, stage.head.scratch.x
    survival = drawn_survival = 1.0
    num_lagging, num_drafted = chain.num_lagging, 0
    at, last_at, wanted = num_lagging, head_x, NO
    if part == 0:
        _begin(stage, chain, drafted, width)
    is_guess = False
    # Not constants, for which Numba would compile the layers once more.
    never, always = chain.most < -1, chain.most >= -1
    while chain.most >= 0:
        x_at = address_of(drafted.hidden_KD) + num_drafted * x_bytes
        # One place that runs layers: each is compiled again.
        if is_guess:
            call, rows_at = stage.head, head_x
            rows = _rows(stage, chain, at - num_lagging, num_lagging + 1)
        else:
            num_rows = 1 + chain.num_given
            call, rows_at, rows = stage.layers, x_at, _rows(stage, chain, at, num_rows)
            if part == 0:
                for row in range(num_rows):
                    token = drafted.tokens_K1[num_drafted + row]
                    _embed(stage.embedding_VD[token], x_at + row * x_bytes, width)
            wait(counters, num_parts)
        _run_layers(
            kind,
            call.geometry,
            call.widths,
            call.norms,
            _at(call.scratch, rows_at),
            call.table,
            rows,
            call.rotation_at,
            np.int64(0),
            2 * len(call.table),
            never,
            always,
            counters,
            part,
            num_parts,
        )
        wait(counters, num_parts)
        if not is_guess:
            if chain.num_given > 0 or num_drafted == chain.most:
                break
            last_at = head_x + num_lagging * x_bytes
            if part == 0:
                wanted = wants_guess(rule, num_drafted, survival)
                counts[_GOES_ON] = wanted != NO
                for d in range(0, width, LANES):
                    store(last_at, d, load(x_at, d))
            wait(counters, num_parts)
            if counts[_GOES_ON] == 0:
                break
            is_guess = True
            continue
        _logits(kind, stage, last_at, counters, part, num_parts)
        if part == 0:
            gap = _choose(stage, chain, drafted, num_drafted, at)
            drawn, mean = acceptance(rule, num_drafted, gap)
            drawn_survival *= drawn
            survival *= mean
            drafted.means_K[num_drafted] = mean
            left = rule.optimism - drafted.sums[SPENT]
            taken, spent, value = takes(rule, num_drafted, drawn_survival, survival, left)
            if wanted == PROBE:
                taken, spent = True, 0.0
                counts[PROBED] = 1
            if wanted == LOOK:
                counts[NUM_LOOKS] += 1
                drafted.sums[LOOKED] += max(value, 0.0) - rule.guess_price
            drafted.sums[SPENT] += spent
            counts[NUM_GUESSES] += 1
            counts[NUM_DRAFTED] += taken
            counts[_GOES_ON] = taken
        wait(counters, num_parts)
        if counts[_GOES_ON] == 0:
            break
        num_lagging, is_guess = 0, False
        num_drafted += 1
        at += 1


@cache
def chain_kernel() -> Callable[..., None]:
    return kernel(draft_chain, *_PARTS)


def is_chain_kept() -> bool:
    """Returns whether the kernel need not be compiled."""
    return is_kept(draft_chain, *_PARTS)
