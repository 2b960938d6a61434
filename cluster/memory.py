"""What one rank of each stage has to hold, serving and while it loads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.shapes import Load, ModelShape, Split
from eesd_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank of a stage has to hold."""

    stage: str
    num_ranks: int
    weights_bytes: int
    kv_bytes: int
    """Of all requests at their full context."""
    loading_bytes: int
    """Most at any time while loading, in the host's memory on a CPU: the weights, the piece at
    hand, the next one, the pages it is read from, and the largest matrix in float32."""


def memory_of(shape: ModelShape, *, split: Split, load: Load) -> tuple[RankMemory, RankMemory]:
    """A draft rank's and a verify rank's memory; activations and libraries are not counted.

    Matrices are shared out among a stage's ranks, the embedding is whole on each draft rank.
    """
    head = shape.hidden_size * shape.vocab_size
    draft_head = shape.hidden_size * (split.draft_vocab_size or shape.vocab_size)
    return (
        _rank_memory(
            shape,
            load,
            stage="draft",
            ranks=split.draft_tensor_parallel_size,
            num_layers=split.exit_layer + 1,
            shared=draft_head,
            whole=head,
        ),
        _rank_memory(
            shape,
            load,
            stage="verify",
            ranks=split.verify_tensor_parallel_size,
            num_layers=shape.num_layers - split.exit_layer,
            shared=head,
            whole=0,
        ),
    )


def with_fallbacks(
    memories: tuple[RankMemory, RankMemory], shape: ModelShape, *, split: Split, load: Load
) -> tuple[RankMemory, ...]:
    """The same when verify ranks also hold what draft ranks have of the target itself.

    As many verify ranks as there are draft ranks. A fallback loads when its verify rank has.
    """
    draft, verify = memories
    if draft.num_ranks > verify.num_ranks:
        raise ConfigError(
            f"{draft.num_ranks} draft ranks and {verify.num_ranks} verify ranks: a fallback for "
            "each draft rank wants as many verify ranks; raise --verify-tp or lower --draft-tp"
        )
    fallback = _rank_memory(
        shape,
        load,
        stage="fallback",
        ranks=draft.num_ranks,
        num_layers=split.exit_layer,
        shared=0,
        whole=shape.hidden_size * shape.vocab_size,
    )
    both = RankMemory(
        stage="verify with fallback",
        num_ranks=fallback.num_ranks,
        weights_bytes=verify.weights_bytes + fallback.weights_bytes,
        kv_bytes=verify.kv_bytes + fallback.kv_bytes,
        loading_bytes=max(verify.loading_bytes, verify.weights_bytes + fallback.loading_bytes),
    )
    without = replace(verify, num_ranks=verify.num_ranks - both.num_ranks)
    return (draft, without, both) if without.num_ranks else (draft, both)


def _rank_memory(
    shape: ModelShape,
    load: Load,
    *,
    stage: str,
    ranks: int,
    num_layers: int,
    shared: int,
    whole: int,
) -> RankMemory:
    """`shared` and `whole`: weights beside the layers that the ranks share, and that each has."""
    wide = shape.bytes_per_weight
    weights_bytes = ((num_layers * shape.layer_weights + shared) // ranks + whole) * wide
    num_tokens = load.num_requests * load.context_tokens
    piece_bytes = max(shape.layer_weights // ranks, shared // ranks, whole) * wide
    matrix = max(2 * shape.hidden_size * shape.intermediate_size, shared) // ranks
    return RankMemory(
        stage=stage,
        num_ranks=ranks,
        weights_bytes=weights_bytes,
        kv_bytes=num_layers * num_tokens * shape.kv_bytes_per_token // ranks,
        loading_bytes=weights_bytes + 3 * piece_bytes + 4 * matrix,
    )


def render_memory(memories: Sequence[RankMemory]) -> str:
    """One line for each stage."""
    width = max(len("verify"), *(len(row.stage) for row in memories))
    header = "memory of one rank".ljust(width + len(",   8 ranks"))
    lines = [f"{header}   weights GB      KV GB  peak while loading GB"]
    lines += [
        f"{row.stage:>{width}}, {row.num_ranks:>3} rank{'s' if row.num_ranks > 1 else ' '}   "
        f"{row.weights_bytes / 1e9:>10.2f}{row.kv_bytes / 1e9:>11.2f}"
        f"{row.loading_bytes / 1e9:>23.2f}"
        for row in memories
    ]
    return "\n".join(lines)
