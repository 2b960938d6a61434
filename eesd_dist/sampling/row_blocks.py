"""Divides the rows of a matrix into blocks that are processed one after the other.

On a CPU the intermediate results of a block stay in its cache: 64 rows of 128k columns at once take
five times as long as 64 single rows.
"""

from collections.abc import Sequence

import torch

_ELEMENTS_AT_ONCE = 1 << 17


def row_blocks(shape: Sequence[int], device: torch.device) -> list[slice]:
    """Returns consecutive slices of the rows of a matrix; all rows at once on a GPU."""
    num_rows, num_columns = shape
    if num_rows * num_columns <= _ELEMENTS_AT_ONCE or device.type != "cpu":
        return [slice(0, num_rows)]
    step = max(1, _ELEMENTS_AT_ONCE // num_columns)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
