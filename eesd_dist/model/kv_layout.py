"""Layout of keys and values in a page, and of a pass's rows, as the kernels read them.

A page has one part for each KV head: its keys, then its values with one row per slot. Keys by
channel, as on a CPU, have one row per channel, so that those of the page are side by side, and rows
are at least one vector wide; keys by slot, as on a GPU, have rows as wide as the head.
"""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

PageForm = Literal["keys by channel", "keys by slot"]
"""Form of a page. Ranks with other forms do not exchange pages."""
LANES = 16
"""Numbers in one vector of the CPU kernel."""


def key_width(page_size: int) -> int:
    """Returns the numbers in a row of keys."""
    return max(page_size, LANES)


def value_width(head_dim: int) -> int:
    """Returns the numbers in a row of values."""
    return max(head_dim, LANES)


def count_kv_numbers(*, head_dim: int, page_size: int) -> int:
    """Returns the numbers of one KV head's part of a page."""
    return head_dim * key_width(page_size) + page_size * value_width(head_dim)


# Shapes: R rows, B page tables, W pages of the longest one.
class RowArrays(NamedTuple):
    """Which keys each row sees, and where its own are stored."""

    tables_BW: Ints
    """Page tables; the numbers after a table's end have no meaning."""
    table_R: Ints
    position_R: Ints
    """The row sees one key for each position up to its own."""
    kv_slot_R: Ints
    in_order_R: Ints
    """Number of a row's keys at the KV slot of their position: all, but for a tree."""
    branch_R: Ints
    """Index in `branch_slots` where a row's other keys begin."""
    branch_slots: Ints
    """KV slots in order of position."""


_NONE = np.zeros(0, np.int32)
NO_ROWS = RowArrays(np.zeros((1, 1), np.int32), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
