"""Attention over one layer's pages on a GPU: one launch stores, one attends all rows."""

import torch
from torch import Tensor

from eesd_dist.model.attention.rows import DeviceRows, RowPlan
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.cuda.attention_kernel import attend_kernel
from eesd_dist.model.cuda.row_kernels import store_kernel
from eesd_dist.model.kv_layout import key_width, value_width

_FEWEST = 16
"""Smallest side of a product on tensor cores."""
_KEYS = 64
"""Keys of one block."""


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads, P pages,
# K KV heads, X numbers of a page's part, S positions, C channels of a head as pairs.
class CudaAttention:
    """Stores and attends rows; nothing is copied to the host."""

    def __init__(self, pages_PKX: Tensor, shape: AttentionShape) -> None:
        self._pages_PKX = pages_PKX
        self._shape = shape
        layout = {
            "NUM_KV": shape.num_kv_heads,
            "CHANNELS": shape.head_dim,
            "PAGE_SIZE": shape.page_size,
            "KEY_WIDTH": key_width(shape.page_size),
            "VALUE_WIDTH": value_width(shape.head_dim),
        }
        self._attending = {
            **layout,
            "PER_KV": shape.queries_per_kv,
            "HAS_SOFTCAP": shape.scores.softcap is not None,
            "QUERIES": max(_FEWEST, power_of_two(shape.queries_per_kv)),
            "PADDED_CHANNELS": max(_FEWEST, power_of_two(shape.head_dim)),
            "KEYS": _KEYS,
        }
        self._storing = {
            **layout,
            "NUM_QUERIES": shape.num_queries,
            "PAIRS": power_of_two(shape.head_dim // 2),
        }

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Stores the keys and values as they are; returns [T, D]."""
        heads_THE = heads_THE.contiguous()
        self.store(rows.on_device, heads_THE, None)
        return self.attend_rows(rows.on_device, heads_THE)

    def store(self, rows: DeviceRows, heads_THE: Tensor, rotation_SC: Tensor | None) -> None:
        """Rotates queries and keys in place, and writes the keys and values of all rows but
        padding."""
        store_kernel[(rows.num_rows, heads_THE.shape[1])](
            heads_THE,
            self._pages_PKX,
            heads_THE if rotation_SC is None else rotation_SC,
            rows.position_T,
            rows.kv_slot_T,
            rows.table_T,
            rows.slots,
            HAS_ROTATION=rotation_SC is not None,
            num_warps=1,
            **self._storing,
        )

    def attend_rows(
        self, rows: DeviceRows, heads_THE: Tensor, *, first: int = 0, count: int | None = None
    ) -> Tensor:
        """Attends rows [first, first + count) after `store`; zeros in padding rows."""
        count = rows.num_rows - first if count is None else count
        mixed_TD = heads_THE.new_empty(count, self._shape.num_queries * self._shape.head_dim)
        attend_kernel[(count, self._shape.num_kv_heads)](
            heads_THE.narrow(0, first, count),
            self._pages_PKX,
            mixed_TD,
            rows.table_T.narrow(0, first, count),
            rows.position_T.narrow(0, first, count),
            rows.in_order_T.narrow(0, first, count),
            rows.branch_T.narrow(0, first, count),
            rows.slots,
            self._shape.window or 0,
            self._shape.scale,
            self._shape.scores.softcap or 0.0,
            **self._attending,
        )
        return mixed_TD


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
