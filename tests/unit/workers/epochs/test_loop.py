"""The thread of a data-plane loop, and what is left of it."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from eesd_dist.errors import PeerLost
from eesd_dist.workers.epochs.loop import LoopThread

_LOST = PeerLost(peer="rank 1", operation="round 3", reason="gone")


class Groups:
    """Stands for sockets and threads: they should be gone as soon as the epoch is."""


class ToyEpoch:
    def __init__(self) -> None:
        self.groups = Groups()
        self.thread = LoopThread(self._loop, name="loop of toy rank")

    def _loop(self) -> None:
        groups = self.groups
        try:
            raise RuntimeError("connection closed by peer")
        except RuntimeError as error:
            assert groups
            raise _LOST from error


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_an_epoch_that_has_lost_a_peer_is_freed_without_the_garbage_collector() -> None:
    async def run() -> None:
        epoch = ToyEpoch()
        groups = weakref.ref(epoch.groups)
        end = await epoch.thread.end()
        assert str(end.error) == str(_LOST)
        del epoch
        for _ in range(100):  # the thread itself may be about to end
            if groups() is None:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"held by {gc.get_referrers(groups())}")

    asyncio.run(run())
