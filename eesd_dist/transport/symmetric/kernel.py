"""Sums and gathers over the ranks of a node in one kernel each. Needs Triton when it is imported.

Every rank has memory that all ranks of the node have mapped. A rank copies its numbers into its
own memory, tells the same program of every peer that they are there, waits until each peer has said
so, and adds up the numbers of all ranks in pairs. So every sum has the bits of
`rank_sums.pairwise_sum`, whatever else is summed with it.

Nothing on the host counts: a program counts its launches in device memory, so that a CUDA graph can
be replayed. Launches alternate between two halves of the memory. A peer that signals a launch has
finished the one before, and a rank has seen that signal before it begins the launch after: no rank
still reads what is overwritten. This needs as many programs in every launch, and the same launches
in the same order on every rank.

A wait also ends when the host sets the abort word; sums after that are garbage.

Memory of a rank: signals [2 phases, PROGRAMS, SIZE] int32 from its start; from DATA on two halves
of CAPACITY bytes that this rank fills, then two that its peers fill.
"""

from typing import Any

import triton
import triton.language as tl

PROGRAMS = 16
"""Programs of every launch. Few, since ranks may share a GPU in tests: all have to run at once."""
DATA = 1 << 16
"""Bytes before the data."""
NUM_WARPS = 8
_THREADS: tl.constexpr = tl.constexpr(32 * NUM_WARPS)
_POLLS: tl.constexpr = tl.constexpr(256)
"""Polls of a signal between two of the abort word, which is in the host's memory."""


@triton.jit
def sum_kernel(
    x: "Any",
    total: "Any",
    bases: "Any",
    counts: "Any",
    num: "Any",
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DATA: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    IN_SHARES: tl.constexpr,
) -> None:
    """Stores the sum of every rank's x, added in pairs in float32 and rounded to the type of
    `total`.

    With `IN_SHARES` each rank sums one share of a program's numbers and writes it into all peers'
    memory; otherwise each sums all. `bases`: addresses of the ranks' memory, then of the abort
    word; `counts`: launches of each program so far, then of each 1 once it has seen the abort.
    """
    program = tl.program_id(0)
    kind = x.dtype.element_ty
    count = tl.load(counts + program) + 1
    goes_on = (tl.load(counts + PROGRAMS + program) == 0).to(tl.int32)
    WIDTH: tl.constexpr = triton.next_power_of_2(SIZE)
    width = tl.cdiv(tl.cdiv(num, PROGRAMS), TILE) * TILE
    first = program * width
    end = tl.minimum(first + width, num)
    at_half = DATA + (count & 1).to(tl.int64) * CAPACITY
    own = tl.multiple_of((tl.load(bases + RANK) + at_half).to(tl.pointer_type(kind)), 16)
    index = tl.arange(0, TILE)
    for start in range(first, end, TILE):
        is_number = start + index < end
        tl.store(own + start + index, tl.load(x + start + index, mask=is_number), mask=is_number)
    goes_on = _meet(bases, counts, count, goes_on, 0, RANK, SIZE, PROGRAMS)
    if IN_SHARES:
        share = tl.cdiv(tl.cdiv(width, SIZE), 16) * 16
        own_first = first + RANK * share
        own_end = tl.minimum(own_first + share, end)
        for start in range(own_first, own_end, TILE):
            is_number = start + index < own_end
            sum_N = _sum_of(bases, at_half, start + index, is_number, kind, 0, SIZE, WIDTH)
            sum_N = sum_N.to(kind)
            tl.store(total + start + index, sum_N, mask=is_number)
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    theirs = tl.load(bases + rank) + at_half + 2 * CAPACITY
                    theirs = tl.multiple_of(theirs.to(tl.pointer_type(kind)), 16)
                    tl.store(theirs + start + index, sum_N, mask=is_number)
        goes_on = _meet(bases, counts, count, goes_on, 1, RANK, SIZE, PROGRAMS)
        filled = tl.load(bases + RANK) + at_half + 2 * CAPACITY
        filled = tl.multiple_of(filled.to(tl.pointer_type(kind)), 16)
        for start in range(first, end, TILE):
            at = start + index
            is_theirs = (at < end) & ((at < own_first) | (at >= own_end))
            tl.store(total + at, tl.load(filled + at, mask=is_theirs), mask=is_theirs)
    else:
        for start in range(first, end, TILE):
            is_number = start + index < end
            sum_N = _sum_of(bases, at_half, start + index, is_number, kind, 0, SIZE, WIDTH)
            tl.store(total + start + index, sum_N.to(total.dtype.element_ty), mask=is_number)
    tl.store(counts + program, count)


