"""Fills the slots of a start, and replaces workers that are lost before the last one has loaded.

A death during a start costs the process that died, not the start: the other workers go on loading,
and several lost workers are replaced at the same time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from eesd_dist.errors import PeerLost
from eesd_dist.workers.messages import LoadedRank
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.worker import Worker
from serve_app.pipeline.workers import Workers

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REPLACEMENTS = 3
"""Replacements of one slot in one start. A worker that dies more often probably dies of its own
work, and the supervisor pauses before the next start."""


class SlotFiller:
    """Fills the slots of one start."""

    def __init__(
        self,
        workers: Workers,
        *,
        fill: Callable[[RankSlot], Awaitable[None]],
        prepare: Callable[[Worker], Coroutine[Any, Any, LoadedRank]],
        may_replace: Callable[[RankSlot], bool],
        operation: str,
    ) -> None:
        """`fill` puts a worker into an empty slot, `prepare` lets a worker load its weights. Where
        `may_replace` is False, the loss of the slot's worker ends the start. Errors name the
        `operation`."""
        self._workers = workers
        self._fill = fill
        self._prepare = prepare
        self._may_replace = may_replace
        self._operation = operation
        self._loaded: dict[str, LoadedRank] = {}
        self._is_full = asyncio.Event()

    async def run(self, slots: Sequence[RankSlot]) -> dict[str, LoadedRank]:
        """Returns what the workers have loaded, once every slot has one that is not lost.

        Raises what a spawn or a load raised, and PeerLost for a worker that is lost too often.
        """
        tasks = [asyncio.ensure_future(self._keep(slot, num_slots=len(slots))) for slot in slots]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {slot.name: self._loaded[slot.name] for slot in slots}

    async def _keep(self, slot: RankSlot, *, num_slots: int) -> None:
        """Keeps a loaded worker in the slot until every slot has one."""
        num_replaced = 0
        while not self._is_full.is_set():
            if self._workers.is_empty(slot):
                await self._fill(slot)
            worker = self._workers.at(slot)
            try:
                self._loaded[slot.name] = await self._unless_lost(worker, self._prepare(worker))
                if len(self._loaded) == num_slots:
                    self._is_full.set()
                await self._unless_lost(worker, self._is_full.wait())
            except PeerLost as error:
                self._loaded.pop(slot.name, None)
                is_lost = worker.is_dead or worker.failure.done()
                if not is_lost or num_replaced == MAX_REPLACEMENTS or not self._may_replace(slot):
                    raise
                num_replaced += 1
                logger.warning("replaced during the start: %s", error)
                self._workers.kill(worker)

    async def _unless_lost(self, worker: Worker, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of the work. Raises the loss of the worker as soon as it is known."""
        working = asyncio.ensure_future(work)
        losses: set[asyncio.Future[Any]] = {worker.death, worker.failure}
        try:
            await asyncio.wait({working, *losses}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and isinstance(working.exception(), PeerLost):
                # The call to a dead process fails a moment before its death is reported.
                await asyncio.wait(
                    losses, timeout=worker.timings.grace_s, return_when=asyncio.FIRST_COMPLETED
                )
            if worker.is_dead or worker.failure.done():
                raise worker.loss(self._operation)
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
