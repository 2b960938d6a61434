"""Storage of keys and values in pages on a CPU.

Keys of a page are stored with the keys side by side, values with the channels side by side, so that
both products are chains over whole vectors. They are float32 or bfloat16: rounded once when they
are stored, and widened when they are read, also by rows of the pass that stores them. Where a width
is no multiple of the vector, the last vector overlaps the one before, and some lanes are computed
twice.

The functions are Python that Numba compiles. Independent of layers, plans and torch.
"""

from typing import NamedTuple

import numpy as np

from eesd_dist.backends.cpu.compiled import inner
from eesd_dist.backends.cpu.kernels.lanes import (
    floats,
    load,
    number_bytes,
    numbers,
    store_number,
    store_numbers,
)
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.kv_layout import LANES, RowArrays

_FLOAT_BYTES = 4
Stored = np.float32 | np.uint16
"""A zero. Its type is that of stored keys and values: float32, or uint16 for bfloat16."""


class Geometry(NamedTuple):
    """Sizes and factors that are the same for every row of a layer."""

    num_kv: int
    per_kv: int
    channels: int
    page_size: int
    scale: np.float32
    softcap: np.float32
    """0: scores are not capped."""
    stored: Stored

    @classmethod
    def of(cls, shape: AttentionShape, stored: Stored) -> "Geometry":
        return cls(
            num_kv=shape.num_kv_heads,
            per_kv=shape.queries_per_kv,
            channels=shape.head_dim,
            page_size=shape.page_size,
            scale=np.float32(shape.scale),
            softcap=np.float32(shape.scores.softcap or 0.0),
            stored=stored,
        )


@inner
def copy_numbers(stored: Stored, target_at: int, source_at: int, width: int) -> None:
    """Copies float32 numbers to stored ones; the last vector overlaps the one before."""
    if width < LANES:
        source = floats(source_at)
        for e in range(width):
            store_number(stored, target_at, e, source[e])
        return
    for e in range(0, width - LANES, LANES):
        store_numbers(stored, target_at, e, load(source_at, e))
    store_numbers(stored, target_at, width - LANES, load(source_at, width - LANES))


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
    heads = floats(heads_at)
    stored = geometry.stored
    num_kv, channels, size = geometry.num_kv, geometry.channels, geometry.page_size
    key_width, value_width = max(size, LANES), max(channels, LANES)
    kv_numbers = channels * key_width + size * value_width
    first_key = geometry.per_kv * num_kv * channels
    for row in range(first_row, end_row):
        slot = rows.kv_slot_R[row]
        page, within = rows.tables_BW[rows.table_R[row], slot // size], slot % size
        for kv in range(num_kv):
            key = row * row_numbers + first_key + kv * channels
            value = key + num_kv * channels
            key_at = (page * num_kv + kv) * kv_numbers + within
            value_at = key_at - within + channels * key_width + within * value_width
            for e in range(channels):
                store_number(stored, pages_at, key_at + e * key_width, heads[key + e])
            values_at = pages_at + number_bytes(stored) * value_at
            copy_numbers(stored, values_at, heads_at + _FLOAT_BYTES * value, channels)


@inner
def gather(
    geometry: Geometry,
    rows: RowArrays,
    row: int,
    pages_at: int,
    kv: int,
    first_key: int,
    num_keys: int,
    gathered_at: int,
) -> None:
    """Copies the keys and values from position `first_key` on of a tree's row, in the layout of a
    page."""
    pages = numbers(geometry.stored, pages_at)
    gathered = numbers(geometry.stored, gathered_at)
    num_kv, channels, size = geometry.num_kv, geometry.channels, geometry.page_size
    key_width, value_width = max(size, LANES), max(channels, LANES)
    key_numbers = channels * key_width
    kv_numbers = key_numbers + size * value_width
    for j in range(num_keys):
        slot = first_key + j
        if slot >= rows.in_order_R[row]:
            slot = rows.branch_slots[rows.branch_R[row] + slot - rows.in_order_R[row]]
        page, within = rows.tables_BW[rows.table_R[row], slot // size], slot % size
        source = (page * num_kv + kv) * kv_numbers
        source_value = source + key_numbers + within * value_width
        for e in range(channels):
            gathered[e * key_width + j] = pages[source + e * key_width + within]
            gathered[key_numbers + j * value_width + e] = pages[source_value + e]
