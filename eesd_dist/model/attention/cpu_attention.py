"""Attention over one layer's pages on a CPU where products are not compiled: one compiled call for
all rows."""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.compiled import kernel
from eesd_dist.model import cpu, kv_layout
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.cpu.attention import Geometry, attend_rows, store_rows
from eesd_dist.model.cpu.calls import call_in_threads, threads_for
from eesd_dist.model.cpu.packed import kind_array
from eesd_dist.model.cpu.products import Kind, thread_range
from eesd_dist.model.cpu.threads import wait
from eesd_dist.model.kv_layout import RowArrays

_FLOAT32 = np.dtype(np.float32)


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads,
# P pages, K KV heads, X numbers of a page's part.
class CpuAttention:
    """Stores and attends rows. No result depends on the number of threads."""

    def __init__(self, pages_PKX: Tensor, shape: AttentionShape) -> None:
        self._pages_PKX = pages_PKX
        self._width = shape.num_queries * shape.head_dim
        self._geometry = Geometry.of(shape)
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


def _attend(
    kind: Kind,
    geometry: Geometry,
    window: int,
    rows: RowArrays,
    heads_at: int,
    row_numbers: int,
    pages_at: int,
    mixed_at: int,
    mixed_numbers: int,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> None:
    """Stores the keys and values of all rows, then attends them."""
    first, end = thread_range(len(rows.position_R), thread, num_threads)
    store_rows(geometry, rows, heads_at, row_numbers, pages_at, first, end)
    wait(counters, num_threads)
    attend_rows(
        kind,
        geometry,
        window,
        rows,
        heads_at,
        row_numbers,
        pages_at,
        mixed_at,
        mixed_numbers,
        first,
        end,
        0,
        geometry.num_kv,
    )


@cache
def attention_kernel() -> Callable[..., None]:
    return kernel(_attend, cpu, kv_layout)
