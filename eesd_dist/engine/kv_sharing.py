"""KV pages that other pipelines read or write while this engine goes on. From any thread."""

import threading
from collections.abc import Callable, Collection, Sequence

from eesd_dist.engine.headers import KvMoves
from eesd_dist.schedule.page_leases import LeasedPages, PageLease, PageReservation
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.types import RequestId


class KvSharing:
    """Leases pages of live requests, and takes in those of others."""

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

    def lease(self, request_ids: Collection[RequestId] | None) -> PageLease:
        """Full pages of live requests (None: of all) stay as they are until they are returned.

        The requests go on meanwhile: their rounds write behind these pages.
        """
        with self._lock:
            return self._scheduler.lease(request_ids, untouchable=self._moving_pages())

    def end_lease(self, number: str) -> bool:
        """Whether the lease's pages held the same all the while."""
        with self._lock:
            return self._scheduler.leases.end_lease(number)

    def reserve(self, leased: Sequence[LeasedPages]) -> PageReservation:
        """Pages that no round reads or writes until they are adopted or abandoned."""
        with self._lock:
            return self._scheduler.reserve(
                leased, untouchable=self._moving_pages(), epoch=self._epoch()
            )

    def adopt(self, number: str) -> bool:
        """Their content is there: a request that is added from now on finds it. False: nothing was
        adopted, since the stores have been lost meanwhile."""
        with self._lock:
            return self._scheduler.leases.adopt(number)

    def abandon(self, number: str) -> None:
        """Nothing is written into them any more, and nothing of it is to be found."""
        with self._lock:
            self._scheduler.leases.abandon(number)

    def _moving_pages(self) -> set[int]:
        return self._moves.pages(self._page_size)
