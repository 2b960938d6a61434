"""Attention over one layer's pages on a CPU where products are not compiled: one compiled call for
all rows."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.cpu.calls import call_in_threads, threads_for
from eesd_dist.backends.cpu.kernels.attention import attention_kernel
from eesd_dist.backends.cpu.kernels.kv_store import Geometry, Stored
from eesd_dist.backends.cpu.packed import kind_array
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention_shape import AttentionShape

_FLOAT32 = np.dtype(np.float32)
STORED: Mapping[torch.dtype, Stored] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
}
"""Types of keys and values, as kernels take them."""


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads,
# P pages, K KV heads, X numbers of a page's part.
class CpuAttention:
    """Stores and attends rows. No result depends on the number of threads."""

    def __init__(self, pages_PKX: Tensor, shape: AttentionShape) -> None:
        self._pages_PKX = pages_PKX
        self._width = shape.num_queries * shape.head_dim
        self._geometry = Geometry.of(shape, STORED[pages_PKX.dtype])
        self._window = shape.window or 0

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Returns [T, D]; zeros in padding rows."""
        heads_THE = heads_THE.detach()
        wide_THE = heads_THE.to(torch.float32).contiguous()
        mixed_TD = torch.zeros(len(wide_THE), self._width)
        call_in_threads(
            attention_kernel(),
            threads_for(int(rows.arrays.position_R.sum()) * self._width),
            kind_array(_FLOAT32),
            self._geometry,
            self._window,
            rows.arrays,
            wide_THE.data_ptr(),
            wide_THE[0].numel(),
            self._pages_PKX.data_ptr(),
            mixed_TD.data_ptr(),
            self._width,
        )
        return mixed_TD.to(heads_THE.dtype)
