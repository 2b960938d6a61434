"""Splits one stage's weights among its tensor-parallel ranks.

Heads, intermediate channels and vocabulary are split into contiguous runs, one per rank. Has the
only collective of a layer, the sum after a row-split product, and the join after a column-split
one. Does not depend on a backend; a group of one needs none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.model.degrees import kv_heads_of, require_degree
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import TensorGroup

# Shapes: T rows, O channels out.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a model that one rank holds."""

    rank: int
    size: int
    kv_heads: range
    """Key-value heads of the rank: one that several ranks hold where there are more ranks than
    heads."""
    heads: range
    """The query heads that belong to `kv_heads`; of a shared one, this rank's part of them."""
    channels: range
    """Channels of the intermediate size."""
    vocabulary: range

    @property
    def queries_per_kv(self) -> int:
        return len(self.heads) // len(self.kv_heads)

    @property
    def adds_bias(self) -> bool:
        """True if this rank adds the bias of a row-split product, which is summed over ranks."""
        return self.rank == 0

    @classmethod
    def of(cls, spec: ModelSpec, *, rank: int, size: int) -> "Shard":
        """Raises ConfigError for a degree that does not fit."""
        require_degree(
            size,
            model=spec.architecture,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            num_channels=spec.intermediate_size,
            norms_heads_jointly=spec.traits.joint_qk_norm,
        )
        return cls(
            rank=rank,
            size=size,
            kv_heads=kv_heads_of(rank, size, num_kv_heads=spec.num_kv_heads),
            heads=rank_range(spec.num_heads, rank, size),
            channels=rank_range(spec.intermediate_size, rank, size),
            vocabulary=rank_range(spec.vocab_size, rank, size),
        )


def rank_range(count: int, rank: int, size: int) -> range:
    """Returns a rank's contiguous part of `count`; sizes of parts differ by one at most."""
    return range(rank * count // size, (rank + 1) * count // size)


def summed_over_ranks(x_TO: Tensor, group: TensorGroup) -> Tensor:
    """Sums a row-split product over the ranks, in the same order on every rank."""
    return x_TO if group.size == 1 else group.all_reduce(x_TO)


def joined_over_ranks(x_TO: Tensor, group: TensorGroup, *, count: int) -> Tensor:
    """Returns all `count` columns of a matrix of which each rank has its `rank_range`.

    Ranks exchange equal shapes, so that a shorter part is padded for the exchange.
    """
    if group.size == 1:
        return x_TO
    widths = [len(rank_range(count, rank, group.size)) for rank in range(group.size)]
    padded_TO = functional.pad(x_TO, (0, max(widths) - widths[group.rank]))
    shards = group.all_gather(padded_TO)
    return torch.cat(
        [shard.narrow(-1, 0, width) for shard, width in zip(shards, widths, strict=True)], dim=-1
    )
