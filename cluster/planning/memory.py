"""Memory of one rank of each stage, while serving and while loading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.planning.shapes import Load, ModelShape, Split
from eesd_dist.errors import ConfigError
from eesd_dist.model.rank_memory import NUM_READERS, activation_bytes, num_read_ahead

USUAL_SHARE = 0.9
"""Share of a GPU's memory that a rank uses: the default of `cache.gpu_memory_utilization`."""
ROWS_OF_PREFILL = 512
"""The default of `scheduler.token_budget`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank of a stage."""

    stage: str
    num_ranks: int
    weights_bytes: int
    """And the tables of rotations."""
    kv_bytes: int
    """Keys and values of all requests at their full context."""
    activation_bytes: int
    """Activations of the largest round: the rows of a prefill, or of all drafts."""
    loading_bytes: int
    """Peak while loading, in host memory on a CPU: the weights, the current piece, those read
    ahead, the pages they are read from, and the largest matrix in float32."""

    @property
    def serving_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.activation_bytes

    def fits(self, memory_bytes: float | None) -> bool:
        """Returns whether it fits a rank's memory; None: of any size."""
        return memory_bytes is None or self.serving_bytes <= memory_bytes


def memory_of(shape: ModelShape, *, split: Split, load: Load) -> tuple[RankMemory, ...]:
    """Returns the memory of a draft rank and a verify rank, without libraries; in a shared split
    that of the first ranks, which are one process, and then of the others.

    Matrices are sharded over the ranks of a stage; the embedding is replicated on each draft rank.
    """
    draft, verify = _stage_memories(shape, split=split, load=load)
    if not split.shares_gpu:
        return draft, verify
    both = _in_one_process(verify, draft, stage="shared")
    others = [replace(rank, num_ranks=rank.num_ranks - 1) for rank in (draft, verify)]
    return (both, *[rank for rank in others if rank.num_ranks])


def _stage_memories(
    shape: ModelShape, *, split: Split, load: Load
) -> tuple[RankMemory, RankMemory]:
    head = shape.head_weights
    draft_head = shape.hidden_size * (split.draft_vocab_size or shape.vocab_size)
    return (
        _rank_memory(
            shape,
            load,
            stage="draft",
            ranks=split.draft_tensor_parallel_size,
            num_layers=split.exit_layer + 1,
            num_tables=2,
            shared=draft_head,
            whole=head,
        ),
        _rank_memory(
            shape,
            load,
            stage="verify",
            ranks=split.verify_tensor_parallel_size,
            num_layers=shape.num_layers - split.exit_layer,
            num_tables=1,
            shared=head,
            whole=0,
        ),
    )


def memory_of_plain(shape: ModelShape, *, num_ranks: int, load: Load) -> RankMemory:
    """Returns the memory of a rank that decodes plainly, with all layers."""
    return _rank_memory(
        shape,
        replace(load, max_draft_tokens=0),
        stage="plain",
        ranks=num_ranks,
        num_layers=shape.num_layers,
        num_tables=1,
        shared=shape.head_weights,
        whole=shape.head_weights,
    )


def _in_one_process(first: RankMemory, second: RankMemory, *, stage: str) -> RankMemory:
    """Returns the memory of one process that loads two ranks, one after the other."""
    return RankMemory(
        stage=stage,
        num_ranks=1,
        weights_bytes=first.weights_bytes + second.weights_bytes,
        kv_bytes=first.kv_bytes + second.kv_bytes,
        activation_bytes=max(first.activation_bytes, second.activation_bytes),
        loading_bytes=max(first.loading_bytes, first.weights_bytes + second.loading_bytes),
    )


