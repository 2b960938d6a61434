"""The part of compiled calls that brings rows into their memory."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import float32
from torch import Tensor

from eesd_dist.backends.cpu.compiled import inner
from eesd_dist.backends.cpu.kernels.lanes import floats


# Shapes: R rows, C channels.
class Source(NamedTuple):
    """Rows in memory that is not changed."""

    at_R: npt.NDArray[np.int64]
    """Address of each."""
    num_channels: int
    is_bfloat16: bool
    """Else float32."""


def source_of(rows_RC: Tensor) -> Source:
    """Returns all rows of a tensor, float32 or bfloat16."""
    distance = rows_RC.stride(0) * rows_RC.itemsize
    at_R = rows_RC.data_ptr() + distance * np.arange(rows_RC.shape[0], dtype=np.int64)
    return Source(at_R, rows_RC.shape[1], rows_RC.dtype == torch.bfloat16)


@inner
def copy_rows(source: Source, x_at: int, x_bytes: int, width: int, first: int, end: int) -> None:
    """Copies rows [first, end) to rows of the same number at `x_at`, as float32, with zeros up to
    the width."""
    for row in range(first, end):
        x, y = floats(source.at_R[row]), floats(x_at + row * x_bytes)
        if source.is_bfloat16:
            halves, bits = x.view(np.uint16), y.view(np.uint32)
            for c in range(source.num_channels):
                bits[c] = np.uint32(np.uint32(halves[c]) << np.uint32(16))
        else:
            for c in range(source.num_channels):
                y[c] = x[c]
        for c in range(source.num_channels, width):
            y[c] = float32(0.0)
