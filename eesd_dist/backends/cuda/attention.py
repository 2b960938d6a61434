"""Attention over one layer's pages on a GPU: one launch stores, one attends all rows."""

import logging
import math
from collections.abc import Sequence
from functools import cache, partial

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from eesd_dist.backends.cuda.kernels.attention import attend_kernel, merge_kernel
from eesd_dist.backends.cuda.kernels.launches import launch_options
from eesd_dist.backends.cuda.kernels.rows import store_kernel
from eesd_dist.backends.cuda.tiles import (
    PART_BLOCKS,
    SPLIT_TILES,
    DeviceRows,
    RowTiles,
    packed_rows,
    single_tiles,
    tiles_of,
)
from eesd_dist.model.attention.rows import RowPlan, RowSegment, row_arrays
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.kv_layout import RowArrays, count_kv_numbers, key_width, value_width
from eesd_dist.model.slow_kernels import note_slow_kernel
from eesd_dist.page_table import PageTable

logger = logging.getLogger(__name__)

_FEWEST = 16
"""Smallest side of a product on tensor cores."""
_BLOCK_BYTES = 32 * 1024
"""Size of a block of keys: two of them and their values fit into the shared memory of a GPU."""
_MOST_KEYS = 128


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads,
# P pages, K KV heads, X numbers of a page's part, S positions, C channels of a head as pairs, B
# tiles of rows.
class CudaAttention:
    """Stores and attends rows; nothing is copied to the host."""

    def __init__(self, pages_PKX: Tensor, shape: AttentionShape) -> None:
        self._pages_PKX = pages_PKX
        self._shape = shape
        self.keys = keys_of_block(shape, pages_PKX.dtype)
        """Keys of one block."""
        padded_channels = max(_FEWEST, triton.next_power_of_2(shape.head_dim))
        layout = {
            "NUM_KV": shape.num_kv_heads,
            "CHANNELS": shape.head_dim,
            "PAGE_SIZE": shape.page_size,
            "KEY_NUMBERS": shape.head_dim * key_width(shape.page_size),
            "VALUE_WIDTH": value_width(shape.head_dim),
            **launch_options(pages_PKX.device),
        }
        merged = {
            "PADDED_CHANNELS": padded_channels,
            "KEYS": self.keys,
            "PART_BLOCKS": PART_BLOCKS,
            "enable_fp_fusion": False,
        }
        self._attending = {
            **layout,
            **merged,
            "PER_KV": shape.queries_per_kv,
            "HAS_SOFTCAP": shape.scores.softcap is not None,
        }
        self._merging = {
            **launch_options(pages_PKX.device),
            **merged,
            "NUM_HEADS": shape.num_queries,
            "CHANNELS": shape.head_dim,
            "num_warps": 1,
        }
        self._storing = {
            **layout,
            "NUM_QUERIES": shape.num_queries,
            "PAIRS": triton.next_power_of_2(shape.head_dim // 2),
        }
        # Scores are in units of log2(e), for exponentials of two.
        softcap, log2_e = shape.scores.softcap, math.log2(math.e)
        self._softcap = 0.0 if softcap is None else softcap * log2_e
        self._scale = shape.scale * log2_e * (1.0 if softcap is None else 2 / softcap)

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Stores the keys and values as they are; returns [T, D]."""
        heads_THE = heads_THE.contiguous()
        device_rows = self.placed(rows.arrays, num_padded=len(heads_THE))
        self.store(device_rows, heads_THE, None)
        return self.attend_rows(device_rows, heads_THE)

    def tiles(self, arrays: RowArrays, *, counts: Sequence[int] = ()) -> RowTiles:
        """Returns the tiles of these rows that this machine may use; `counts` as in `tiles_of`."""
        if not self.is_independent:
            return single_tiles(arrays, counts=counts)
        return tiles_of(
            arrays, queries_per_kv=self._shape.queries_per_kv, keys=self.keys, counts=counts
        )

    def placed(
        self, arrays: RowArrays, *, num_padded: int, tiles: RowTiles | None = None
    ) -> DeviceRows:
        """Uploads rows and tiles; None are those of `tiles`."""
        tiles = self.tiles(arrays) if tiles is None else tiles
        packed = torch.from_numpy(packed_rows(arrays, tiles, num_padded))
        return DeviceRows(packed.to(self._pages_PKX.device), num_padded, tiles.tiling)

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
        assert heads_THE.is_contiguous(), "the kernel reads one row after the other"
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
        """Attends all rows after `store`; padding rows have no meaning."""
        tiling, shape = rows.tiling, self._shape
        mixed_TD = heads_THE.new_empty(rows.num_rows, shape.num_queries * shape.head_dim)
        if not tiling.split_blocks:
            self._launch(rows, heads_THE, mixed_TD, weights=mixed_TD)
            return mixed_TD
        by_row = (rows.num_rows, shape.num_queries, tiling.num_splits)
        splits = heads_THE.new_empty(*by_row, shape.head_dim, dtype=torch.float32)
        weights = heads_THE.new_empty(*by_row, 2, dtype=torch.float32)
        self._launch(rows, heads_THE, splits, weights=weights)
        merge_kernel[(rows.num_rows, shape.num_queries)](
            splits,
            weights,
            mixed_TD,
            rows.position_T,
            shape.window or 0,
            tiling.num_splits,
            SPLIT_BLOCKS=tiling.split_blocks,
            **self._merging,
        )
        return mixed_TD

    @property
    def is_independent(self) -> bool:
        """True where rows have the same bits in tiles and splits as in a program of their own."""
        return checked_tiles(self._shape, self._pages_PKX.dtype, self._pages_PKX.device)

    def _launch(self, rows: DeviceRows, heads_THE: Tensor, out: Tensor, *, weights: Tensor) -> None:
        tiling, shape = rows.tiling, self._shape
        num_queries = tiling.rows * shape.queries_per_kv
        attend_kernel[(tiling.num_tiles, shape.num_kv_heads, tiling.num_splits)](
            heads_THE,
            self._pages_PKX,
            out,
            weights,
            rows.tiles_B8,
            rows.slots,
            shape.window or 0,
            self._scale,
            self._softcap,
            QUERIES=max(_FEWEST, triton.next_power_of_2(num_queries)),
            SPLIT_BLOCKS=tiling.split_blocks,
            num_warps=4,
            num_stages=2 if num_queries <= 2 * _FEWEST else 1,
            **self._attending,
        )


def keys_of_block(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Returns the keys of one block, a power of two."""
    row_bytes = max(_FEWEST, triton.next_power_of_2(shape.head_dim)) * dtype.itemsize
    return int(max(_FEWEST, min(_MOST_KEYS, _BLOCK_BYTES // row_bytes)))


@cache
def checked_tiles(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Compares tiles and splits once, on a random text, before a pass could use them."""
    length = 2 * PART_BLOCKS * keys_of_block(shape, dtype) + 150
    difference = tile_difference(shape, dtype, device, length=length)
    if difference is not None:
        logger.warning(
            "attention_self_check_failed difference=%s shape=%s dtype=%s", difference, shape, dtype
        )
        note_slow_kernel(f"attention without tiles ({difference})")
    return difference is None


@torch.inference_mode()
def tile_difference(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, length: int
) -> str | None:
    """Attends a text of `length` tokens in every way. Returns the first way in which a row has
    other bits than in a program of its own, or None."""
    generator = torch.Generator(device).manual_seed(20240603)
    num_heads = shape.num_queries + 2 * shape.num_kv_heads
    heads_THE = torch.randn(
        length, num_heads, shape.head_dim, generator=generator, device=device
    ).to(dtype)
    table = PageTable(range(-(-length // shape.page_size))[::-1])
    kv_numbers = count_kv_numbers(head_dim=shape.head_dim, page_size=shape.page_size)
    pages_PKX = torch.zeros(len(table), shape.num_kv_heads, kv_numbers, dtype=dtype, device=device)
    attention = CudaAttention(pages_PKX, shape)

    def arrays_from(start: int, count: int) -> RowArrays:
        return row_arrays([RowSegment(start, count, table)])

    text_arrays = arrays_from(0, length)
    device_rows = attention.placed(text_arrays, num_padded=length, tiles=single_tiles(text_arrays))
    attention.store(device_rows, heads_THE, None)
    single_TD = attention.attend_rows(device_rows, heads_THE)
    tiles = partial(tiles_of, queries_per_kv=shape.queries_per_kv, keys=attention.keys)
    # A long piece is in the largest tiles, from the second start on in other ones; a short piece is
    # in smaller tiles, and split.
    ranges = [(0, length), (5, length - 5)]
    ranges += [(length - count, count) for count in (1, 2, 5, 9, 16, SPLIT_TILES)]
    for start, count in ranges:
        arrays = arrays_from(start, count)
        chosen = tiles(arrays)
        candidates = [chosen]
        if chosen.tiling.num_splits > 1:
            candidates.append(
                RowTiles(chosen.tiling._replace(num_splits=1, split_blocks=0), *chosen[1:])
            )
            wide = -(-chosen.tiling.num_splits // PART_BLOCKS)
            candidates.append(
                RowTiles(
                    chosen.tiling._replace(num_splits=wide, split_blocks=PART_BLOCKS), *chosen[1:]
                )
            )
        for candidate in candidates:
            try:
                rows = attention.placed(arrays, num_padded=count, tiles=candidate)
                mixed_TD = attention.attend_rows(rows, heads_THE[start : start + count])
            except OutOfResources:  # a tile does not fit into this GPU's shared memory
                return f"{candidate.tiling} does not fit"
            if not torch.equal(mixed_TD, single_TD[start : start + count]):
                return f"{candidate.tiling} from row {start}"
    return None
