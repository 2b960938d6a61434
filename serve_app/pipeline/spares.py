"""Warm spares: idle workers that take the slots of lost ones, and are replaced in the background.

A spare is a process that is up in a bundle of its own, with torch imported and, for the draft
stage, the weights loaded. When it takes the slot of a lost worker, the bundle of that worker is
where the next spare is started.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from eesd_dist.errors import EesdError, LeaseLost
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.worker import Worker

logger = logging.getLogger(__name__)


class Spares:
    """The spares of one pipeline, by slot."""

    def __init__(
        self,
        slots: Sequence[RankSlot],
        *,
        spawn: Callable[[RankSlot, str], Awaitable[Worker]],
        period_s: float,
    ) -> None:
        """`spawn` takes a slot, and the operation that its errors name."""
        self.slots = tuple(slots)
        self._spawn = spawn
        self._period_s = period_s
        self._in_slot: dict[str, Worker] = {}
        self._ready: set[str] = set()
        """Slots of the spares that may be taken."""

    @property
    def ready(self) -> tuple[Worker, ...]:
        """Spares that can take a slot now."""
        return tuple(
            spare
            for name, spare in self._in_slot.items()
            if name in self._ready and not (spare.is_dead or spare.failure.done())
        )

    async def keep(self, prepare: Callable[[Worker], Awaitable[None]]) -> None:
        """Starts and prepares what is missing, until it is cancelled."""
        await asyncio.gather(*[self._keep(slot, prepare) for slot in self.slots])

    def take(self, slot: RankSlot) -> Worker | None:
        """Returns a spare for this slot, and forgets it; None if there is none."""
        for spare in self.ready:
            if spare.slot.may_take(slot):
                self._ready.discard(spare.slot.name)
                return self._in_slot.pop(spare.slot.name)
        return None

    def add(self, spare: Worker) -> None:
        """Adds one that an earlier supervisor has started."""
        self._in_slot[spare.slot.name] = spare

    def release(self) -> None:
        for name in tuple(self._in_slot):
            self._end(name)

    async def _keep(self, slot: RankSlot, prepare: Callable[[Worker], Awaitable[None]]) -> None:
        while True:
            try:
                await self._make_ready(slot, prepare)
            except LeaseLost:  # another supervisor has claimed it
                return
            except EesdError as error:
                logger.warning("no spare: slot=%s error=%s", slot.name, error)
                self._end(slot.name)
            await asyncio.sleep(self._period_s)

    async def _make_ready(
        self, slot: RankSlot, prepare: Callable[[Worker], Awaitable[None]]
    ) -> None:
        spare = self._in_slot.get(slot.name)
        if spare is not None and spare.failure.done():
            raise spare.failure.result()
        if spare is None or spare.is_dead:
            self._end(slot.name)
            spare = self._in_slot[slot.name] = await self._spawn(slot, "start of a spare")
        if slot.name not in self._ready:
            await prepare(spare)
            self._ready.add(slot.name)
            logger.info("spare: %s", spare.label)

    def _end(self, name: str) -> None:
        self._ready.discard(name)
        if (spare := self._in_slot.pop(name, None)) is not None:
            spare.end()
