"""Attention over one layer's pages on a CPU: calls the compiled kernel, in one or more threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from eesd_dist.model.attention.cpu_kernel import Geometry, attend_kernel
from eesd_dist.model.attention.layout import LANES, RowArrays
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention.shape import AttentionShape

_WORTH_A_THREAD = 1 << 21
"""Products of a query and a key's channel per thread: below, a thread costs more than it saves."""


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads,
# P pages, K KV heads, X numbers of a page's part.
class CpuAttention:
    """Stores and attends rows. No result depends on the number of threads."""

    def __init__(self, pages_PKX: Tensor, shape: AttentionShape) -> None:
        self._pages = pages_PKX.view(-1).numpy()
        self._width = shape.num_queries * shape.head_dim
        self._geometry = Geometry(
            num_kv=shape.num_kv_heads,
            per_kv=shape.queries_per_kv,
            channels=shape.head_dim,
            page_size=shape.page_size,
            window=shape.window or 0,
            scale=np.float32(shape.scale),
            softcap=np.float32(shape.scores.softcap or 0.0),
        )
        ready_kernel()  # compiled while weights are loaded, not by the first request

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Returns [T, D]; zeros in padding rows."""
        heads = heads_THE.detach().to(torch.float32).contiguous().view(-1).numpy()
        mixed_TD = torch.zeros(heads_THE.shape[0], self._width)
        mixed = mixed_TD.view(-1).numpy()
        num_rows, arrays = rows.num_rows, rows.arrays
        num_parts = self._num_parts(rows)
        kernel = ready_kernel()
        if num_parts == 1:
            kernel(self._geometry, arrays, heads, self._pages, mixed, 0, num_rows, 0, num_rows)
        else:
            kernel(self._geometry, arrays, heads, self._pages, mixed, 0, num_rows, 0, 0)
            bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
            waiting = [
                _threads(num_parts).submit(
                    kernel, self._geometry, arrays, heads, self._pages, mixed, 0, 0, first, end
                )
                for first, end in pairwise(bounds)
            ]
            for part in waiting:
                part.result()
        return mixed_TD if heads_THE.dtype == torch.float32 else mixed_TD.to(heads_THE.dtype)

    def _num_parts(self, rows: RowPlan) -> int:
        num_threads = torch.get_num_threads()
        if num_threads == 1:
            return 1
        num_products = int(rows.arrays.position_R.sum()) * self._width
        return max(1, min(num_threads, rows.num_rows, num_products // _WORTH_A_THREAD))


@cache
def ready_kernel() -> Callable[..., None]:
    """Returns the kernel, which has been called once: Numba compiles at the first call."""
    kernel = attend_kernel()
    geometry = Geometry(1, 1, LANES, LANES, 0, np.float32(1.0), np.float32(0.0))
    none, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    rows = RowArrays(np.zeros((1, 1), np.int32), none, none, none, none, none, none)
    kernel(geometry, rows, numbers, numbers, numbers, 0, 0, 0, 0)
    return kernel


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix="attention")
