"""Sums over ranks with bits that depend on the ranks' values and on nothing else.

A library's all-reduce chooses its order of addition by message size, channels and topology, so a
row's sum changes with the other rows of the message as soon as three ranks take part (two ranks add
once, and a + b is b + a). Here every sum is taken in rank order, in float32 for narrower types, and
rounded once, as `numerics: invariant` needs. A plane only has to move tensors.

Shapes: G ranks, N elements, W elements of one rank's share.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.transport.counts import WHOLE_BYTES


class Exchange(Protocol):
    """Moves tensors between the ranks of one group."""

    def gathered(self, x_N: Tensor) -> Tensor:
        """Returns every rank's x, [G, N], in rank order."""
        ...

    def swapped(self, x_GW: Tensor) -> Tensor:
        """Returns [G, W]: in row g what rank g sent to this rank."""
        ...


def sum_in_rank_order(summands: Sequence[Tensor]) -> Tensor:
    """Returns parts[0] + parts[1] + ..., added in this order in float32 and rounded once.

    A new tensor. One addition per rank, never a reduction over an axis: the order of that depends
    on shapes on a GPU.
    """
    dtype = summands[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    running = summands[0].to(wide, copy=True)
    for summand in summands[1:]:
        running += summand
    return running.to(dtype)


def sum_over_ranks(x: Tensor, exchange: Exchange, *, size: int) -> Tensor:
    """Returns the sum as a new tensor: by one exchange of all data, or, above WHOLE_BYTES, by
    swapping, summing and gathering shares."""
    flat_N = x.reshape(-1)
    if flat_N.nbytes <= WHOLE_BYTES:
        return sum_in_rank_order(exchange.gathered(flat_N).unbind()).view(x.shape)
    width = -(-flat_N.numel() // size)
    padded_N = functional.pad(flat_N, (0, width * size - flat_N.numel()))
    share_W = sum_in_rank_order(exchange.swapped(padded_N.view(size, width)).unbind())
    return exchange.gathered(share_W).view(-1).narrow(0, 0, flat_N.numel()).view(x.shape)
