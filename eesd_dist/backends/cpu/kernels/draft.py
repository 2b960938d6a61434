"""Compiled call for the drafting of a round: layers, exit head, choices and stop rules.

The known rows of all requests run through the layers. Then, level by level, the exit head reads
what it has not read of every request that wants a guess by its rule, guesses a token with the
verifier's noise, and the tokens that the rules take run through the layers. Rows are those of
`run_layers` and choices those of `draft_choice`, bit for bit.

Every thread of a call runs this function, as `run_layers`; the first one decides.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eesd_dist.backends.cpu.compiled import inner, is_kept, kernel, use_in_kernels
from eesd_dist.backends.cpu.kernels.choice import Floats
from eesd_dist.backends.cpu.kernels.choosing import Choices, Masks, Memory, choose_tokens
from eesd_dist.backends.cpu.kernels.lanes import address_of
from eesd_dist.backends.cpu.kernels.layers import LayersCall, layers_kernel
from eesd_dist.backends.cpu.kernels.products import Kind, LmHead, copy_row, thread_range
from eesd_dist.backends.cpu.kernels.sources import Source, copy_rows
from eesd_dist.backends.cpu.kernels.threads import wait
from eesd_dist.control import chain_rule
from eesd_dist.control.chain_rule import (
    LOOK,
    NO,
    PROBE,
    ChainRule,
    Doubles,
    acceptance,
    rule_of,
    takes,
    wants_guess,
)
from eesd_dist.model import kv_layout
from eesd_dist.model.kv_layout import Ints, RowArrays
from eesd_dist.sampling import row_filters
from eesd_dist.sampling.row_filters import RowFilters
from eesd_dist.transport import sum_layout

Longs = npt.NDArray[np.int64]

# Columns of `Drafted.counts_BN`: how many tokens were drafted, how many guesses and looks were
# made, whether the first token was a probe; the answer of `wants_guess` to the last guess.
NUM_DRAFTED, _NUM_GUESSES, _NUM_LOOKS, _PROBED, _ANSWER = range(5)
NUM_COUNTS = 5
# Columns of `Drafted.sums_BN`: the value of looks, what optimism has cost; the survival of the
# draft, by the mean and by the draw.
_LOOKED, _SPENT, _EXPECTED, _DRAWN = range(4)
NUM_SUMS = 4
_FIRST, _PLACE, _MOST, _LAGGING = range(4)
_SOURCE, _TARGET = range(2)
_TABLE, _POSITION, _IN_ORDER, _ZEROS = range(4)
# Places in `Work.counts`.
_NUM_ROWS, _NUM_ALIVE = range(2)
NUM_WORK_COUNTS = 2

_PARTS = (kv_layout, sum_layout, chain_rule, row_filters)
_run_layers = layers_kernel()
use_in_kernels(chain_rule.PORTABLE)


# Shapes: B requests, T known rows of all, K longest draft, M rows of one step, N = T + B * K,
# L rows that the head has not read, V draft vocabulary, C curves, Q their points, U price tables.
class Stage(NamedTuple):
    """Data that does not depend on the requests: weights, and memory for so many rows."""

    layers: LayersCall
    head: LayersCall
    lm_head: LmHead
    ids_V: Ints
    memory: Memory
    embedding_at: int
    embedding_bytes: int
    """Bytes of a row of the embedding."""
    num_channels: int
    is_bfloat16: bool
    """The embedding; else float32."""


class Batch(NamedTuple):
    """The requests of a round, each with one known row or more."""

    rows: RowArrays
    """The known rows, request by request."""
    source_T: Longs
    """Address of each row's embedding."""
    ints_4B: Ints
    """Integers by request: its first known row; where its rows begin in the results, with room for
    its draft after each; tokens to draft at most, 0 for no guess either; where its part of
    `lagging_L` begins. One request more, the end."""
    divisors_B: Floats
    """Temperature of the choice; 0: greedy."""
    mixed_seeds_B: npt.NDArray[np.uint64]
    filters: RowFilters
    lagging_L: Longs
    """Addresses of the rows before the known ones that the head has not read."""
    masks_B: Ints
    """Which mask holds for the first guess; -1: none. Later guesses have none."""
    masks_MU: Masks


