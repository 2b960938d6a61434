"""Sums over the ranks of one host inside of a compiled call, and their best tokens.

Each rank writes its part into a slot of its memory, meets the others, and adds up the parts of all
ranks in pairs, as `transport.rank_sums` does: the same bits on every rank, and for a row whatever
the other rows are.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from eesd_dist.backends.cpu.compiled import inner
from eesd_dist.backends.cpu.kernels.lanes import add, address_of, ints, load, store
from eesd_dist.backends.cpu.kernels.products import copy_row, thread_range
from eesd_dist.backends.cpu.kernels.threads import wait
from eesd_dist.backends.cpu.kernels.words import (
    add_to_word,
    monotonic_ns,
    sleep_at,
    unix_ns,
    wake,
    word_at,
    yield_core,
)
from eesd_dist.model.kv_layout import LANES, Ints
from eesd_dist.transport.sum_layout import (
    ABORTED,
    ARRIVED,
    CONTRIBUTED_NS,
    DEAD,
    GONE,
    LATE,
    LEFT,
    LOST,
    NUM_SUMS,
    REASON,
    SLEEPERS,
    SLOT_BYTES,
    SLOTS,
    STOPPED,
    SUM_BYTES,
    TURN,
    WAIT_NS,
    SumsCall,
)

_FLOAT_BYTES = 4
_WORD_BYTES = 8
_ROW_INTS = 4
"""Integers of a row's best tokens in a slot: the token, and the bits of two scores."""
_LOOKS = 500
"""Looks at a rank's word before the core is offered to others: a few microseconds."""
_AWAKE_NS = 100_000
"""Time before a thread sleeps."""
_LONGEST_SLEEP_NS = 20_000_000
"""Longest sleep, after which a thread looks whether its rank was aborted in between."""


@inner
def _state_word(sums: SumsCall, index: int) -> int:
    """Returns a word of the state that another thread of this process may set."""
    return word_at(address_of(sums.state) + index * _WORD_BYTES)


@inner
def _lost_rank(sums: SumsCall, peer: int) -> tuple[int, int]:
    """Returns the rank because of which a wait for `peer` is to end, and why; 0 for no reason."""
    if _state_word(sums, GONE + peer) != 0:
        return peer, DEAD
    for other in range(sums.size):
        if other != sums.rank and word_at(sums.bases_G[other] + ABORTED) != 0:
            return other, LEFT
    return peer, LEFT if _state_word(sums, STOPPED) != 0 else 0


@inner
def _wait_for(sums: SumsCall, peer: int, turn: int, began_ns: int) -> tuple[int, int]:
    """Waits until a rank has filled its slot. Returns the rank that was lost, and why; 0: none."""
    at = sums.bases_G[peer] + ARRIVED
    while monotonic_ns() - began_ns < _AWAKE_NS:
        for _ in range(_LOOKS):
            if word_at(at) >= turn:
                return peer, 0
        yield_core()
    while True:
        lost, reason = _lost_rank(sums, peer)
        arrived = word_at(at)
        if arrived >= turn:
            return peer, 0
        if reason != 0:
            return lost, reason
        left_ns = began_ns + sums.timeout_ns - monotonic_ns()
        if left_ns <= 0:
            return peer, LATE
        add_to_word(sums.bases_G[peer] + SLEEPERS, 1)
        sleep_at(at, arrived, min(left_ns, _LONGEST_SLEEP_NS))
        add_to_word(sums.bases_G[peer] + SLEEPERS, -1)


@inner
def _meet(sums: SumsCall) -> None:
    """Ends a turn: this rank's slot is filled, and so are those of the others when this returns,
    unless one was lost."""
    state = sums.state
    turn = state[TURN] + 1
    state[TURN] = turn
    state[CONTRIBUTED_NS] = unix_ns()
    own = sums.bases_G[sums.rank]
    add_to_word(own + ARRIVED, 1)
    if word_at(own + SLEEPERS) > 0:
        wake(own + ARRIVED)
    began_ns = monotonic_ns()
    for peer in range(sums.size):
        if peer != sums.rank:
            lost, reason = _wait_for(sums, peer, turn, began_ns)
            if reason != 0:
                state[LOST], state[REASON] = lost + 1, reason
                break
    state[WAIT_NS] += monotonic_ns() - began_ns


@inner
def _slot(sums: SumsCall, rank: int, turn: int) -> int:
    """Returns the address of the slot that a rank fills for a turn."""
    at: int = sums.bases_G[rank] + SLOTS + (turn % 2) * SLOT_BYTES
    return at


@inner
def _of_rank(bases_at: int, rank: int, skipped: int, at: int) -> Any:
    """Returns a vector of a rank, `skipped` bytes into its memory."""
    return load(word_at(bases_at + rank * _WORD_BYTES) + skipped, at)


