"""One join at a time, and none that outlives its epoch.

Loading weights blocks a thread that nobody can stop, and so may connecting. Here stands which
epoch was asked for last and whether it has been left, so that two loads never run side by side
and one that ends too late is thrown away. What is loaded is none of its business.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from eesd_dist.errors import PeerLost
from eesd_dist.workers.messages import Epoch


class Abortable(Protocol):
    def abort(self) -> None: ...


EpochT = TypeVar("EpochT", bound=Abortable)


class Joining:
    def __init__(self, *, name: str, leave_wait_s: float = 5.0) -> None:
        self._name = name
        self._leave_wait_s = leave_wait_s
        self._loading = asyncio.Lock()
        self._newest = 0
        """The latest epoch that asked for a join."""
        self._left = 0
        """Epochs up to this one are over."""

    async def enter(self, epoch: Epoch, load: Callable[[], EpochT]) -> EpochT:
        """What `load` returns, from a thread; PeerLost when the epoch ended meanwhile."""
        self._newest = max(self._newest, epoch.number)
        async with self._loading:
            self._refuse_if_over(epoch)
            part = await asyncio.to_thread(load)
        try:
            self._refuse_if_over(epoch)
        except PeerLost:
            part.abort()
            raise
        return part

    async def leave(self) -> bool:
        """Ends every epoch asked for so far; False when a load of theirs goes on."""
        self._left = self._newest
        try:
            async with asyncio.timeout(self._leave_wait_s), self._loading:
                return True
        except TimeoutError:
            return False

    def _refuse_if_over(self, epoch: Epoch) -> None:
        if epoch.number < self._newest:
            reason = "a newer epoch began"
        elif epoch.number <= self._left:
            reason = "its epoch was left"
        else:
            return
        raise PeerLost(peer=self._name, operation=f"join of epoch {epoch.number}", reason=reason)