class Rules(NamedTuple):
    """The requests' `ChainRule`s."""

    numbers_BN: Doubles
    """Numbers of each rule, as `chain_rule.rule_of` takes them."""
    prices_UK: Doubles
    curves_CQ2: Doubles
    ints_B4: Ints
    """Integers by request: which prices are its own and how many, which curve and how many
    points."""


class Drafted(NamedTuple):
    """Results."""

    rows_ND: Floats
    """The rows after the layers, request by request: known ones, drafted ones; after the last, rows
    without meaning."""
    tokens_BK: Longs
    """Tokens of every guess, taken or not."""
    gaps_BK: Floats
    means_BK: Doubles
    """Acceptance of each guess by the rule's mean."""
    counts_BN: Longs
    sums_BN: Doubles


class Work(NamedTuple):
    """Memory for a step's rows."""

    longs_2M: Longs
    """Addresses where a row comes from, and where it goes after the layers."""
    ints_4M: Ints
    """A row's table, position and keys in order, and zeros."""
    alive_B: Ints
    """Requests with a guess in this level."""
    choices: Choices
    counts: Longs


@inner
def _rule(rules: Rules, b: int) -> ChainRule:
    prices, num_prices, curve, num_points = rules.ints_B4[b]
    return rule_of(
        rules.numbers_BN[b],
        rules.prices_UK[prices, :num_prices],
        rules.curves_CQ2[curve, :num_points],
    )


@inner
def _end(batch: Batch, b: int) -> int:
    """Returns the end of a request's known rows."""
    end: int = batch.ints_4B[_FIRST, b + 1]
    return end


@inner
def _row_address(batch: Batch, drafted: Drafted, b: int) -> int:
    """Returns the address of a request's first row in the results, while they have gaps."""
    address: int = (
        address_of(drafted.rows_ND) + batch.ints_4B[_PLACE, b] * drafted.rows_ND.strides[0]
    )
    return address


@inner
def _begin(batch: Batch, drafted: Drafted, work: Work) -> None:
    """Lays out where the known rows go: with room for each request's draft after them."""
    row_bytes = drafted.rows_ND.strides[0]
    num_alive = 0
    for b in range(len(batch.divisors_B)):
        first, address = batch.ints_4B[_FIRST, b], _row_address(batch, drafted, b)
        for row in range(first, _end(batch, b)):
            work.longs_2M[_TARGET, row] = address + (row - first) * row_bytes
        drafted.counts_BN[b, :] = 0
        drafted.sums_BN[b, _LOOKED] = drafted.sums_BN[b, _SPENT] = 0.0
        drafted.sums_BN[b, _EXPECTED] = drafted.sums_BN[b, _DRAWN] = 1.0
        if batch.ints_4B[_MOST, b] > 0:
            work.alive_B[num_alive] = b
            num_alive += 1
    work.counts[_NUM_ALIVE] = num_alive


@inner
def _add_row(work: Work, row: int, source: int, table: int, position: int) -> None:
    work.longs_2M[_SOURCE, row] = source
    work.ints_4M[_TABLE, row] = table
    work.ints_4M[_POSITION, row] = position
    work.ints_4M[_IN_ORDER, row] = position + 1


