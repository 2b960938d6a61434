"""Sums over ranks with bits that depend on the ranks' values and on nothing else.

A library's all-reduce chooses its order of addition by message size, channels and topology, so a
row's sum changes with the other rows of the message as soon as three ranks take part (two ranks add
once, and a + b is b + a). Here every sum is taken in pairs, in float32 for narrower types, and
rounded once, as `numerics: invariant` needs: ranks 0 and 1, ranks 2 and 3, then those two sums, and
so on; what has no neighbour goes on as it is. A node of 2^k ranks that begins at a multiple of 2^k
has a part of this sum to itself. A plane only has to move tensors.

Shapes: G ranks, N elements, W elements of one rank's share.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.transport.counts import WHOLE_BYTES

SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16, torch.float32)


class Exchange(Protocol):
    """Moves tensors between the ranks of one group."""

    def gathered(self, x_N: Tensor) -> Tensor:
        """Returns every rank's x, [G, N], in rank order."""
        ...

    def swapped(self, x_GW: Tensor) -> Tensor:
        """Returns [G, W]: in row g what rank g sent to this rank."""
        ...

    def summed(self, x_GN: Tensor) -> Tensor:
        """Returns `pairwise_sum` of the rows [N]."""
        ...


def pairwise_sum(summands: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the ranks' tensors as a new one, added in pairs in float32 and rounded
    once.

    One addition per rank, never a reduction over an axis: the order of that depends on shapes on a
    GPU.
    """
    dtype = summands[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return _wide_sum(summands, wide).to(dtype)


def _wide_sum(summands: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    if len(summands) == 1:
        return summands[0].to(wide, copy=True)
    half = 1 << (len(summands) - 1).bit_length() - 1
    left, right = summands[:half], summands[half:]
    return _wide_sum(left, wide).add_(right[0] if len(right) == 1 else _wide_sum(right, wide))


def sum_over_ranks(x: Tensor, exchange: Exchange, *, size: int) -> Tensor:
    """Returns the sum as a new tensor: by one exchange of all data, or, above WHOLE_BYTES, by
    swapping, summing and gathering shares."""
    flat_N = x.reshape(-1)
    if size == 2 or flat_N.nbytes <= WHOLE_BYTES:
        return exchange.summed(exchange.gathered(flat_N)).view(x.shape)
    width = -(-flat_N.numel() // size)
    padded_N = functional.pad(flat_N, (0, width * size - flat_N.numel()))
    share_W = exchange.summed(exchange.swapped(padded_N.view(size, width)))
    return exchange.gathered(share_W).view(-1).narrow(0, 0, flat_N.numel()).view(x.shape)
