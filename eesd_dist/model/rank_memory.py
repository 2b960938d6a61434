"""Arithmetic of one rank's memory: keys and values, activations, pieces read ahead of packing.

Imports neither torch nor pydantic: the planner uses the same arithmetic as the ranks.
"""

from collections.abc import Sequence

from eesd_dist.model.degrees import kv_heads_of

CPU_BUDGET_BYTES = 512 * 2**20
"""Budget of a rank on a CPU where none is configured."""

NUM_READERS = 4
GRAPH_ROWS = 640
"""Rows of the longest CUDA graph."""
SPLIT_ROWS = 1 << 14
"""Most rows of attention in float32 that a pass divides among programs."""
_NUM_GRAPH_POOLS = 2
"""Graphs of a rank's layers alone, and of its rounds or draft steps, keep memory of their own."""
_GROUP_BYTES = 512 << 20
"""Estimated buffers of a group's communicators, and of its sums in the memory of a node."""
_LOGITS_BYTES = 1 << 28
"""Bytes of a block of rows over the whole vocabulary, in float32."""
READ_AHEAD_BYTES = 2**30
"""Most bytes of pieces that are read ahead, unless one piece is larger."""


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, num_ranks: int, bytes_per_value: int
) -> int:
    """Returns the bytes of one position's keys and values in so many layers of one rank.

    `num_kv_heads` are the model's; with more ranks than heads each rank has one of them.
    """
    own = len(kv_heads_of(0, num_ranks, num_kv_heads=num_kv_heads))
    return num_layers * 2 * own * head_dim * bytes_per_value


def kv_page_bytes(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_ranks: int,
    bytes_per_value: int,
) -> int:
    """Returns the bytes of one page in so many layers of one rank. That is more than its positions
    take where a head or a page is narrower than a vector."""
    from eesd_dist.model.kv_layout import count_kv_numbers  # imports numpy

    own = len(kv_heads_of(0, num_ranks, num_kv_heads=num_kv_heads))
    kv_numbers = count_kv_numbers(head_dim=head_dim, page_size=page_size)
    return num_layers * own * kv_numbers * bytes_per_value


def gpu_budget_bytes(
    *, total_bytes: int, free_bytes: int, own_bytes: int, reserved_bytes: int, utilization: float
) -> int:
    """Returns what a rank may use for pages on a GPU once its weights are loaded.

    Args:
        total_bytes: memory of the GPU.
        free_bytes: what no process uses.
        own_bytes: what this process has allocated.
        reserved_bytes: what it will allocate later: activations, weights of a fallback, graphs
            and groups.
        utilization: share of the GPU that it may use in total.
    """
    allowed = int(total_bytes * utilization) - own_bytes
    return max(0, min(allowed, free_bytes) - reserved_bytes)


def logits_block(vocab_size: int) -> int:
    """Returns how many rows of the whole vocabulary are computed at once, at most."""
    return max(1, _LOGITS_BYTES // (4 * vocab_size))


def activation_bytes(
    *,
    num_rows: int,
    num_sampled: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_ranks: int,
    bytes_per_value: int,
) -> int:
    """Returns an estimate of the memory that one round needs besides weights and pages.

    A layer holds at once about six tensors of the hidden size and three of the rank's intermediate
    channels for each row; sampling holds about four float32 rows of the whole vocabulary.
    """
    layer = _row_numbers(hidden_size, intermediate_size, num_ranks)
    return num_rows * layer * bytes_per_value + 4 * num_sampled * vocab_size * 4


def held_bytes(
    *, hidden_size: int, intermediate_size: int, num_ranks: int, bytes_per_value: int
) -> int:
    """Returns an estimate of the memory of a GPU that a rank holds from its first rounds on: that
    of CUDA graphs, which no other work uses, and of its group. Both pools of graphs have the rows
    of layers, one of them logits, a copy of them, and the longest contexts."""
    row = _row_numbers(hidden_size, intermediate_size, num_ranks) * bytes_per_value
    once = (SPLIT_ROWS * hidden_size * 4 + 2 * _LOGITS_BYTES) // num_ranks
    return _NUM_GRAPH_POOLS * GRAPH_ROWS * row + once + (_GROUP_BYTES if num_ranks > 1 else 0)


def _row_numbers(hidden_size: int, intermediate_size: int, num_ranks: int) -> int:
    """Returns the numbers of a row that a layer holds at once."""
    return 6 * hidden_size + 3 * intermediate_size // num_ranks


def num_read_ahead(sizes: Sequence[int]) -> int:
    """Returns how many of the next pieces, of these sizes in bytes, may be read ahead: at most one
    for each reader, and no more than `READ_AHEAD_BYTES` unless that is less than one piece."""
    num, size_bytes = 0, 0
    for size in sizes[:NUM_READERS]:
        size_bytes += size
        if num and size_bytes > READ_AHEAD_BYTES:
            break
        num += 1
    return num
