"""Agreement of a pipeline's ranks before an epoch: on their weights and the number of KV pages.

The number is settled once, by the rank with the least room, and kept as long as the pipeline lives:
page tables and migrations rely on it. A rank that comes later must hold as many.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from eesd_dist.config import EngineConfig, KvCacheDType
from eesd_dist.errors import ConfigError
from eesd_dist.schedule.kv_pages import num_pages_of, require_room
from eesd_dist.workers.messages import LoadedRank

logger = logging.getLogger(__name__)

_DIGITS = 12
"""Digits of a digest in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """The KV cache of one pipeline."""

    num_pages: int
    num_tokens: int
    rank_bytes: Mapping[str, int]
    """Bytes of all pages of a rank, by slot; the pages of its fallback included."""
    kv_cache_dtype: KvCacheDType


class Agreement:
    """The agreement of one pipeline's ranks, from one epoch to the next."""

    def __init__(self, engine: EngineConfig, *, pipeline: str) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._num_pages: int | None = None
        """None before the first epoch."""
        self._rank_bytes: dict[str, int] = {}

    @property
    def capacity(self) -> KvCapacity | None:
        """None before the first epoch."""
        if self._num_pages is None:
            return None
        return KvCapacity(
            num_pages=self._num_pages,
            num_tokens=self._num_pages * self._engine.cache.page_size,
            rank_bytes=dict(self._rank_bytes),
            kv_cache_dtype=self._engine.cache.kv_cache_dtype,
        )

    def go_on_with(self, num_pages: int) -> None:
        """Keeps the number of claimed workers."""
        self._num_pages = num_pages

    def settle(self, ranks: Mapping[str, LoadedRank]) -> int:
        """Returns the number of pages. `ranks`: all ranks of the pipeline, by slot.

        Raises ConfigError when weights or products differ, or when a rank cannot hold the pages.
        """
        require_equal_ranks(ranks)
        if self._num_pages is None:
            rooms = {name: rank.room for name, rank in ranks.items()}
            self._num_pages = num_pages_of(self._engine, rooms)
        for name, rank in ranks.items():
            require_room(self._engine, name, rank.room, num_pages=self._num_pages)
        rank_bytes = {name: self._num_pages * r.room.page_bytes for name, r in ranks.items()}
        if rank_bytes != self._rank_bytes:
            self._rank_bytes = rank_bytes
            self._tell(ranks)
        return self._num_pages

    def _tell(self, ranks: Mapping[str, LoadedRank]) -> None:
        assert self._num_pages is not None, "it was settled"
        logger.info(
            "kv cache: pipeline=%s tokens=%d pages=%d page_size=%d kv_cache_dtype=%s rank_bytes=%s "
            "budget_bytes=%s",
            self._pipeline,
            self._num_pages * self._engine.cache.page_size,
            self._num_pages,
            self._engine.cache.page_size,
            self._engine.cache.kv_cache_dtype,
            _listed(self._rank_bytes),
            _listed({name: rank.room.budget_bytes for name, rank in ranks.items()}),
        )


def require_equal_ranks(ranks: Mapping[str, LoadedRank]) -> None:
    """Raises ConfigError where weights or products differ: it names two ranks, with both."""
    (first, expected), *others = ranks.items()
    for name, rank in others:
        if rank.weights != expected.weights:
            raise ConfigError(
                f"{name} has read other weights than {first}: {rank.weights[:_DIGITS]} and "
                f"{expected.weights[:_DIGITS]} are the digests of model.path there; copy the same "
                "files to every node and restart the service"
            )
        if rank.products != expected.products:
            raise ConfigError(
                f"{name} multiplies with {rank.products}, {first} with {expected.products}: texts "
                "would change when ranks move; place the pipeline on nodes with equal processors, "
                "or set model.numerics to fast"
            )


def _listed(figures: Mapping[str, int]) -> str:
    return ",".join(f"{name.replace(' ', '-')}:{figure}" for name, figure in figures.items())
