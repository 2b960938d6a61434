"""KV pages that other pipelines read or write while this engine runs. Thread-safe."""

import threading
from collections.abc import Callable, Collection, Sequence

from eesd_dist.engine.headers import KvMoves
from eesd_dist.schedule.page_leases import LeasedPages, PageLease, PageReservation
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.types import RequestId


class KvSharing:
    """Leases pages of live requests, and reserves pages for requests of other pipelines."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        moves: KvMoves,
        page_size: int,
        lock: threading.Lock,
        epoch: Callable[[], int],
    ) -> None:
        self._scheduler = scheduler
        self._moves = moves
        self._page_size = page_size
        self._lock = lock
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        return self._epoch()

    def lease(self, request_ids: Collection[RequestId] | None) -> PageLease:
        """Leases the full pages of live requests (None: of all): they do not change until the lease
        ends.

        The requests continue: their rounds write to later pages.
        """
        with self._lock:
            return self._scheduler.lease(request_ids, untouchable=self._moving_pages())

    def end_lease(self, number: str) -> bool:
        """Ends a lease; returns whether its pages were unchanged throughout."""
        with self._lock:
            return self._scheduler.leases.end_lease(number)

    def num_missing(self, leased: Sequence[LeasedPages]) -> dict[RequestId, int]:
        """Returns for each request of another pipeline how many of its pages are not cached."""
        with self._lock:
            return self._scheduler.num_missing(leased)

    def reserve(
        self, leased: Sequence[LeasedPages], *, limit: int | None = None
    ) -> PageReservation:
        """Reserves pages, at most `limit`, that no round reads or writes until they are adopted or
        abandoned."""
        with self._lock:
            return self._scheduler.reserve(
                leased, untouchable=self._moving_pages(), epoch=self._epoch(), limit=limit
            )

    def adopt(self, number: str) -> bool:
        """Makes reserved pages with their content available to requests added from now on. Returns
        False if nothing was adopted, since the epoch has ended."""
        with self._lock:
            return self._scheduler.leases.adopt(number)

    def abandon(self, number: str) -> None:
        """Frees reserved pages; their content is dropped and nothing may be written to them."""
        with self._lock:
            self._scheduler.leases.abandon(number)

    def _moving_pages(self) -> set[int]:
        return self._moves.pages(self._page_size)
