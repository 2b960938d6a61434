"""Number of KV pages of a pipeline: what the rank with the least room can hold.

A page has the same index in every stage, so that all ranks have the same number. Decided without
torch, by a pipeline replica for its ranks and by an engine in one process for itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eesd_dist.config import CacheConfig, EngineConfig
from eesd_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRoom:
    """Room of one rank for KV pages, and what one page takes there."""

    budget_bytes: int
    page_bytes: int
    """Bytes of the keys and values of all layers that this process keeps, a fallback's included."""

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
