"""Runs one join at a time, and discards joins of epochs that are over.

Loading weights blocks a thread that cannot be stopped, and connecting may too. `Joining` tracks the
newest epoch and whether it was left, so that two loads never run at the same time and a late result
is discarded.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from eesd_dist.errors import PeerLost
from eesd_dist.workers.messages import Epoch, LoadReport, WorkerStatus

_LOAD_STALL_S = 60.0
"""Longest that loading may go without a byte, as on a slow file system."""
_BUILD_S = 300.0
"""Longest from loaded weights to a joined epoch: compiling kernels, measuring costs."""


class Abortable(Protocol):
    def abort(self) -> None: ...


EpochT = TypeVar("EpochT", bound=Abortable)


class Joining:
    def __init__(self, *, name: str, leave_wait_s: float = 5.0) -> None:
        self._name = name
        self._leave_wait_s = leave_wait_s
        self._loading = asyncio.Lock()
        self.newest = 0
        """The latest epoch with a call of `enter`."""
        self.num_pages = 0
        """Number of KV pages of the latest epoch; 0 before the first."""
        self._left = 0
        """Epochs up to this one are over."""

    async def enter(self, epoch: Epoch, load: Callable[[], EpochT]) -> EpochT:
        """Runs `load` in a thread and returns its result. Raises PeerLost when the epoch ended
        before the load did."""
        self.newest = max(self.newest, epoch.number)
        self.num_pages = epoch.num_pages
        async with self._loading:
            self._refuse_if_over(epoch)
            loaded = await asyncio.to_thread(load)
        try:
            self._refuse_if_over(epoch)
        except PeerLost:
            loaded.abort()
            raise
        return loaded

    async def leave(self) -> bool:
        """Ends all epochs so far. Returns False when a load of one of them is still running."""
        self._left = self.newest
        try:
            async with asyncio.timeout(self._leave_wait_s), self._loading:
                return True
        except TimeoutError:
            return False

    def status(self, load: LoadReport | None) -> WorkerStatus:
        """Returns the heartbeat of a worker between two epochs."""
        if load is not None and not load.is_over:
            return WorkerStatus(
                epoch=0,
                progress=load.bytes_done,
                is_busy=True,
                phase="loading",
                allowed_s=_LOAD_STALL_S,
            )
        return WorkerStatus(
            epoch=0,
            progress=self.newest,
            is_busy=self._loading.locked(),
            phase="joining an epoch",
            allowed_s=_BUILD_S,
        )

    def _refuse_if_over(self, epoch: Epoch) -> None:
        if epoch.number < self.newest:
            reason = "a newer epoch began"
        elif epoch.number <= self._left:
            reason = "its epoch was left"
        else:
            return
        raise PeerLost(peer=self._name, operation=f"join of epoch {epoch.number}", reason=reason)
