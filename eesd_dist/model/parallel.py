"""How one stage's weights are shared out among its ranks.

Heads, intermediate channels and vocabulary are cut into runs of neighbours, one per rank. The only
collective of a layer stands here: the sum after a row-split product. Knows no backend; a group of
one needs none.
"""

from dataclasses import dataclass

from eesd_dist.errors import ConfigError
from eesd_dist.model.kernels import Linear
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import TensorGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of a model one rank holds."""

    rank: int
    size: int
    kv_heads: range
    heads: range
    """The query heads that belong to `kv_heads`."""
    channels: range
    """Of the intermediate size."""
    vocabulary: range

    @property
    def adds_bias(self) -> bool:
        """A row-split product is summed over ranks; its bias may enter that sum once."""
        return self.rank == 0

    @classmethod
    def of(cls, spec: ModelSpec, *, rank: int, size: int) -> "Shard":
        for what, count in (
            ("attention heads", spec.num_heads),
            ("key-value heads", spec.num_kv_heads),
            ("intermediate channels", spec.intermediate_size),
        ):
            if count % size:
                raise ConfigError(
                    f"{spec.architecture} has {count} {what}, which {size} tensor-parallel ranks "
                    "cannot share evenly: choose a degree that divides them"
                )
        return cls(
            rank=rank,
            size=size,
            kv_heads=_part(spec.num_kv_heads, rank, size),
            heads=_part(spec.num_heads, rank, size),
            channels=_part(spec.intermediate_size, rank, size),
            vocabulary=_part(spec.vocab_size, rank, size),
        )


def _part(count: int, rank: int, size: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)


def summed_over_ranks(linear: Linear, group: TensorGroup) -> Linear:
    """A row-split product: every rank's part added up, in the same order on every rank."""
    if group.size == 1:
        return linear
    return lambda x_TI: group.all_reduce(linear(x_TI))
