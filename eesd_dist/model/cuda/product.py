"""Products with weight matrices of 16-bit numbers on a GPU; their tiles follow from their shape."""

from typing import NamedTuple

import triton
from torch import Tensor

from eesd_dist.model.cuda.product_kernel import product_kernel

_PROGRAMS = 128
"""A call is split into this many programs where it can be: about the multiprocessors of a GPU."""


MOST_ROWS = 801
"""Row counts above this one have the same tile."""


class Tile(NamedTuple):
    """Rows, output channels and input channels of a step, and how a program runs."""

    rows: int
    channels: int
    depth: int
    warps: int
    stages: int


_SHORT = (Tile(16, 64, 128, 4, 4), Tile(16, 32, 128, 4, 5), Tile(16, 16, 256, 4, 4))
_MIDDLE = (Tile(64, 64, 64, 4, 4), Tile(64, 32, 128, 4, 4))
_LONG = (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4))


# Shapes: M rows, I input channels, O output channels.
class TiledProduct:
    """x_MI -> x_MI @ weight_OI.T + bias_O, in the type of x, for any number of rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI = weight_OI.contiguous()
        self._bias_O = bias_O

    def __call__(self, x_MI: Tensor) -> Tensor:
        x_MI = x_MI.contiguous()
        (num_rows, num_in), num_out = x_MI.shape, self._weight_OI.shape[0]
        y_MO = x_MI.new_empty(num_rows, num_out)
        tile = tile_for(num_rows, num_out)
        product_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.channels))](
            x_MI,
            self._weight_OI,
            self._weight_OI if self._bias_O is None else self._bias_O,
            y_MO,
            num_rows,
            num_out,
            num_in,
            HAS_BIAS=self._bias_O is not None,
            IS_EVEN=num_in % tile.depth == 0,
            ROWS=tile.rows,
            CHANNELS=tile.channels,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return y_MO


def tile_for(num_rows: int, num_out: int) -> Tile:
    """Returns the widest tile that leaves enough programs. Long calls have the tile of a shorter
    one, so that a few row counts have every tile of a matrix."""
    num_rows = min(num_rows, MOST_ROWS)
    tiles = _SHORT if num_rows <= 16 else _MIDDLE if num_rows <= 64 else _LONG
    for tile in tiles:
        if triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.channels) >= _PROGRAMS:
            return tile
    return tiles[-1]
