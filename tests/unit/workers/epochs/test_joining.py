"""Loads that cannot be stopped, and epochs that do not wait for them."""

import asyncio
import threading

import pytest

from eesd_dist.errors import PeerLost
from eesd_dist.workers.epochs.joining import Joining
from eesd_dist.workers.messages import Address, Epoch, LoadReport


class Load:
    """Blocks until it is released, and detects other loads that run at the same time."""

    running = 0
    max_running = 0

    def __init__(self) -> None:
        self.go = threading.Event()
        self.has_begun = threading.Event()
        self.aborted = False

    def __call__(self) -> "Load":
        Load.running += 1
        Load.max_running = max(Load.max_running, Load.running)
        self.has_begun.set()
        self.go.wait(10)
        Load.running -= 1
        return self

    def abort(self) -> None:
        self.aborted = True


def _epoch(number: int) -> Epoch:
    store = Address(host="nowhere", port=1)
    return Epoch(number=number, store=store, num_verify_ranks=1, timeout_s=1.0, num_pages=8)


def test_a_load_that_a_newer_epoch_overtakes_is_thrown_away_before_the_next_begins() -> None:
    async def run() -> None:
        joining = Joining(name="verify rank 0")
        old, new = Load(), Load()
        overtaken = asyncio.create_task(joining.enter(_epoch(1), old))
        await asyncio.to_thread(old.has_begun.wait, 10)
        newest = asyncio.create_task(joining.enter(_epoch(2), new))
        await asyncio.sleep(0.05)
        assert not new.has_begun.is_set()
        old.go.set()
        new.go.set()
        assert await newest is new
        with pytest.raises(PeerLost, match="a newer epoch began"):
            await overtaken
        assert old.aborted
        assert not new.aborted
        assert Load.max_running == 1

    asyncio.run(run())


def test_a_worker_that_leaves_while_loading_takes_no_part_afterwards() -> None:
    async def run() -> None:
        joining = Joining(name="verify rank 0", leave_wait_s=0.05)
        load = Load()
        task = asyncio.create_task(joining.enter(_epoch(1), load))
        await asyncio.to_thread(load.has_begun.wait, 10)
        assert not await joining.leave()
        load.go.set()
        with pytest.raises(PeerLost, match="its epoch was left"):
            await task
        assert load.aborted
        assert await joining.leave()

    asyncio.run(run())


def test_after_leaving_the_next_epoch_is_joined_as_ever() -> None:
    async def run() -> None:
        joining = Joining(name="verify rank 0")
        for number in (1, 2):
            load = Load()
            load.go.set()
            assert await joining.enter(_epoch(number), load) is load
            assert await joining.leave()

    asyncio.run(run())


def _report(bytes_done: int) -> LoadReport:
    return LoadReport(
        bytes_done=bytes_done,
        bytes_total=8,
        module="",
        seconds=1.0,
        waited_s=0.0,
        peak_memory_bytes=1,
    )


def test_a_heartbeat_tells_loading_which_makes_progress_from_joining_and_from_waiting() -> None:
    async def run() -> None:
        joining = Joining(name="verify rank 0")
        waiting = joining.status(None)
        assert (waiting.epoch, waiting.is_busy) == (0, False)
        load = Load()
        task = asyncio.create_task(joining.enter(_epoch(1), load))
        await asyncio.to_thread(load.has_begun.wait, 10)
        loading = [joining.status(_report(done)) for done in (0, 5)]
        assert [(s.phase, s.progress, s.is_busy) for s in loading] == [
            ("loading", 0, True),
            ("loading", 5, True),
        ]
        for report in (None, _report(8)):  # no weights, or all of them
            building = joining.status(report)
            assert (building.phase, building.is_busy) == ("joining an epoch", True)
            assert building.allowed_s > loading[0].allowed_s > 0
        load.go.set()
        await task
        assert not joining.status(_report(8)).is_busy
        assert await joining.leave()

    asyncio.run(run())
