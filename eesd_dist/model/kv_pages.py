"""How many KV pages a pipeline has: bytes of a page, budget of a rank, the rank with the fewest.

Pure arithmetic without torch, so that the planner, a pipeline replica and an ingress use the same
as the ranks. A page has the same index in every stage, so that all ranks have the same number.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eesd_dist.config import CacheConfig, EngineConfig
from eesd_dist.errors import ConfigError
from eesd_dist.model.degrees import kv_heads_of

CPU_BUDGET_BYTES = 512 * 2**20
"""Budget of a rank on a CPU where none is configured."""


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, num_ranks: int, bytes_per_value: int
) -> int:
    """Returns the bytes of one position's keys and values in so many layers of one rank.

    `num_kv_heads` are the model's; with more ranks than heads each rank has one of them.
    """
    own = len(kv_heads_of(0, num_ranks, num_kv_heads=num_kv_heads))
    return num_layers * 2 * own * head_dim * bytes_per_value


def gpu_budget_bytes(
    *, total_bytes: int, free_bytes: int, own_bytes: int, reserved_bytes: int, utilization: float
) -> int:
    """Returns what a rank may use for pages on a GPU once its weights are loaded.

    Args:
        total_bytes: memory of the GPU.
        free_bytes: what no process uses.
        own_bytes: what this process has allocated.
        reserved_bytes: what it will allocate later: activations, weights of a fallback.
        utilization: share of the GPU that it may use in total.
    """
    allowed = int(total_bytes * utilization) - own_bytes
    return max(0, min(allowed, free_bytes) - reserved_bytes)


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
    layer = 6 * hidden_size + 3 * intermediate_size // num_ranks
    return num_rows * layer * bytes_per_value + 4 * num_sampled * vocab_size * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRoom:
    """What one rank can hold, and what one page takes there."""

    budget_bytes: int
    page_bytes: int
    """Of all layers whose keys and values this process keeps, a fallback's included."""

    @property
    def num_pages(self) -> int:
        return self.budget_bytes // self.page_bytes


def num_pages_of(config: EngineConfig, rooms: Mapping[str, KvRoom]) -> int:
    """Returns the number of pages of each rank: the configured one, else what the rank with the
    least room can hold. `rooms`: by name of the rank.

    Raises ConfigError if this is not one page, or less than a configured `max_model_len` needs.
    """
    cache = config.cache
    if cache.num_pages is not None:
        require_length(config, num_pages=cache.num_pages, what="cache.num_pages")
        return cache.num_pages
    name = min(rooms, key=lambda rank: rooms[rank].num_pages)
    room = rooms[name]
    if room.num_pages < 1:
        raise ConfigError(
            f"{name} has {room.budget_bytes} bytes for KV pages, and a page of {cache.page_size} "
            f"tokens takes {room.page_bytes}: {more_room(cache)}"
        )
    require_length(config, num_pages=room.num_pages, what=f"the KV pages of {name}")
    return room.num_pages


def require_length(config: EngineConfig, *, num_pages: int, what: str) -> None:
    """Raises ConfigError when a configured `max_model_len` does not fit so many pages."""
    length, num_tokens = config.model.max_model_len, num_pages * config.cache.page_size
    if length is not None and length > num_tokens:
        raise ConfigError(
            f"model.max_model_len is {length}, and {what} hold {num_tokens} tokens: lower it to "
            f"{num_tokens}, or {more_room(config.cache)}"
        )


def require_room(config: EngineConfig, name: str, room: KvRoom, *, num_pages: int) -> None:
    """Raises ConfigError when a rank cannot hold the pages that its pipeline has already."""
    if config.cache.num_pages is None and room.num_pages < num_pages:
        raise ConfigError(
            f"{name} can hold {room.num_pages} KV pages ({room.budget_bytes} bytes), and the other "
            f"ranks of its pipeline have {num_pages} ({num_pages * room.page_bytes} bytes here): "
            f"{more_room(config.cache)} there, or set cache.num_pages to {room.num_pages}"
        )


def more_room(cache: CacheConfig) -> str:
    """Returns what to set for more pages."""
    if cache.num_pages is not None:
        return "raise cache.num_pages"
    return "raise cache.kv_cache_bytes, or on GPUs cache.gpu_memory_utilization"