@triton.jit
def gather_kernel(
    x: "Any",
    gathered: "Any",
    bases: "Any",
    counts: "Any",
    num: "Any",
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DATA: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Stores every rank's x, one after the other in rank order. Arguments as of `sum_kernel`."""
    program = tl.program_id(0)
    kind = x.dtype.element_ty
    count = tl.load(counts + program) + 1
    goes_on = (tl.load(counts + PROGRAMS + program) == 0).to(tl.int32)
    width = tl.cdiv(tl.cdiv(num, PROGRAMS), TILE) * TILE
    first = program * width
    end = tl.minimum(first + width, num)
    at_half = DATA + (count & 1).to(tl.int64) * CAPACITY
    own = tl.multiple_of((tl.load(bases + RANK) + at_half).to(tl.pointer_type(kind)), 16)
    index = tl.arange(0, TILE)
    for start in range(first, end, TILE):
        is_number = start + index < end
        tl.store(own + start + index, tl.load(x + start + index, mask=is_number), mask=is_number)
    goes_on = _meet(bases, counts, count, goes_on, 0, RANK, SIZE, PROGRAMS)
    for start in range(first, end, TILE):
        is_number = start + index < end
        for rank in tl.static_range(SIZE):
            theirs = (tl.load(bases + rank) + at_half).to(tl.pointer_type(kind))
            numbers = tl.load(theirs + start + index, mask=is_number)
            tl.store(gathered + rank * num + start + index, numbers, mask=is_number)
    tl.store(counts + program, count)


@triton.jit
def _sum_of(
    bases: "Any",
    at_half: "Any",
    at: "Any",
    mask: "Any",
    kind: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> "Any":
    """Returns the sum in float32, in pairs, of the numbers of WIDTH ranks from FIRST on, a power of
    two, or of as many as there are of SIZE."""
    if WIDTH == 1:
        theirs = tl.multiple_of((tl.load(bases + FIRST) + at_half).to(tl.pointer_type(kind)), 16)
        sum_N = tl.load(theirs + at, mask=mask, other=0.0).to(tl.float32)
    else:
        HALF: tl.constexpr = WIDTH // 2
        sum_N = _sum_of(bases, at_half, at, mask, kind, FIRST, SIZE, HALF)
        if FIRST + HALF < SIZE:
            sum_N += _sum_of(bases, at_half, at, mask, kind, FIRST + HALF, SIZE, HALF)
    return sum_N


@triton.jit(do_not_specialize=["num"])
def gathered_sum_kernel(
    x_GN: "Any", total_N: "Any", num: "Any", SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Stores the sum of SIZE rows, added in pairs in float32 and rounded to the type of `total`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum_N = _sum_of_rows(x_GN, num, at, at < num, 0, SIZE, triton.next_power_of_2(SIZE))
    tl.store(total_N + at, sum_N.to(total_N.dtype.element_ty), mask=at < num)


@triton.jit
def _sum_of_rows(
    x_GN: "Any",
    num: "Any",
    at: "Any",
    mask: "Any",
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> "Any":
    """Returns what `_sum_of` returns, of rows."""
    if WIDTH == 1:
        sum_N = tl.load(x_GN + FIRST * num.to(tl.int64) + at, mask=mask, other=0.0).to(tl.float32)
    else:
        HALF: tl.constexpr = WIDTH // 2
        sum_N = _sum_of_rows(x_GN, num, at, mask, FIRST, SIZE, HALF)
        if FIRST + HALF < SIZE:
            sum_N += _sum_of_rows(x_GN, num, at, mask, FIRST + HALF, SIZE, HALF)
    return sum_N


@triton.jit
def _meet(
    bases: "Any",
    counts: "Any",
    count: "Any",
    goes_on: "Any",
    phase: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> "Any":
    """Signals the same program of every peer, and waits for their signals. What the ranks wrote
    before is visible after. Returns 0 after an abort."""
    tl.debug_barrier()  # every thread has written
    signals = 4 * SIZE * (phase * PROGRAMS + tl.program_id(0)).to(tl.int64)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            signal = (tl.load(bases + rank) + signals + 4 * RANK).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(signal, count, sem="release", scope="sys")
    abort = tl.load(bases + SIZE).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            signal = (tl.load(bases + RANK) + signals + 4 * rank).to(tl.pointer_type(tl.int32))
            polls = 0
            # The difference, since counts wrap around.
            lead = tl.atomic_add(signal, 0, sem="acquire", scope="sys") - count
            while (lead < 0) & (goes_on != 0):
                polls += 1
                if polls % _POLLS == 0:
                    # By all threads and reduced: one answer for all of them.
                    words = tl.load(abort + tl.zeros([_THREADS], tl.int32), volatile=True)
                    goes_on = (tl.max(words, 0) == 0).to(tl.int32)
                lead = tl.atomic_add(signal, 0, sem="acquire", scope="sys") - count
    if goes_on == 0:
        tl.store(counts + PROGRAMS + tl.program_id(0), 1)
    tl.debug_barrier()  # no thread reads before
    return goes_on
