"""Products with weight matrices of 16-bit numbers on a GPU; their tiles follow from their shape.

The tiles of a Hopper were chosen by measurement on an H200
(docs/benchmarks/2026-11-27-gpu-h200.json): the candidates of a row count differ in their
shape, and the one that leaves the fewest multiprocessors without work in its last wave is taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eesd_dist.backends.cuda.kernels.launches import is_hopper, launch_options
from eesd_dist.backends.cuda.kernels.product import descriptor_product_kernel, product_kernel

_PROGRAMS = 128
"""A call is split into this many programs where it can be: about the multiprocessors of a GPU."""
_MULTIPROCESSORS = 132
"""Multiprocessors of a Hopper: a constant, so that a tile never depends on the machine."""


_ROW_COUNTS = (16, *range(64, 641, 64), 801)
"""Calls have the tile of the next larger count, longer ones that of the last, so that a few checked
row counts have every tile of a matrix."""


class Tile(NamedTuple):
    """Rows, output channels and input channels of a step, and how a program runs."""

    rows: int
    channels: int
    depth: int
    warps: int
    stages: int
    slowness: float = 1.0
    """Time of as many numbers, compared with the first candidate."""


_SHORT = (Tile(16, 64, 128, 4, 4), Tile(16, 32, 128, 4, 5), Tile(16, 16, 256, 4, 4))
_MIDDLE = (Tile(64, 64, 64, 4, 4), Tile(64, 32, 128, 4, 4))
_LONG = (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4))

_HOPPER_SHORT = (
    Tile(16, 64, 256, 4, 3),
    Tile(16, 32, 256, 2, 6, 1.15),
    Tile(16, 16, 512, 2, 3, 1.25),
)
_HOPPER_MIDDLE = (
    Tile(64, 128, 128, 4, 4),
    Tile(64, 64, 128, 4, 5, 1.05),
    Tile(64, 32, 128, 4, 5, 1.2),
)
_HOPPER_LONG = (
    Tile(128, 128, 64, 8, 3),
    Tile(64, 128, 128, 4, 4, 1.2),
    Tile(64, 64, 128, 4, 5, 1.35),
)
_HOPPER_LONGEST = (
    Tile(64, 256, 64, 4, 5),
    Tile(64, 128, 64, 4, 4, 1.2),
    Tile(64, 64, 128, 4, 5, 1.35),
)


# Shapes: M rows, I input channels, O output channels.
class TiledProduct:
    """x_MI -> x_MI @ weight_OI.T + bias_O, in the type of x, for any number of rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI = weight_OI.contiguous()
        self._bias_O = bias_O
        self._is_hopper = is_hopper(weight_OI.device)
        # The accelerator copies rows that begin at multiples of 16 bytes.
        self._has_descriptors = self._is_hopper and weight_OI.shape[1] % 8 == 0
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def __call__(self, x_MI: Tensor) -> Tensor:
        x_MI = x_MI.contiguous()
        (num_rows, num_in), num_out = x_MI.shape, self._weight_OI.shape[0]
        y_MO = x_MI.new_empty(num_rows, num_out)
        tile = tile_for(num_rows, num_out, is_hopper=self._is_hopper)
        grid = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.channels)
        sizes = num_rows, num_out, num_in
        options = {
            "HAS_BIAS": self._bias_O is not None,
            "ROWS": tile.rows,
            "CHANNELS": tile.channels,
            "DEPTH": tile.depth,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **launch_options(x_MI.device),
        }
        bias = self._weight_OI if self._bias_O is None else self._bias_O
        if self._has_descriptors and tile.rows > 16:
            x = TensorDescriptor.from_tensor(x_MI, [tile.rows, tile.depth])
            descriptor_product_kernel[grid](
                x, self._descriptor(tile), bias, y_MO, *sizes, **options
            )
        else:
            product_kernel[grid](
                x_MI,
                self._weight_OI,
                bias,
                y_MO,
                *sizes,
                IS_EVEN=num_in % tile.depth == 0,
                **options,
            )
        return y_MO

    def _descriptor(self, tile: Tile) -> TensorDescriptor:
        block = (tile.channels, tile.depth)
        if block not in self._descriptors:
            descriptor = TensorDescriptor.from_tensor(self._weight_OI, list(block))
            self._descriptors[block] = descriptor
        return self._descriptors[block]


def tile_for(num_rows: int, num_out: int, *, is_hopper: bool = False) -> Tile:
    """Returns the tile that suits a call."""
    num_rows = next((count for count in _ROW_COUNTS if count >= num_rows), _ROW_COUNTS[-1])
    if is_hopper:
        candidates = next(
            (
                candidates
                for max_rows, candidates in (
                    (16, _HOPPER_SHORT),
                    (64, _HOPPER_MIDDLE),
                    (128, _HOPPER_LONG),
                )
                if num_rows <= max_rows
            ),
            _HOPPER_LONGEST,
        )
        return _fewest_waves(candidates, num_rows, num_out)
    tiles = _SHORT if num_rows <= 16 else _MIDDLE if num_rows <= 64 else _LONG
    for tile in tiles:
        if _programs(tile, num_rows, num_out) >= _PROGRAMS:
            return tile
    return tiles[-1]


def _fewest_waves(tiles: Sequence[Tile], num_rows: int, num_out: int) -> Tile:
    """Returns the tile with the least time of all waves of programs."""

    def time_of(tile: Tile) -> float:
        waves: int = triton.cdiv(_programs(tile, num_rows, num_out), _MULTIPROCESSORS)
        return waves * tile.rows * tile.channels * tile.slowness

    return min(tiles, key=time_of)


def _programs(tile: Tile, num_rows: int, num_out: int) -> int:
    programs: int = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.channels)
    return programs