@inner
def _ask(batch: Batch, rules: Rules, drafted: Drafted, work: Work) -> None:
    """Lays out the rows for the head to read, of the requests that want a guess by their rules."""
    row_bytes = drafted.rows_ND.strides[0]
    num_rows = num_alive = 0
    for at in range(work.counts[_NUM_ALIVE]):
        b = work.alive_B[at]
        num_drafted = drafted.counts_BN[b, NUM_DRAFTED]
        if num_drafted == batch.ints_4B[_MOST, b]:
            continue
        answer = wants_guess(_rule(rules, b), num_drafted, drafted.sums_BN[b, _EXPECTED])
        if answer == NO:
            continue
        drafted.counts_BN[b, _ANSWER] = answer
        work.alive_B[num_alive] = b
        first, end, address = (
            batch.ints_4B[_FIRST, b],
            _end(batch, b),
            _row_address(batch, drafted, b),
        )
        table, position = batch.rows.table_R[first], batch.rows.position_R[first]
        if num_drafted == 0:
            lagging, end_lagging = batch.ints_4B[_LAGGING, b], batch.ints_4B[_LAGGING, b + 1]
            for row in range(lagging, end_lagging):
                before = position - (end_lagging - row)
                _add_row(work, num_rows, batch.lagging_L[row], table, before)
                num_rows += 1
            for row in range(end - first):
                _add_row(work, num_rows, address + row * row_bytes, table, position + row)
                num_rows += 1
        else:
            row = end - first + num_drafted - 1
            _add_row(work, num_rows, address + row * row_bytes, table, position + row)
            num_rows += 1
        work.choices.rows_S[num_alive] = num_rows - 1
        work.choices.divisors_S[num_alive] = batch.divisors_B[b]
        work.choices.mixed_seeds_S[num_alive] = batch.mixed_seeds_B[b]
        work.choices.masks_S[num_alive] = batch.masks_B[b] if num_drafted == 0 else -1
        filters = work.choices.filters
        filters.top_k_S[num_alive] = batch.filters.top_k_S[b]
        filters.top_p_S[num_alive] = batch.filters.top_p_S[b]
        filters.log_min_p_S[num_alive] = batch.filters.log_min_p_S[b]
        work.choices.positions_S[num_alive] = work.ints_4M[_IN_ORDER, num_rows - 1]
        num_alive += 1
    work.counts[_NUM_ROWS], work.counts[_NUM_ALIVE] = num_rows, num_alive


@inner
def _takes(rule: ChainRule, drafted: Drafted, b: int, token: int, gap: np.float32) -> bool:
    """Decides on a request's guess, and counts it. No token (-1) is not taken."""
    counts_N, sums_N = drafted.counts_BN[b], drafted.sums_BN[b]
    num_drafted, answer = counts_N[NUM_DRAFTED], counts_N[_ANSWER]
    drawn, mean = acceptance(rule, num_drafted, float(gap))
    sums_N[_DRAWN] *= drawn
    sums_N[_EXPECTED] *= mean
    drafted.means_BK[b, num_drafted] = mean
    left = rule.optimism - sums_N[_SPENT]
    is_drafted, spent, value = takes(rule, num_drafted, sums_N[_DRAWN], sums_N[_EXPECTED], left)
    if answer == PROBE:
        is_drafted, spent = True, 0.0
        counts_N[_PROBED] = 1
    if answer == LOOK:
        counts_N[_NUM_LOOKS] += 1
        sums_N[_LOOKED] += max(value, 0.0) - rule.guess_price
    is_drafted = is_drafted and token >= 0
    sums_N[_SPENT] += spent
    counts_N[_NUM_GUESSES] += 1
    counts_N[NUM_DRAFTED] += is_drafted
    return is_drafted


@inner
def _decide(stage: Stage, batch: Batch, rules: Rules, drafted: Drafted, work: Work) -> None:
    """Lays out the rows of the guesses that are taken."""
    row_bytes = drafted.rows_ND.strides[0]
    num_rows = 0
    for at in range(work.counts[_NUM_ALIVE]):
        b, token = work.alive_B[at], work.choices.tokens_S[at]
        num_drafted = drafted.counts_BN[b, NUM_DRAFTED]
        drafted.tokens_BK[b, num_drafted] = token
        drafted.gaps_BK[b, num_drafted] = work.choices.gaps_S[at]
        if not _takes(_rule(rules, b), drafted, b, token, work.choices.gaps_S[at]):
            continue
        source = stage.embedding_at + token * stage.embedding_bytes
        table = batch.rows.table_R[batch.ints_4B[_FIRST, b]]
        _add_row(work, num_rows, source, table, work.choices.positions_S[at])
        row = _end(batch, b) - batch.ints_4B[_FIRST, b] + num_drafted
        work.longs_2M[_TARGET, num_rows] = _row_address(batch, drafted, b) + row * row_bytes
        work.alive_B[num_rows] = b
        num_rows += 1
    work.counts[_NUM_ROWS] = work.counts[_NUM_ALIVE] = num_rows


