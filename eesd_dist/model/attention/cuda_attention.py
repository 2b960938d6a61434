"""Attention over one layer's pages on a GPU: one launch stores, one attends all rows."""

import torch
from torch import Tensor

from eesd_dist.model.attention.rows import BLOCK_ROWS, PART, DeviceRows, RowPlan
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.cuda.attention_kernel import attend_kernel, merge_kernel
from eesd_dist.model.cuda.row_kernels import store_kernel
from eesd_dist.model.kv_layout import key_width, value_width

_FEWEST = 16
"""Smallest side of a product on tensor cores."""
_KEYS = 64
"""Keys of one block."""
_SPLIT_ROWS = 32
"""Up to this many rows, parts are computed in parallel: more rows fill a GPU by themselves."""


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads,
# P pages, K KV heads, X numbers of a page's part, S positions, C channels of a head as pairs, B
# blocks of rows.
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
            "PADDED_CHANNELS": max(_FEWEST, power_of_two(shape.head_dim)),
            "KEYS": _KEYS,
            "PART": PART,
            "enable_fp_fusion": False,
        }
        self._merging = {
            "NUM_HEADS": shape.num_queries,
            "CHANNELS": shape.head_dim,
            "PADDED_CHANNELS": max(_FEWEST, power_of_two(shape.head_dim)),
            "PART": PART,
            "enable_fp_fusion": False,
            "num_warps": 1,
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

    def attend_rows(self, rows: DeviceRows, heads_THE: Tensor) -> Tensor:
        """Attends all rows after `store`; zeros in padding rows."""
        if rows.blocks_B2 is not None:
            return self._attend(rows, heads_THE, blocks_B2=rows.blocks_B2)
        if rows.num_parts > 1 and rows.num_rows <= _SPLIT_ROWS:
            return self._attend_parts(rows, heads_THE)
        return self._attend(rows, heads_THE, blocks_B2=None)

    def _attend(self, rows: DeviceRows, heads_THE: Tensor, *, blocks_B2: Tensor | None) -> Tensor:
        num_programs, num_queries = rows.num_rows, self._shape.queries_per_kv
        if blocks_B2 is not None:
            num_programs, num_queries = len(blocks_B2), BLOCK_ROWS * num_queries
        mixed_TD = heads_THE.new_empty(rows.num_rows, self._width)
        self._launch(
            (num_programs, self._shape.num_kv_heads),
            rows,
            heads_THE,
            mixed_TD,
            blocks=blocks_B2,
            num_queries=num_queries,
        )
        return mixed_TD

    def _attend_parts(self, rows: DeviceRows, heads_THE: Tensor) -> Tensor:
        """Attends each part in a program of its own, then merges them."""
        shape, by_row = self._shape, (rows.num_rows, self._shape.num_queries, rows.num_parts)
        parts = heads_THE.new_empty(*by_row, shape.head_dim, dtype=torch.float32)
        weights = heads_THE.new_empty(*by_row, 2, dtype=torch.float32)
        self._launch(
            (rows.num_rows, shape.num_kv_heads, rows.num_parts),
            rows,
            heads_THE,
            parts,
            weights=weights,
            num_queries=shape.queries_per_kv,
        )
        mixed_TD = heads_THE.new_empty(rows.num_rows, self._width)
        merge_kernel[(rows.num_rows, shape.num_queries)](
            parts,
            weights,
            mixed_TD,
            rows.position_T,
            shape.window or 0,
            rows.num_parts,
            **self._merging,
        )
        return mixed_TD

    def _launch(
        self,
        grid: tuple[int, ...],
        rows: DeviceRows,
        heads_THE: Tensor,
        out: Tensor,
        *,
        num_queries: int,
        blocks: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        attend_kernel[grid](
            heads_THE,
            self._pages_PKX,
            out,
            out if weights is None else weights,
            rows.table_T if blocks is None else blocks,
            rows.table_T,
            rows.position_T,
            rows.in_order_T,
            rows.branch_T,
            rows.slots,
            self._shape.window or 0,
            self._shape.scale,
            self._shape.scores.softcap or 0.0,
            QUERIES=max(_FEWEST, power_of_two(num_queries)),
            num_warps=8 if num_queries > 64 else 4,
            HAS_BLOCKS=blocks is not None,
            IS_SPLIT=weights is not None,
            **self._attending,
        )

    @property
    def _width(self) -> int:
        return self._shape.num_queries * self._shape.head_dim


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
