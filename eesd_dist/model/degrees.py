"""Degrees of tensor parallelism that a model's layers allow. Imports no torch: the planner asks it.

Query heads and intermediate channels are shared evenly. Up to the number of key-value heads each
rank holds as many of them as every other; beyond it, equally many ranks hold each of them, as vLLM
and Megatron-LM replicate them.
"""

from eesd_dist.errors import ConfigError


def tensor_parallel_degrees(
    *, num_heads: int, num_kv_heads: int, num_channels: int, norms_heads_jointly: bool = False
) -> tuple[int, ...]:
    """Returns the degrees in rising order.

    `num_channels` is the intermediate size; `norms_heads_jointly`: a norm covers all heads of a
    row, which one rank must have.
    """
    if norms_heads_jointly:
        return (1,)
    return tuple(
        size
        for size in range(1, num_heads + 1)
        if num_heads % size == num_channels % size == 0
        and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    )


def require_degree(
    size: int,
    *,
    model: str,
    num_heads: int,
    num_kv_heads: int,
    num_channels: int,
    norms_heads_jointly: bool = False,
) -> None:
    """Raises ConfigError for a degree that does not fit; the message names those that do."""
    degrees = tensor_parallel_degrees(
        num_heads=num_heads, num_kv_heads=num_kv_heads, num_channels=num_channels
    )
    if norms_heads_jointly and size != 1:
        raise ConfigError(
            f"{size} tensor-parallel ranks for {model}, of which a norm covers all heads of a row: "
            "choose one rank for each stage"
        )
    if size not in degrees:
        raise ConfigError(
            f"{size} tensor-parallel ranks cannot share evenly the {num_heads} attention heads, "
            f"{num_kv_heads} key-value heads and {num_channels} intermediate channels of {model}: "
            f"choose one of {', '.join(map(str, degrees))}"
        )


def kv_heads_of(rank: int, size: int, *, num_kv_heads: int) -> range:
    """Returns the key-value heads of a rank: its part of them, or the one it shares with others."""
    first = rank * num_kv_heads // size
    return range(first, first + max(1, num_kv_heads // size))