@inner
def _close_gaps(batch: Batch, drafted: Drafted, width: int) -> None:
    """Moves the rows together."""
    row_bytes = drafted.rows_ND.strides[0]
    target = address_of(drafted.rows_ND)
    for b in range(len(batch.divisors_B)):
        source = _row_address(batch, drafted, b)
        num_rows = _end(batch, b) - batch.ints_4B[_FIRST, b] + drafted.counts_BN[b, NUM_DRAFTED]
        if source != target:
            for row in range(num_rows):
                copy_row(target + row * row_bytes, source + row * row_bytes, width)
        target += num_rows * row_bytes


def draft_round(
    kind: Kind,
    stage: Stage,
    batch: Batch,
    rules: Rules,
    drafted: Drafted,
    work: Work,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> None:
    """Runs the known rows, and drafts until every request's rule stops."""
    width = stage.layers.widths.hidden
    num_rows = len(batch.source_T)
    if num_rows == 0:
        return
    # Not constants, for which Numba would compile the layers once more.
    never, always = num_rows < 0, num_rows >= 0
    if thread == 0:
        _begin(batch, drafted, work)
    wait(counters, num_threads)
    is_committed, is_guess = True, False
    while num_rows > 0 and stage.layers.sums.state[sum_layout.LOST] == 0:
        call = stage.head if is_guess else stage.layers
        # One place that runs layers: each is compiled again.
        rows = batch.rows
        source_M = batch.source_T
        if not is_committed:
            source_M = work.longs_2M[_SOURCE]
            rows = RowArrays(
                rows.tables_BW,
                work.ints_4M[_TABLE, :num_rows],
                work.ints_4M[_POSITION, :num_rows],
                work.ints_4M[_POSITION, :num_rows],
                work.ints_4M[_IN_ORDER, :num_rows],
                work.ints_4M[_ZEROS, :num_rows],
                rows.branch_slots,
            )
        source = Source(source_M, stage.num_channels, stage.is_bfloat16 and not is_guess)
        scratch = call.scratch
        first_row, end_row = thread_range(num_rows, thread, num_threads)
        copy_rows(source, scratch.x, scratch.x_bytes, width, first_row, end_row)
        wait(counters, num_threads)
        _run_layers(
            kind,
            call.geometry,
            call.widths,
            call.norms,
            scratch,
            call.table,
            call.sums,
            rows,
            np.int64(0),
            2 * len(call.table),
            never,
            always,
            work.choices.rows_S,
            work.counts[_NUM_ALIVE] if is_guess else num_rows,
            counters,
            thread,
            num_threads,
        )
        wait(counters, num_threads)
        if is_guess:
            choose_tokens(
                kind,
                stage.lm_head,
                stage.ids_V,
                stage.memory,
                scratch,
                call.sums,
                work.choices,
                batch.masks_MU,
                work.counts[_NUM_ALIVE],
                counters,
                thread,
                num_threads,
            )
            if thread == 0:
                _decide(stage, batch, rules, drafted, work)
        else:
            for row in range(first_row, end_row):
                copy_row(work.longs_2M[_TARGET, row], scratch.x + row * scratch.x_bytes, width)
            if thread == 0:
                _ask(batch, rules, drafted, work)
        wait(counters, num_threads)
        num_rows = work.counts[_NUM_ROWS]
        is_committed, is_guess = False, not is_guess
    if thread == 0:
        _close_gaps(batch, drafted, width)


@cache
def draft_kernel() -> Callable[..., None]:
    return kernel(draft_round, *_PARTS)


def is_draft_cached() -> bool:
    """Returns whether the kernel need not be compiled."""
    return is_kept(draft_round, *_PARTS)
