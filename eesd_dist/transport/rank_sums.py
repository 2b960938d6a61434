"""Sums over ranks whose bits depend on what the ranks hold, and on nothing else.

A library's all-reduce chooses its order of addition by message size, channels and topology, so that
a row's sum changes with the rows beside it as soon as three ranks take part (two ranks add once,
and a + b is b + a). Here every sum is taken in rank order, in float32 for narrower types, and
rounded once. `numerics: invariant` rests on it; a plane only has to move tensors.

Shapes: G ranks, N elements, W elements of one rank's share.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

WHOLE_BYTES = 256 * 1024
"""Up to here every rank gets everything from every other; above, each rank sums one share."""


class Exchange(Protocol):
    """What moves tensors between the ranks of one group."""

    def gathered(self, x_N: Tensor) -> Tensor:
        """[G, N] every rank's x, in rank order."""
        ...

    def swapped(self, x_GW: Tensor) -> Tensor:
        """[G, W] in row g what rank g had for this rank."""
        ...


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """parts[0] + parts[1] + ..., one after the other in float32 and rounded once; a new tensor.

    One addition per rank and never a reduction over an axis: on a GPU its order depends on shapes.
    """
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    running = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        running += part
    return running.to(dtype)


def sum_over_ranks(x: Tensor, exchange: Exchange, *, size: int) -> Tensor:
    """One exchange of everything, or shares swapped, summed and gathered; a new tensor."""
    flat_N = x.reshape(-1)
    if flat_N.nbytes <= WHOLE_BYTES:
        return sum_in_rank_order(exchange.gathered(flat_N).unbind()).view(x.shape)
    width = -(-flat_N.numel() // size)
    padded_N = functional.pad(flat_N, (0, width * size - flat_N.numel()))
    share_W = sum_in_rank_order(exchange.swapped(padded_N.view(size, width)).unbind())
    return exchange.gathered(share_W).view(-1).narrow(0, 0, flat_N.numel()).view(x.shape)


def bytes_of_sum(size_bytes: int, *, size: int) -> int:
    """Bytes that each rank sends, and receives, for a sum of so many bytes."""
    if size_bytes <= WHOLE_BYTES:
        return size_bytes * (size - 1)
    return 2 * size_bytes * (size - 1) // size
