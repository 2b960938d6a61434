"""Attention over one layer's pages on a GPU: stores with torch, attends with the Triton kernel."""

from torch import Tensor

from eesd_dist.model.attention.cuda_kernel import attend_kernel
from eesd_dist.model.attention.page_views import keys_in, values_in
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.kernels import pad_rows
from eesd_dist.model.kv_layout import key_width, value_width

_FEWEST = 16
"""Smallest side of a product on tensor cores."""
_KEYS = 64
"""Keys of one block."""


# Shapes: T rows, R rows without padding, H heads of all kinds, E channels of a head, D channels of
# all query heads, P pages, K KV heads, X numbers of a page's part.
class CudaAttention:
    """Stores and attends rows; nothing is copied to the host."""

    def __init__(self, pages_PKX: Tensor, shape: AttentionShape) -> None:
        self._pages_PKX = pages_PKX
        head_dim, page_size = shape.head_dim, shape.page_size
        keys_PKES = keys_in(pages_PKX, head_dim=head_dim, page_size=page_size)
        values_PKSE = values_in(pages_PKX, head_dim=head_dim, page_size=page_size)
        self._keys_PSKE = keys_PKES.permute(0, 3, 1, 2)
        self._values_PSKE = values_PKSE.permute(0, 2, 1, 3)
        self._shape = shape
        self._constants = {
            "NUM_KV": shape.num_kv_heads,
            "PER_KV": shape.queries_per_kv,
            "CHANNELS": head_dim,
            "PAGE_SIZE": page_size,
            "KEY_WIDTH": key_width(page_size),
            "VALUE_WIDTH": value_width(head_dim),
            "HAS_SOFTCAP": shape.scores.softcap is not None,
            "QUERIES": _power_of_two(shape.queries_per_kv),
            "PADDED_CHANNELS": _power_of_two(head_dim),
            "KEYS": _KEYS,
        }

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Returns [T, D]; zeros in padding rows."""
        heads_THE = heads_THE.contiguous()
        self._store(rows, heads_THE)
        mixed_RD = self.attend_rows(rows, heads_THE, first=0, count=rows.num_rows)
        return pad_rows(mixed_RD, heads_THE.shape[0])

    def attend_rows(self, rows: RowPlan, heads_THE: Tensor, *, first: int, count: int) -> Tensor:
        """Attends rows [first, first + count) after `_store`."""
        mixed_RD = heads_THE.new_empty(count, self._shape.num_queries * self._shape.head_dim)
        placed = rows.on_device
        attend_kernel[(count, self._shape.num_kv_heads)](
            heads_THE.narrow(0, first, count),
            self._pages_PKX,
            mixed_RD,
            placed.tables_BW,
            placed.table_R.narrow(0, first, count),
            placed.position_R.narrow(0, first, count),
            placed.in_order_R.narrow(0, first, count),
            placed.branch_R.narrow(0, first, count),
            placed.branch_slots,
            placed.tables_BW.shape[1],
            self._shape.window or 0,
            self._shape.scale,
            self._shape.scores.softcap or 0.0,
            **self._constants,
        )
        return mixed_RD

    def _store(self, rows: RowPlan, heads_THE: Tensor) -> None:
        """Writes the keys and values of all rows but padding."""
        placed = rows.on_device
        first, count = self._shape.num_queries, 2 * self._shape.num_kv_heads
        stored_RHE = heads_THE.narrow(0, 0, rows.num_rows).narrow(1, first, count)
        keys_RKE, values_RKE = stored_RHE.chunk(2, dim=1)
        slots = (placed.page_R, placed.within_R)
        self._keys_PSKE.index_put_(slots, keys_RKE)
        self._values_PSKE.index_put_(slots, values_RKE)


def _power_of_two(size: int) -> int:
    return max(_FEWEST, 1 << (size - 1).bit_length())