def require_memory(memories: Sequence[RankMemory], memory_bytes: float | None) -> None:
    """Raises ConfigError for a rank that does not fit its GPU."""
    for row in memories:
        if not row.fits(memory_bytes):
            assert memory_bytes is not None
            raise ConfigError(
                f"a {row.stage} rank of {row.num_ranks} needs {row.serving_bytes / 1e9:.1f} GB "
                f"({row.weights_bytes / 1e9:.1f} weights, {row.kv_bytes / 1e9:.1f} KV, "
                f"{row.activation_bytes / 1e9:.1f} activations), expected at most "
                f"{memory_bytes / 1e9:.1f} GB: raise --draft-tp or --verify-tp, lower --requests "
                "or --context, or choose a GPU with more memory"
            )


def with_fallbacks(shape: ModelShape, *, split: Split, load: Load) -> tuple[RankMemory, ...]:
    """Returns the memory when verify ranks also hold the target weights of draft ranks.

    There are as many of these verify ranks as draft ranks. A fallback loads after its verify rank.
    Raises ConfigError where there are fewer, or where the stages share a process.
    """
    if split.shares_gpu:
        raise ConfigError(
            "--shared-gpu with --fallback: the fallback in verify rank 0 would die with the "
            "drafting actor; leave one of them out"
        )
    draft, verify = _stage_memories(shape, split=split, load=load)
    if draft.num_ranks > verify.num_ranks:
        raise ConfigError(
            f"{draft.num_ranks} draft ranks and {verify.num_ranks} verify ranks: a fallback for "
            "each draft rank needs as many verify ranks; raise --verify-tp or lower --draft-tp"
        )
    fallback = _rank_memory(
        shape,
        load,
        stage="fallback",
        ranks=draft.num_ranks,
        num_layers=split.exit_layer,
        num_tables=1,
        shared=0,
        whole=shape.head_weights,
    )
    both = replace(
        _in_one_process(verify, fallback, stage="verify with fallback"),
        num_ranks=fallback.num_ranks,
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
    num_tables: int,
    shared: int,
    whole: int,
) -> RankMemory:
    """`shared`, `whole`: weights outside the layers that are sharded, and that each rank has."""
    wide = shape.bytes_per_weight
    layer_weights = shape.layer_weights_of(ranks)
    matrices_bytes = (num_layers * layer_weights + shared // ranks + whole) * wide
    weights_bytes = matrices_bytes + num_tables * shape.table_bytes
    num_tokens = load.num_requests * load.context_tokens
    num_rows = load.num_requests * (load.max_draft_tokens + 1)
    module_bytes = max(layer_weights, shared // ranks, whole) * wide
    num_prefetched = num_read_ahead([module_bytes] * NUM_READERS)
    matrix = max(2 * shape.hidden_size * shape.intermediate_size, shared) // ranks
    return RankMemory(
        stage=stage,
        num_ranks=ranks,
        weights_bytes=weights_bytes,
        kv_bytes=num_layers * num_tokens * shape.kv_bytes_per_token_of(ranks),
        activation_bytes=activation_bytes(
            num_rows=max(num_rows, ROWS_OF_PREFILL),
            num_sampled=num_rows,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            num_ranks=ranks,
            bytes_per_value=shape.bytes_per_activation,
        ),
        loading_bytes=weights_bytes + (1 + 2 * num_prefetched) * module_bytes + 4 * matrix,
    )


def render_memory(memories: Sequence[RankMemory]) -> str:
    """Returns one line for each stage."""
    width = max(len("verify"), *(len(row.stage) for row in memories))
    header = "memory of one rank".ljust(width + len(",   8 ranks"))
    lines = [f"{header}   weights GB      KV GB  activations GB  peak while loading GB"]
    lines += [
        f"{row.stage:>{width}}, {row.num_ranks:>3} rank{'s' if row.num_ranks > 1 else ' '}   "
        f"{row.weights_bytes / 1e9:>10.2f}{row.kv_bytes / 1e9:>11.2f}"
        f"{row.activation_bytes / 1e9:>16.2f}{row.loading_bytes / 1e9:>23.2f}"
        for row in memories
    ]
    return "\n".join(lines)
