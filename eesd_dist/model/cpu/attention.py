"""Attention over pages on a CPU: one compiled call for all rows of a layer.

Every number of a row is computed by a fixed sequence of operations, whatever else is computed:
a score is a chain of `fma` over the channels, a sum of values a chain over the keys in the order of
positions, and the softmax sums 16 lanes of keys and then the lanes. Rows of a request share the
loads of keys and values, which changes no chain. So a row has the same bits alone, in a verify
pass, in a prefill chunk and in a tree, with any page size, and on any machine.

Keys of a page are stored with the keys side by side, values with the channels side by side, so that
both products are chains over whole vectors. Where a width is no multiple of the vector, the last
vector overlaps the one before, and some lanes are computed twice.

The functions are Python that Numba compiles. Independent of layers, plans and torch.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import float32

from eesd_dist.model.attention.layout import LANES, RowArrays
from eesd_dist.model.attention.shape import AttentionShape
from eesd_dist.model.cpu.compiled import inner
from eesd_dist.model.cpu.lanes import (
    add,
    div,
    floats_at,
    fma,
    load,
    maximum,
    minimum,
    mul,
    splat,
    store,
    store_one_input,
)
from eesd_dist.model.cpu.vector_math import exp

# Shapes: R rows, B page tables, W pages of the longest one, K KV heads, G queries per KV head,
# E channels of a head, S slots of a page, Q queries of the rows computed together, N their keys,
# P numbers in a page's part for one KV head.
Floats = npt.NDArray[np.float32]

_MAX_QUERIES = 64
"""Maximum queries computed together: enough to read a page once for a verify pass."""
_MAX_SCORES = 1 << 18
"""Maximum scores of these queries: what fits the second-level cache."""
_TILE = 4
_ANY_LENGTH = (1 << 40,)
"""Numba wants a length; no index is checked."""


class Geometry(NamedTuple):
    """What is the same for every row of a layer."""

    num_kv: int
    per_kv: int
    channels: int
    page_size: int
    scale: np.float32
    softcap: np.float32
    """0: scores are not capped."""

    @classmethod
    def of(cls, shape: AttentionShape) -> "Geometry":
        return cls(
            num_kv=shape.num_kv_heads,
            per_kv=shape.queries_per_kv,
            channels=shape.head_dim,
            page_size=shape.page_size,
            scale=np.float32(shape.scale),
            softcap=np.float32(shape.scores.softcap or 0.0),
        )


@inner
def _tile_of_4(
    a: Floats,
    a0: int,
    da: int,
    b: Floats,
    b0: int,
    b1: int,
    db: int,
    length: int,
    c: Floats,
    c0: int,
    c1: int,
    dc: int,
    begins: bool,
) -> None:
    """c += a @ b for 4 rows of a and two vectors of columns, at b0 and b1 of b's first row.

    a0, c0 and c1 are the places of the first row, da, db and dc the distances between rows.
    """
    if begins:
        x00 = x01 = x10 = x11 = x20 = x21 = x30 = x31 = splat(float32(0.0))
    else:
        x00, x01 = load(c, c0), load(c, c1)
        x10, x11 = load(c, c0 + dc), load(c, c1 + dc)
        x20, x21 = load(c, c0 + 2 * dc), load(c, c1 + 2 * dc)
        x30, x31 = load(c, c0 + 3 * dc), load(c, c1 + 3 * dc)
    for i in range(length):
        y0, y1 = load(b, b0), load(b, b1)
        p = splat(a[a0 + i])
        x00, x01 = fma(p, y0, x00), fma(p, y1, x01)
        p = splat(a[a0 + da + i])
        x10, x11 = fma(p, y0, x10), fma(p, y1, x11)
        p = splat(a[a0 + 2 * da + i])
        x20, x21 = fma(p, y0, x20), fma(p, y1, x21)
        p = splat(a[a0 + 3 * da + i])
        x30, x31 = fma(p, y0, x30), fma(p, y1, x31)
        b0 += db
        b1 += db
    store(c, c0, x00)
    store(c, c1, x01)
    store(c, c0 + dc, x10)
    store(c, c1 + dc, x11)
    store(c, c0 + 2 * dc, x20)
    store(c, c1 + 2 * dc, x21)
    store(c, c0 + 3 * dc, x30)
    store(c, c1 + 3 * dc, x31)


@inner
def _tile_of_1(
    a: Floats,
    a0: int,
    b: Floats,
    b0: int,
    b1: int,
    db: int,
    length: int,
    c: Floats,
    c0: int,
    c1: int,
    begins: bool,
) -> None:
    """The same for one row of a."""
    x0 = x1 = splat(float32(0.0))
    if not begins:
        x0, x1 = load(c, c0), load(c, c1)
    for i in range(length):
        p = splat(a[a0 + i])
        x0, x1 = fma(p, load(b, b0), x0), fma(p, load(b, b1), x1)
        b0 += db
        b1 += db
    store(c, c0, x0)
    store(c, c1, x1)


@inner
def _add_product(
    a: Floats,
    a0: int,
    da: int,
    num_rows: int,
    b: Floats,
    b0: int,
    db: int,
    left: int,
    width: int,
    length: int,
    c: Floats,
    c0: int,
    dc: int,
    begins: bool,
) -> None:
    """c += a[:, :length] @ b[:length] in two vectors of columns from `left` on, or to the end of
    the `width`, which is at least LANES; `begins`: c is overwritten."""
    at0 = min(left, width - LANES)
    at1 = min(left + LANES, width - LANES)
    row = 0
    while row + _TILE <= num_rows:
        a_at, c_at = a0 + row * da, c0 + row * dc
        left_at, right_at = c_at + at0, c_at + at1
        _tile_of_4(a, a_at, da, b, b0 + at0, b0 + at1, db, length, c, left_at, right_at, dc, begins)
        row += _TILE
    while row < num_rows:
        a_at, c_at = a0 + row * da, c0 + row * dc
        left_at, right_at = c_at + at0, c_at + at1
        _tile_of_1(a, a_at, b, b0 + at0, b0 + at1, db, length, c, left_at, right_at, begins)
        row += 1


@inner
def _scale(scores: Floats, first: int, end: int, scale: np.float32) -> None:
    """Scales scores, not queries: rounding every channel would add up."""
    for at in range(first, end, LANES):
        store(scores, at, mul(load(scores, at), splat(scale)))


@inner
def _cap(scores: Floats, first: int, end: int, softcap: np.float32) -> None:
    """scores = softcap * tanh(scores / softcap), with tanh(x) = 1 - 2 / (e^2x + 1)."""
    one, cap = splat(float32(1.0)), splat(softcap)
    for at in range(first, end, LANES):
        twice = mul(load(scores, at), splat(float32(2.0) / softcap))
        power = exp(minimum(twice, splat(float32(80.0))))
        tanh = add(one, div(splat(float32(-2.0)), add(power, one)))
        store(scores, at, mul(tanh, cap))


@inner
def _softmax(scores: Floats, at: int, first: int, end: int, stop: int, lanes: Floats) -> float:
    """Replaces scores[at + first : at + end] by their exponentials, and the other numbers up to
    `stop` by 0; returns the sum."""
    first_vector = first // LANES * LANES
    end_vector = (end + LANES - 1) // LANES * LANES
    for j in range(first_vector, first):
        scores[at + j] = float32(-np.inf)
    for j in range(end, end_vector):
        scores[at + j] = float32(-np.inf)
    largest = load(scores, at + first_vector)
    for j in range(first_vector + LANES, end_vector, LANES):
        largest = maximum(largest, load(scores, at + j))
    store(lanes, 0, largest)
    highest = lanes[0]
    for lane in range(1, LANES):
        highest = max(highest, lanes[lane])
    for j in range(first_vector, end_vector, LANES):
        store(scores, at + j, exp(add(load(scores, at + j), splat(-highest))))
    for j in range(first_vector, first):
        scores[at + j] = float32(0.0)
    for j in range(end, stop):
        scores[at + j] = float32(0.0)
    total = splat(float32(0.0))
    for j in range(first_vector, end_vector, LANES):
        total = add(total, load(scores, at + j))
    store(lanes, 0, total)
    total_of_lanes = lanes[0]
    for lane in range(1, LANES):
        total_of_lanes += lanes[lane]
    return total_of_lanes


@inner
def store_rows(
    geometry: Geometry,
    rows: RowArrays,
    heads_at: int,
    row_numbers: int,
    pages_at: int,
    first_row: int,
    end_row: int,
) -> None:
    """Writes the keys and values of rows to their slots. `heads_at`, `pages_at`: addresses;
    `row_numbers`: from one row of heads to the next."""
    heads = numba.carray(floats_at(heads_at), _ANY_LENGTH)
    pages = numba.carray(floats_at(pages_at), _ANY_LENGTH)
    num_kv, channels, size = geometry.num_kv, geometry.channels, geometry.page_size
    key_width, value_width = max(size, LANES), max(channels, LANES)
    part = channels * key_width + size * value_width
    first_key = geometry.per_kv * num_kv * channels
    for row in range(first_row, end_row):
        slot = rows.kv_slot_R[row]
        page, within = rows.tables_BW[rows.table_R[row], slot // size], slot % size
        for kv in range(num_kv):
            key = row * row_numbers + first_key + kv * channels
            value = key + num_kv * channels
            key_at = (page * num_kv + kv) * part + within
            value_at = key_at - within + channels * key_width + within * value_width
            for e in range(channels):
                pages[key_at + e * key_width] = heads[key + e]
                pages[value_at + e] = heads[value + e]


@inner
def _gather(
    geometry: Geometry,
    rows: RowArrays,
    row: int,
    pages: Floats,
    kv: int,
    first_key: int,
    num_keys: int,
    gathered: Floats,
) -> None:
    """Copies the keys from position `first_key` on of a tree's row, in the layout of a page."""
    num_kv, channels, size = geometry.num_kv, geometry.channels, geometry.page_size
    key_width, value_width = max(size, LANES), max(channels, LANES)
    key_numbers = channels * key_width
    part = key_numbers + size * value_width
    for j in range(num_keys):
        slot = first_key + j
        if slot >= rows.in_order_R[row]:
            slot = rows.branch_slots[rows.branch_R[row] + slot - rows.in_order_R[row]]
        page, within = rows.tables_BW[rows.table_R[row], slot // size], slot % size
        source = (page * num_kv + kv) * part
        source_value = source + key_numbers + within * value_width
        for e in range(channels):
            gathered[e * key_width + j] = pages[source + e * key_width + within]
            gathered[key_numbers + j * value_width + e] = pages[source_value + e]


@inner
def _end_of_group(rows: RowArrays, row: int, end_row: int, most_rows: int) -> int:
    """Returns the end of the rows from `row` on that share their keys: those of one request, or a
    single row of a tree."""
    if rows.in_order_R[row] <= rows.position_R[row]:
        return row + 1
    end = row + 1
    while (
        end < min(end_row, row + most_rows)
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
    kind: npt.NDArray[np.generic],
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
    heads = numba.carray(floats_at(heads_at), _ANY_LENGTH)
    pages = numba.carray(floats_at(pages_at), _ANY_LENGTH)
    num_kv, per_kv = geometry.num_kv, geometry.per_kv
    channels, size = geometry.channels, geometry.page_size
    key_width, value_width = max(size, LANES), max(channels, LANES)
    key_numbers = channels * key_width
    part = key_numbers + size * value_width
    longest = 0
    for row in range(first_row, end_row):
        longest = max(longest, rows.position_R[row] + 1)
    # Scores of one query, up to the end of its last page and of its last vector.
    distance = (longest + size - 1) // size * size + LANES
    most_rows = min(_MAX_QUERIES // per_kv, _MAX_SCORES // (distance * per_kv), end_row - first_row)
    most_rows = max(1, most_rows)
    queries = np.empty(most_rows * per_kv * channels, np.float32)
    scores = np.empty(most_rows * per_kv * distance, np.float32)
    sums = np.empty(most_rows * per_kv * value_width, np.float32)
    totals = np.empty(most_rows * per_kv, np.float32)
    lanes = np.empty(LANES, np.float32)
    gathered = np.zeros(part, np.float32)
    row = first_row
    while row < end_row:
        end = _end_of_group(rows, row, end_row, most_rows)
        num_queries = (end - row) * per_kv
        is_tree = rows.in_order_R[row] <= rows.position_R[row]
        table_W = rows.tables_BW[rows.table_R[row]]
        first_key, end_key = (
            _first_key(window, rows.position_R[row]),
            rows.position_R[end - 1] + 1,
        )
        first_page, end_page = first_key // size, (end_key + size - 1) // size
        for kv in range(first_kv, end_kv):
            for at in range(num_queries):
                source = (row + at // per_kv) * row_numbers
                source += (at % per_kv * num_kv + kv) * channels
                for e in range(channels):
                    queries[at * channels + e] = heads[source + e]
            for page in range(first_page, end_page):
                begin = page * size
                num_keys = min(size, end_key - begin)
                keys, keys_at = pages, (table_W[page] * num_kv + kv) * part
                if is_tree and begin + num_keys > rows.in_order_R[row]:
                    _gather(geometry, rows, row, pages, kv, begin, num_keys, gathered)
                    keys, keys_at = gathered, 0
                width = min(key_width, (num_keys + LANES - 1) // LANES * LANES)
                for left in range(0, width, 2 * LANES):
                    _add_product(
                        queries,
                        0,
                        channels,
                        num_queries,
                        keys,
                        keys_at,
                        key_width,
                        left,
                        width,
                        channels,
                        scores,
                        begin,
                        distance,
                        True,
                    )
            for at in range(num_queries):
                position, line = rows.position_R[row + at // per_kv], at * distance
                own_first = _first_key(window, position)
                _scale(scores, line + first_page * size, line + end_key, geometry.scale)
                if geometry.softcap > 0.0:
                    _cap(scores, line + first_page * size, line + end_key, geometry.softcap)
                totals[at] = _softmax(scores, line, own_first, position + 1, end_key, lanes)
                for j in range(first_key, own_first // LANES * LANES):
                    scores[line + j] = float32(0.0)
            # Page by page within columns: overlapping vectors add a page to each channel once.
            for left in range(0, value_width, 2 * LANES):
                for page in range(first_page, end_page):
                    begin = page * size
                    num_keys = min(size, end_key - begin)
                    values, values_at = pages, (table_W[page] * num_kv + kv) * part + key_numbers
                    if is_tree and begin + num_keys > rows.in_order_R[row]:
                        _gather(geometry, rows, row, pages, kv, begin, num_keys, gathered)
                        values, values_at = gathered, key_numbers
                    skipped = max(first_key - begin, 0)
                    _add_product(
                        scores,
                        begin + skipped,
                        distance,
                        num_queries,
                        values,
                        values_at + skipped * value_width,
                        value_width,
                        left,
                        value_width,
                        num_keys - skipped,
                        sums,
                        0,
                        value_width,
                        page == first_page,
                    )
            for at in range(num_queries):
                target = (row + at // per_kv) * mixed_numbers
                target += (at % per_kv * num_kv + kv) * channels
                inverse = float32(1.0) / totals[at]
                for e in range(channels):
                    mixed = sums[at * value_width + e] * inverse
                    store_one_input(kind, mixed_at, target + e, mixed)
        row = end