@inner
def _sum_of_two(bases_at: int, size: int, rank: int, skipped: int, at: int) -> Any:
    """Returns the sum of two ranks' vectors from `rank` on, or of as many as there are. Numbers
    instead of arrays, which would be counted at each call."""
    total = _of_rank(bases_at, rank, skipped, at)
    if rank + 1 < size:
        total = add(total, _of_rank(bases_at, rank + 1, skipped, at))
    return total


@inner
def _sum_of_four(bases_at: int, size: int, rank: int, skipped: int, at: int) -> Any:
    total = _sum_of_two(bases_at, size, rank, skipped, at)
    if rank + 2 < size:
        total = add(total, _sum_of_two(bases_at, size, rank + 2, skipped, at))
    return total


@inner
def _sum_of_eight(bases_at: int, size: int, rank: int, skipped: int, at: int) -> Any:
    total = _sum_of_four(bases_at, size, rank, skipped, at)
    if rank + 4 < size:
        total = add(total, _sum_of_four(bases_at, size, rank + 4, skipped, at))
    return total


@inner
def _sum_of_all(bases_at: int, size: int, skipped: int, at: int) -> Any:
    """Returns the sum over at most MOST_RANKS."""
    total = _sum_of_eight(bases_at, size, 0, skipped, at)
    if size > 8:
        total = add(total, _sum_of_eight(bases_at, size, 8, skipped, at))
    return total


@inner
def sum_over_ranks(
    sums: SumsCall,
    rows_at: int,
    row_bytes: int,
    width: int,
    num_rows: int,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> bool:
    """Sums rows over the ranks, in place. Every thread of the call calls it; a thread has then the
    rows of its `thread_range`. Returns False if a rank was lost: the sums are garbage.

    `width`: numbers of a row, a multiple of a vector; a row fits into a slot.
    """
    if sums.state[LOST] != 0:  # a late rank may still read the slot of the last turn but one
        return False
    bases_at, size = address_of(sums.bases_G), sums.size
    rows_per_slot = SLOT_BYTES // (width * _FLOAT_BYTES)
    own_first, own_end = thread_range(num_rows, thread, num_threads)
    for first in range(0, num_rows, rows_per_slot):
        end = min(first + rows_per_slot, num_rows)
        first_row, end_row = max(first, own_first), min(end, own_end)
        turn = sums.state[TURN] + 1
        for row in range(first_row, end_row):
            target_at = _slot(sums, sums.rank, turn) + (row - first) * width * _FLOAT_BYTES
            copy_row(target_at, rows_at + row * row_bytes, width)
        wait(counters, num_threads)
        if thread == 0:
            _meet(sums)
        wait(counters, num_threads)
        if sums.state[LOST] != 0:
            return False
        for row in range(first_row, end_row):
            target_at = rows_at + row * row_bytes
            skipped = SLOTS + (turn % 2) * SLOT_BYTES + (row - first) * width * _FLOAT_BYTES
            for at in range(0, width, LANES):
                store(target_at, at, _sum_of_all(bases_at, size, skipped, at))
    if thread == 0 and num_rows > 0:
        sums.state[NUM_SUMS] += 1
        sums.state[SUM_BYTES] += num_rows * width * _FLOAT_BYTES
    return True


@inner
def _key(bits: np.int32) -> np.int32:
    """Returns a whole number in the order of the float32 numbers with these bits."""
    return np.int32(bits ^ np.int32(np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


@inner
def best_over_ranks(
    sums: SumsCall, tokens_S: Ints, scores_2S: npt.NDArray[np.float32], num_rows: int
) -> None:
    """Replaces each rank's best token and best two scores by those of all ranks; of equal ones the
    first, since ranks are in the order of their tokens. Only one thread of a call calls it."""
    if sums.state[LOST] != 0:
        return
    bits_2S = scores_2S.view(np.int32)
    rows_per_slot = SLOT_BYTES // (_ROW_INTS * _FLOAT_BYTES)
    for first in range(0, num_rows, rows_per_slot):
        end = min(first + rows_per_slot, num_rows)
        turn = sums.state[TURN] + 1
        own = ints(_slot(sums, sums.rank, turn))
        for row in range(first, end):
            at = (row - first) * _ROW_INTS
            own[at], own[at + 1], own[at + 2] = tokens_S[row], bits_2S[0, row], bits_2S[1, row]
        _meet(sums)
        if sums.state[LOST] != 0:
            return
        for row in range(first, end):
            at = (row - first) * _ROW_INTS
            first_rank = ints(_slot(sums, 0, turn))
            token, best_bits, second_bits = first_rank[at], first_rank[at + 1], first_rank[at + 2]
            for rank in range(1, sums.size):
                other = ints(_slot(sums, rank, turn))
                if _key(other[at + 1]) > _key(best_bits):
                    second_bits = (
                        best_bits if _key(best_bits) > _key(other[at + 2]) else other[at + 2]
                    )
                    token, best_bits = other[at], other[at + 1]
                elif _key(other[at + 1]) > _key(second_bits):
                    second_bits = other[at + 1]
            tokens_S[row], bits_2S[0, row], bits_2S[1, row] = token, best_bits, second_bits
