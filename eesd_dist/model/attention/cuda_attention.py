"""Attention over one layer's pages on a GPU: one launch stores, one attends all rows."""

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from eesd_dist.model.attention.rows import (
    BLOCK_ROWS,
    PART,
    DeviceRows,
    RowPlan,
    RowSegment,
    chain_blocks,
    num_parts,
    packed_rows,
    row_arrays,
)
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.cuda.attention_kernel import attend_kernel, merge_kernel
from eesd_dist.model.cuda.row_kernels import store_kernel
from eesd_dist.model.kv_layout import key_width, part_numbers, value_width
from eesd_dist.page_table import PageTable

logger = logging.getLogger(__name__)

_FEWEST = 16
"""Smallest side of a product on tensor cores."""
_KEYS = 64
"""Keys of one block."""
SPLIT_ROWS = 32
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
            "PADDED_CHANNELS": max(_FEWEST, triton.next_power_of_2(shape.head_dim)),
            "KEYS": _KEYS,
            "PART": PART,
            "enable_fp_fusion": False,
        }
        self._merging = {
            "NUM_HEADS": shape.num_queries,
            "CHANNELS": shape.head_dim,
            "PADDED_CHANNELS": max(_FEWEST, triton.next_power_of_2(shape.head_dim)),
            "PART": PART,
            "enable_fp_fusion": False,
            "num_warps": 1,
        }
        self._storing = {
            **layout,
            "NUM_QUERIES": shape.num_queries,
            "PAIRS": triton.next_power_of_2(shape.head_dim // 2),
        }

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Stores the keys and values as they are; returns [T, D]."""
        heads_THE = heads_THE.contiguous()
        self.store(rows.on_device, heads_THE, None)
        return self.attend_rows(rows.on_device, heads_THE)

    def store(
        self,
        rows: DeviceRows,
        heads_THE: Tensor,
        rotation_SC: Tensor | None,
        *,
        norm_HE: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        """Norms and rotates queries and keys in place, and writes the keys and values of all rows
        but padding. `norm_HE`: the weights of a `HeadNorm`."""
        store_kernel[(rows.num_rows, heads_THE.shape[1])](
            heads_THE,
            self._pages_PKX,
            heads_THE if rotation_SC is None else rotation_SC,
            heads_THE if norm_HE is None else norm_HE,
            norm_eps,
            rows.position_T,
            rows.kv_slot_T,
            rows.table_T,
            rows.slots,
            HAS_ROTATION=rotation_SC is not None,
            HAS_NORM=norm_HE is not None,
            num_warps=1,
            **self._storing,
        )

    def attend_rows(self, rows: DeviceRows, heads_THE: Tensor) -> Tensor:
        """Attends all rows after `store`; zeros in padding rows."""
        if rows.blocks_B2 is not None and self.ways.in_blocks:
            return self._attend_blocks(rows, heads_THE)
        if rows.num_parts > 1 and rows.num_rows <= SPLIT_ROWS and self.ways.in_parts:
            return self._attend_parts(rows, heads_THE)
        return self._attend(rows, heads_THE, blocks_B2=None)

    @property
    def ways(self) -> "Ways":
        """Which ways this machine may use."""
        return checked_ways(self._shape, self._pages_PKX.dtype, self._pages_PKX.device)

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

    def _attend_blocks(self, rows: DeviceRows, heads_THE: Tensor) -> Tensor:
        """Attends the rows of a block in one program."""
        return self._attend(rows, heads_THE, blocks_B2=rows.blocks_B2)

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
            QUERIES=max(_FEWEST, triton.next_power_of_2(num_queries)),
            num_warps=8 if num_queries > 64 else 4,
            HAS_BLOCKS=blocks is not None,
            IS_SPLIT=weights is not None,
            **self._attending,
        )

    @property
    def _width(self) -> int:
        return self._shape.num_queries * self._shape.head_dim


class Ways(NamedTuple):
    """Which ways to attend give a row the same bits as a program for each row."""

    in_blocks: bool
    in_parts: bool


@cache
def checked_ways(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Ways:
    """Compares the ways once, on a random text, before the first pass that could use one."""
    ways = compared_ways(shape, dtype, device, length=2 * PART + 150)
    if not all(ways):
        logger.warning("attention_self_check_failed ways=%s shape=%s dtype=%s", ways, shape, dtype)
    return ways


@torch.inference_mode()
def compared_ways(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, length: int
) -> Ways:
    """Attends a text of `length` tokens in every way."""
    generator = torch.Generator(device).manual_seed(20240603)
    num_heads = shape.num_queries + 2 * shape.num_kv_heads
    heads_THE = torch.randn(
        length, num_heads, shape.head_dim, generator=generator, device=device
    ).to(dtype)
    table = PageTable(range(-(-length // shape.page_size))[::-1])
    part = part_numbers(head_dim=shape.head_dim, page_size=shape.page_size)
    pages_PKX = torch.zeros(len(table), shape.num_kv_heads, part, dtype=dtype, device=device)
    attention = CudaAttention(pages_PKX, shape)

    def placed(start: int) -> DeviceRows:
        arrays = row_arrays([RowSegment(start, length - start, table)])
        return DeviceRows(
            torch.from_numpy(packed_rows(arrays, length - start)).to(device),
            length - start,
            num_parts=num_parts(arrays),
            blocks_B2=torch.from_numpy(chain_blocks(arrays)).to(device),
        )

    def is_same(attend: Callable[[DeviceRows, Tensor], Tensor], start: int) -> bool:
        try:
            return torch.equal(attend(placed(start), heads_THE[start:]), alone_TD[start:])
        except OutOfResources:  # a block does not fit into this GPU's shared memory
            return False

    every = placed(0)
    attention.store(every, heads_THE, None)
    alone_TD = attention._attend(every, heads_THE, blocks_B2=None)
    return Ways(
        # From the second start on, rows are at other places of their blocks.
        in_blocks=all(is_same(attention._attend_blocks, start) for start in (0, 5)),
        in_parts=is_same(attention._attend_parts, length - min(length, SPLIT_ROWS)),
    )
