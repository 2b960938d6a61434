"""Attention over one layer's pages by torch's operations: one row after the other, slowly.

For machines that only compare, such as a GPU machine without further packages. Every row has calls
of its own, so that no other row can change its bits.
"""

import torch
from torch import Tensor

from eesd_dist.model.attention.page_views import keys_in, values_in
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.elementwise import soft_capped


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads,
# P pages, K KV heads, G queries per KV head, S slots of a page, N keys, X numbers of a page's part.
class RowByRowAttention:
    """Stores and attends rows with torch's operations."""

    def __init__(self, pages_PKX: Tensor, shape: AttentionShape) -> None:
        head_dim, page_size = shape.head_dim, shape.page_size
        keys_PKES = keys_in(
            pages_PKX, head_dim=head_dim, page_size=page_size, form="keys by channel"
        )
        values_PKSE = values_in(pages_PKX, head_dim=head_dim, page_size=page_size)
        self._keys_PSKE = keys_PKES.permute(0, 3, 1, 2)
        self._values_PSKE = values_PKSE.permute(0, 2, 1, 3)
        self._shape = shape

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Returns [T, D]; zeros in padding rows."""
        num_queries, num_kv, arrays = self._shape.num_queries, self._shape.num_kv_heads, rows.arrays
        wide_THE = heads_THE.detach().float()
        keys_values_RHE = wide_THE[: rows.num_rows, num_queries:].to(self._keys_PSKE.dtype)
        own_R = self._places(rows, arrays.table_R, torch.from_numpy(arrays.kv_slot_R))
        self._keys_PSKE.index_put_(own_R, keys_values_RHE[:, :num_kv])
        self._values_PSKE.index_put_(own_R, keys_values_RHE[:, num_kv:])
        mixed_TD = wide_THE.new_zeros(len(wide_THE), num_queries * wide_THE.shape[-1])
        for row in range(rows.num_rows):
            queries_GKE = wide_THE[row, :num_queries].view(self._shape.queries_per_kv, num_kv, -1)
            mixed_TD[row] = self._attended(rows, row, queries_GKE).reshape(-1)
        return mixed_TD.to(heads_THE.dtype)

    def _attended(self, rows: RowPlan, row: int, queries_GKE: Tensor) -> Tensor:
        arrays = rows.arrays
        num_keys, in_order = int(arrays.position_R[row]) + 1, int(arrays.in_order_R[row])
        slots_N = torch.arange(num_keys)
        if in_order < num_keys:
            first = int(arrays.branch_R[row])
            branch = arrays.branch_slots[first : first + num_keys - in_order]
            slots_N[in_order:] = torch.from_numpy(branch)
        if self._shape.window is not None:
            slots_N = slots_N[-self._shape.window :]
        places_N = self._places(rows, arrays.table_R[row], slots_N)
        keys_KNE, values_KNE = (
            cached_PSKE[places_N].float().transpose(0, 1)
            for cached_PSKE in (self._keys_PSKE, self._values_PSKE)
        )
        scores_KGN = queries_GKE.transpose(0, 1) @ keys_KNE.transpose(1, 2) * self._shape.scale
        softcap = self._shape.scores.softcap
        if softcap is not None:
            scores_KGN = soft_capped(scores_KGN, softcap)
        mixed_KGE = scores_KGN.softmax(-1) @ values_KNE
        return mixed_KGE.transpose(0, 1)

    def _places(self, rows: RowPlan, table: object, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the page and the slot within it of KV slots, of one table or of one each."""
        pages = rows.arrays.tables_BW[table, (slots_N // self._shape.page_size).numpy()]  # type: ignore[index]
        return torch.from_numpy(pages).long(), (slots_N % self._shape.page_size).long()
