"""Attention over pages on a CPU: one compiled call for all rows of a layer.

Every number of a row is computed by a fixed sequence of operations, whatever else is computed:
a score is a chain of `fma` over the channels, a sum of values a chain over the keys in the order of
positions, and the softmax sums 16 lanes of keys and then the lanes. Rows of a request share the
loads of keys and values, which changes no chain. So a row has the same bits alone, in a verify
pass, in a prefill chunk and in a tree, with any page size, and on any machine.

The functions are Python that Numba compiles. Independent of layers, plans and torch.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from numba import float32

from eesd_dist.backends.cpu.compiled import inner, kernel
from eesd_dist.backends.cpu.kernels.kv_store import (
    Geometry,
    Stored,
    copy_numbers,
    gather,
    store_rows,
)
from eesd_dist.backends.cpu.kernels.lanes import (
    add,
    address_of,
    div,
    first_lane,
    floats,
    highest_lane,
    load,
    maximum,
    minimum,
    mul,
    number_bytes,
    splat,
    store,
    store_input,
    store_one_input,
    total,
    zero_where_less,
)
from eesd_dist.backends.cpu.kernels.products import Kind, thread_range
from eesd_dist.backends.cpu.kernels.threads import wait
from eesd_dist.backends.cpu.kernels.tiles import MOST_ROWS, add_tile
from eesd_dist.backends.cpu.kernels.vector_math import exp
from eesd_dist.model import kv_layout
from eesd_dist.model.kv_layout import LANES, RowArrays

# Shapes: R rows, B page tables, W pages of the longest one, K KV heads, G queries per KV head,
# E channels of a head, S slots of a page, Q queries of the rows computed together, N their keys,
# P numbers in a page's part for one KV head.

_MAX_QUERIES = 64
"""Maximum queries computed together: enough to read a page once for a verify pass."""
_MAX_SCORES = 1 << 18
"""Maximum scores of these queries: what fits the second-level cache."""
_FLOAT_BYTES = 4
_NO_WEIGHT = -64.0
"""A score that is further below the largest counts for nothing: e^-64 of a value is lost in a sum,
and products that small are no normal numbers, which are slow."""


@inner
def _add_product(
    stored: Stored,
    a: int,
    a_bytes: int,
    num_rows: int,
    b: int,
    b_bytes: int,
    left: int,
    width: int,
    length: int,
    c: int,
    c_bytes: int,
    begins: bool,
    prefetch_at: int,
) -> None:
    """c += a[:, :length] @ b[:length] in two vectors of columns from `left` on, or to the end of
    the `width`, which is at least LANES; `begins`: c is overwritten. a, b and c: addresses; b is
    stored."""
    first, second = min(left, width - LANES), min(left + LANES, width - LANES)
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    tile_rows = (num_rows + num_tiles - 1) // num_tiles
    for row in range(0, num_rows, tile_rows):
        c_at = c + row * c_bytes
        add_tile(
            stored,
            a + row * a_bytes,
            a_bytes,
            b + number_bytes(stored) * first,
            b + number_bytes(stored) * second,
            b_bytes,
            length,
            c_at + _FLOAT_BYTES * first,
            c_at + _FLOAT_BYTES * second,
            c_bytes,
            int(begins),
            prefetch_at if row == 0 else b,
            min(tile_rows, num_rows - row),
        )


@inner
def _scale(scores: int, first: int, end: int, scale: np.float32) -> None:
    """Scales scores, not queries: rounding every channel would add up."""
    for at in range(first, end, LANES):
        store(scores, at, mul(load(scores, at), splat(scale)))


@inner
def _cap(scores: int, first: int, end: int, softcap: np.float32) -> None:
    """scores = softcap * tanh(scores / softcap), with tanh(x) = 1 - 2 / (e^2x + 1)."""
    ones, cap = splat(float32(1.0)), splat(softcap)
    for at in range(first, end, LANES):
        twice = mul(load(scores, at), splat(float32(2.0) / softcap))
        power = exp(minimum(twice, splat(float32(80.0))))
        tanh = add(ones, div(splat(float32(-2.0)), add(power, ones)))
        store(scores, at, mul(tanh, cap))


@inner
def _softmax(scores_at: int, first: int, end: int, stop: int) -> np.float32:
    """Replaces scores [first, end) by their exponentials, and the other numbers from the first
    vector up to `stop` by 0; returns the sum."""
    scores = floats(scores_at)
    first_vector = first // LANES * LANES
    end_vector = (end + LANES - 1) // LANES * LANES
    for j in range(first_vector, first):
        scores[j] = float32(-np.inf)
    for j in range(end, end_vector):
        scores[j] = float32(-np.inf)
    largest = load(scores_at, first_vector)
    for j in range(first_vector + LANES, end_vector, LANES):
        largest = maximum(largest, load(scores_at, j))
    highest = splat(-highest_lane(largest))
    for j in range(first_vector, end_vector, LANES):
        below = add(load(scores_at, j), highest)
        store(scores_at, j, zero_where_less(below, splat(float32(_NO_WEIGHT)), exp(below)))
    for j in range(first_vector, first):
        scores[j] = float32(0.0)
    for j in range(end, stop):
        scores[j] = float32(0.0)
    lanes = splat(float32(0.0))
    for j in range(first_vector, end_vector, LANES):
        lanes = add(lanes, load(scores_at, j))
    return total(lanes)


@inner
def _zero(scores_at: int, first: int, end: int) -> None:
    scores = floats(scores_at)
    for j in range(first, end):
        scores[j] = float32(0.0)


@inner
def _write_mixed(
    kind: Kind, mixed_at: int, at: int, sums_at: int, width: int, inverse: np.float32
) -> None:
    """Writes the mean of values of one query as inputs [at, at + width) of a product."""
    if width < LANES:
        sums = floats(sums_at)
        for e in range(width):
            store_one_input(kind, mixed_at, at + e, sums[e] * inverse)
        return
    factor = splat(inverse)
    for e in range(0, width - LANES, LANES):
        store_input(kind, mixed_at, at + e, mul(load(sums_at, e), factor))
    last = width - LANES
    store_input(kind, mixed_at, at + last, mul(load(sums_at, last), factor))


@inner
def _end_of_group(rows: RowArrays, row: int, end_row: int, max_rows: int) -> int:
    """Returns the end of the rows from `row` on that share their keys: those of one request, or a
    single row of a tree."""
    if rows.in_order_R[row] <= rows.position_R[row]:
        return row + 1
    end = row + 1
    while (
        end < min(end_row, row + max_rows)
        and rows.table_R[end] == rows.table_R[row]
        and rows.in_order_R[end] > rows.position_R[end]
    ):
        end += 1
    return end


@inner
def _first_key(window: int, position: int) -> int:
    return max(0, position + 1 - window) if window > 0 else 0


@inner
def attend_rows(
    kind: Kind,
    geometry: Geometry,
    window: int,
    rows: RowArrays,
    heads_at: int,
    row_numbers: int,
    pages_at: int,
    mixed_at: int,
    mixed_numbers: int,
    first_row: int,
    end_row: int,
    first_kv: int,
    end_kv: int,
) -> None:
    """Attends rows [first_row, end_row) to the stored keys of KV heads [first_kv, end_kv).

    `window`: how many of the last positions a row may see; 0: all. The result is the input of a
    product with weights of this kind; `mixed_numbers`: from one of its rows to the next.
    """
    num_kv, per_kv, stored = geometry.num_kv, geometry.per_kv, geometry.stored
    channels, size = geometry.channels, geometry.page_size
    key_width, value_width = max(size, LANES), max(channels, LANES)
    key_numbers = channels * key_width
    kv_numbers = key_numbers + size * value_width
    longest = 0
    for row in range(first_row, end_row):
        longest = max(longest, rows.position_R[row] + 1)
    # Scores of one query, up to the end of its last page and of its last vector.
    distance = (longest + size - 1) // size * size + LANES
    max_rows = min(_MAX_QUERIES // per_kv, _MAX_SCORES // (distance * per_kv), end_row - first_row)
    max_rows = max(1, max_rows)
    max_queries = max_rows * per_kv
    memory = np.empty(max_queries * (2 * value_width + distance) + kv_numbers, np.float32)
    queries = address_of(memory)
    sums = queries + _FLOAT_BYTES * max_queries * value_width
    gathered = sums + _FLOAT_BYTES * max_queries * value_width
    scores = gathered + _FLOAT_BYTES * kv_numbers
    stored_bytes = number_bytes(stored)
    kv_bytes, key_bytes = stored_bytes * kv_numbers, stored_bytes * key_numbers
    line_bytes, value_bytes = _FLOAT_BYTES * distance, _FLOAT_BYTES * value_width
    row = first_row
    while row < end_row:
        end = _end_of_group(rows, row, end_row, max_rows)
        num_queries = (end - row) * per_kv
        is_tree = rows.in_order_R[row] <= rows.position_R[row]
        table_W = rows.tables_BW[rows.table_R[row]]
        first_key = _first_key(window, rows.position_R[row])
        end_key = rows.position_R[end - 1] + 1
        first_page, end_page = first_key // size, (end_key + size - 1) // size
        for kv in range(first_kv, end_kv):
            for own in range(row, end):
                for g in range(per_kv):
                    source = own * row_numbers + (g * num_kv + kv) * channels
                    target = queries + ((own - row) * per_kv + g) * value_bytes
                    copy_numbers(float32(0.0), target, heads_at + _FLOAT_BYTES * source, channels)
            for page in range(first_page, end_page):
                begin = page * size
                num_keys = min(size, end_key - begin)
                keys = pages_at + kv_bytes * (table_W[page] * num_kv + kv)
                if page + 1 < end_page:
                    prefetch_at = pages_at + kv_bytes * (table_W[page + 1] * num_kv + kv)
                else:
                    prefetch_at = pages_at + kv_bytes * (table_W[first_page] * num_kv + kv)
                    prefetch_at += key_bytes
                if is_tree and begin + num_keys > rows.in_order_R[row]:
                    gather(geometry, rows, row, pages_at, kv, begin, num_keys, gathered)
                    keys = gathered
                width = min(key_width, (num_keys + LANES - 1) // LANES * LANES)
                for left in range(0, width, 2 * LANES):
                    _add_product(
                        stored,
                        queries,
                        value_bytes,
                        num_queries,
                        keys,
                        stored_bytes * key_width,
                        left,
                        width,
                        channels,
                        scores + _FLOAT_BYTES * begin,
                        line_bytes,
                        True,
                        prefetch_at if left == 0 else keys,
                    )
            # Page by page within columns: overlapping vectors add a page to each channel once.
            for own in range(row, end):
                own_end = rows.position_R[own] + 1
                own_first = _first_key(window, own_end - 1)
                for g in range(per_kv):
                    at = (own - row) * per_kv + g
                    line = scores + at * line_bytes
                    _scale(line, first_page * size, end_key, geometry.scale)
                    if geometry.softcap > 0.0:
                        _cap(line, first_page * size, end_key, geometry.softcap)
                    _zero(line, first_key, own_first // LANES * LANES)
                    # The place of the sum: a query's channels are no longer needed.
                    store(
                        queries,
                        at * value_width,
                        splat(_softmax(line, own_first, own_end, end_key)),
                    )
            for left in range(0, value_width, 2 * LANES):
                for page in range(first_page, end_page):
                    begin = page * size
                    num_keys = min(size, end_key - begin)
                    values = pages_at + kv_bytes * (table_W[page] * num_kv + kv) + key_bytes
                    if page + 1 < end_page:
                        prefetch_at = (
                            pages_at + kv_bytes * (table_W[page + 1] * num_kv + kv) + key_bytes
                        )
                    else:  # the keys of the next KV head follow in memory
                        prefetch_at = pages_at + kv_bytes * (table_W[first_page] * num_kv + kv + 1)
                    if is_tree and begin + num_keys > rows.in_order_R[row]:
                        gather(geometry, rows, row, pages_at, kv, begin, num_keys, gathered)
                        values = gathered + key_bytes
                    skipped = max(first_key - begin, 0)
                    _add_product(
                        stored,
                        scores + _FLOAT_BYTES * (begin + skipped),
                        line_bytes,
                        num_queries,
                        values + skipped * stored_bytes * value_width,
                        stored_bytes * value_width,
                        left,
                        value_width,
                        num_keys - skipped,
                        sums,
                        value_bytes,
                        page == first_page,
                        prefetch_at if left == 0 else values,
                    )
            for own in range(row, end):
                for g in range(per_kv):
                    at = (own - row) * per_kv + g
                    inverse = float32(1.0) / first_lane(load(queries, at * value_width))
                    target = own * mixed_numbers + (g * num_kv + kv) * channels
                    _write_mixed(kind, mixed_at, target, sums + at * value_bytes, channels, inverse)
        row = end
    memory[0] = float32(0.0)  # Numba frees memory after the last use of its array


def attend(
    kind: Kind,
    geometry: Geometry,
    window: int,
    rows: RowArrays,
    heads_at: int,
    row_numbers: int,
    pages_at: int,
    mixed_at: int,
    mixed_numbers: int,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> None:
    """Stores the keys and values of all rows, then attends them."""
    first, end = thread_range(len(rows.position_R), thread, num_threads)
    store_rows(geometry, rows, heads_at, row_numbers, pages_at, first, end)
    wait(counters, num_threads)
    attend_rows(
        kind,
        geometry,
        window,
        rows,
        heads_at,
        row_numbers,
        pages_at,
        mixed_at,
        mixed_numbers,
        first,
        end,
        0,
        geometry.num_kv,
    )


@cache
def attention_kernel() -> Callable[..., None]:
    return kernel(attend, kv_layout)
