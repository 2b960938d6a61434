"""The workers of one pipeline: brought together into epochs, watched, and killed.

An epoch is full, with a worker in every slot, or degraded: fallbacks, which live in the verify
ranks' processes, take the draft stage's part while its own processes are replaced.

A group carries out what the supervisor decides. `workers` fills slots; neither depends on what the
workers compute, and for which requests.
"""

import asyncio
import logging
import time
from collections.abc import (
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import Any, TypeVar

from eesd_dist.errors import (
    ConfigError,
    EesdError,
    EngineError,
    LeaseLost,
    PeerLost,
)
from eesd_dist.workers.messages import Epoch, HeadReport, LoadedRank
from serve_app.pipeline.agreement import Agreement, KvCapacity, require_equal_ranks
from serve_app.pipeline.diagnosis import Diagnosis
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.preparations import Preparations
from serve_app.pipeline.slot_filler import SlotFiller
from serve_app.pipeline.worker import Worker
from serve_app.pipeline.workers import Workers

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WorkerGroup:
    """Owns the workers of one pipeline and reports which are missing."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._timings = workers.spec.timings
        self._parallel = workers.spec.engine.parallel
        self._as_configured = workers.spec
        self._draft_slots = tuple(slot for slot in workers.slots if slot.stage == "draft")
        self._verify_slots = tuple(slot for slot in workers.slots if slot.stage == "verify")
        self._diagnosis = Diagnosis(workers)
        self._fallbacks: tuple[Worker, ...] = ()
        """Fallbacks of a degraded epoch, rank 0 first; empty in a full one."""
        self._unprepared: set[str] = set()
        """Draft slots filled since the last full epoch, with weights still to be loaded."""
        self._agreement = Agreement(workers.spec.engine, pipeline=workers.spec.pipeline)
        self._has_been_full = False
        self._is_meeting = False
        """Workers may be in the present epoch, or on their way into it."""
        self._preparations = Preparations(workers)
        self.epoch = 0
        """The present epoch, or the last one."""
        self.kind = EpochKind.NONE
        """Kind of the present epoch."""
        self.claimed_trouble: EesdError | None = None
        """Error for which the epoch of claimed workers cannot go on; None if it can, and without
        claims."""
        self.spawned_s = 0.0
        """Time at which the last slot was filled, by the clock of `time.monotonic`."""

    @property
    def crashed_leaders(self) -> Sequence[str]:
        """Names of the latest leaders that have reported their own crash."""
        return tuple(self._diagnosis.crashed_leaders)

    @property
    def kv_capacity(self) -> KvCapacity | None:
        """None before the first epoch."""
        return self._agreement.capacity

    @property
    def leader(self) -> Worker:
        """Draft rank 0 of the present epoch, or the last one. Raises PeerLost if it is gone."""
        if not self._fallbacks:
            return self.workers.at(self.workers.slots[0])
        leader = self._fallbacks[0]
        if self.workers.at((leader.host or leader).slot) is not leader.host:
            raise PeerLost(peer=leader.slot.name, operation="call", reason="its process is gone")
        return leader

    @property
    def is_degraded(self) -> bool:
        return self.kind is EpochKind.DEGRADED

    @property
    def is_draft_ready(self) -> bool:
        """True if every draft slot has a worker with loaded weights."""
        return not any(self._is_late(slot) for slot in self._draft_slots)

    @property
    def can_fall_back(self) -> bool:
        """True if the draft stage is not ready, and all verify ranks are there with fallbacks."""
        return (
            self._parallel.fallback
            and self._has_been_full
            and not any(self.workers.is_empty(slot) for slot in self._verify_slots)
            and not self.is_draft_ready
        )

    @property
    def engaged(self) -> tuple[Worker, ...]:
        """Workers of the present epoch."""
        if not self._fallbacks:
            return tuple(self.workers)
        return (*self._fallbacks, *(m for m in self.workers if m.slot.stage == "verify"))

    @property
    def has_other_head(self) -> bool:
        """True if new workers get another exit head than the configured one."""
        return self.workers.spec is not self._as_configured

    def set_head(self, folder: str) -> None:
        """Sets the exit head of workers that are spawned from now on."""
        self.workers.spec = self._as_configured.with_head(folder)

    async def reset_head(self) -> None:
        """Ends all workers and goes back to the configured head."""
        await self.workers.release_all()
        self._unprepared.clear()
        self.workers.spec = self._as_configured

    async def load_head(self, folder: str) -> HeadReport:
        """Loads another exit head into the draft stage, and into every worker spawned later.

        Raises CheckpointError or ConfigError when it does not fit: nothing has changed then.
        """
        followers = [m for m in self.workers if m.slot.stage == "draft" and m.slot.rank is not None]
        calls = [worker.ask("load_head", "load_head", folder) for worker in followers]
        digests: list[str] = await asyncio.gather(*calls)
        if len(set(digests)) > 1:
            raise ConfigError(
                f"{folder} is not the same exit head on every node of the draft ranks: found "
                f"{' and '.join(sorted({digest[:12] for digest in digests}))}; copy it again"
            )
        report: HeadReport = await self.leader.ask(
            "load_head", "load_head", folder, digests[0] if digests else None
        )
        self.set_head(folder)
        self._preparations.end()
        self.workers.spares.release()  # they have the head before
        self._preparations.start(self.leader)
        return replace(report, pipeline=self.workers.spec.pipeline)

    def keep_pages(self, num_pages: int) -> None:
        """Keeps the number of KV pages of the claimed workers."""
        self._agreement.go_on_with(num_pages)

    def adopt(self, *, epoch: int, kind: EpochKind, trouble: EesdError | None) -> None:
        """Goes on with the newest epoch of the claimed workers. `trouble`: they are not all in
        it."""
        self.epoch, self.kind, self.claimed_trouble = epoch, kind, trouble
        self._has_been_full = self._is_meeting = True
        if kind is EpochKind.DEGRADED:
            self._set_fallbacks()
            self._unprepared = {slot.name for slot in self._draft_slots}
        elif trouble is None:
            self._preparations.start(self.leader)

    async def start_epoch(self, *, timeout_s: float) -> None:
        """Fills empty slots and brings all workers into a new epoch. Workers that are lost before
        all have loaded are replaced within the same start."""
        self.epoch += 1
        operation = f"start of epoch {self.epoch}"
        await self._within(timeout_s, self._gather(operation), operation)
        self.kind = EpochKind.FULL
        self._has_been_full = True
        self._preparations.start(self.leader)

    async def start_degraded_epoch(self, *, timeout_s: float) -> None:
        """Brings the verify ranks and their fallbacks into a new epoch; `can_fall_back` holds.

        Raises the error of a fallback that cannot load.
        """
        self.epoch += 1
        operation = f"start of epoch {self.epoch} with fallbacks"
        self._set_fallbacks()
        self.spawned_s = time.monotonic()
        verify = [self.workers.at(slot) for slot in self._verify_slots]
        gathering = self._gather_fallbacks(verify, operation)
        start = self._while_alive([*verify, *self._fallbacks], gathering)
        await self._within(timeout_s, start, operation)
        self.kind = EpochKind.DEGRADED

    async def restore_draft(self, *, timeout_s: float) -> None:
        """Fills the draft stage's empty slots during a degraded epoch, and loads weights. When
        cancelled, it continues from there the next time.

        Raises PeerLost when it takes too long; workers that have not loaded, or were lost, are
        killed.
        """
        operation = "return of the draft stage"
        try:
            await self._within(timeout_s, self._fill(self._draft_slots, operation), operation)
        except (ConfigError, LeaseLost):
            raise
        except EesdError:  # they would fail again
            for worker in self._drafting():
                if worker.slot.name in self._unprepared or worker.failure.done():
                    self._kill(worker)
            raise

    async def trouble(self) -> EesdError:
        """Waits until the present epoch is broken; returns the cause."""
        return await self._diagnosis.trouble(self.engaged, epoch=self.epoch)

    async def end_epoch(self, trouble: EesdError, *, is_crash: bool = False) -> None:
        """Ends the epoch: streams end with its trouble, survivors leave, and workers that cannot
        are killed."""
        self._preparations.end()
        leaving = [self._leave_or_go(worker, trouble, is_crash=is_crash) for worker in self.engaged]
        await asyncio.gather(*leaving)
        for fallback in self._fallbacks:
            fallback.stop_beating()
        self._diagnosis.clear()
        self._fallbacks = ()
        self._is_meeting = False
        self.kind = EpochKind.NONE

    async def send_streams_on(self, reason: EesdError) -> None:
        """Ends all streams with a reason to be submitted again, and lets the last round end: a rank
        that leaves in the middle of a round may wait for one that has left."""
        try:
            async with asyncio.timeout(self._timings.leave_s):
                await self.leader.ask("evict", "evict", None, reason)
                await self.leader.ask("halt", "halt")
        except (EngineError, TimeoutError) as error:
            logger.warning("not halted: epoch=%d error=%r", self.epoch, error)

    async def stop(self) -> None:
        self._preparations.end()
        await self.workers.release_all()
        await asyncio.to_thread(self.workers.placement_groups.remove)

    def _set_fallbacks(self) -> None:
        hosts = {slot.name for slot in self._verify_slots[: len(self._draft_slots)]}
        self._fallbacks = tuple(m.fallback() for m in self.workers if m.slot.name in hosts)

    async def _leave_or_go(self, worker: Worker, trouble: EesdError, *, is_crash: bool) -> None:
        host = worker.host or worker
        is_suspect = self._diagnosis.is_suspect(worker)
        is_broken = host.slot.name in self._diagnosis.broken
        is_sound = not (worker.is_dead or is_suspect or is_broken)
        if is_sound and not self._is_meeting:
            return  # it loads, and is in no epoch
        # A worker with a failed loop cannot stay, but its event loop still tells its streams why.
        has_left = await worker.leaves(trouble, is_crash=is_crash, is_suspect=is_suspect)
        if has_left and host.slot.name not in self._diagnosis.broken:
            return
        if host not in self.workers:
            return  # killed together with its fallback or host
        self._kill(host)
        if not await self.workers.fill_from_spares(host.slot):
            self.workers.start_spawn(host.slot, f"start of epoch {self.epoch + 1}")

    def _kill(self, worker: Worker) -> None:
        self.workers.kill(worker)
        self._unprepared.discard(worker.slot.name)

    def _drafting(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.slot.stage == "draft")

    def _is_late(self, slot: RankSlot) -> bool:
        return self.workers.is_empty(slot) or slot.name in self._unprepared

    async def _gather(self, operation: str) -> None:
        self.spawned_s = time.monotonic()
        slots = self.workers.slots
        num_pages = self._agreement.settle(await self._fill(slots, operation))
        leader, *ranks = [self.workers.at(slot) for slot in slots]
        await self._while_alive(
            [leader, *ranks], self._meet(leader, ranks, operation, num_pages=num_pages)
        )

    async def _gather_fallbacks(self, verify: Sequence[Worker], operation: str) -> None:
        workers = [*verify, *self._fallbacks]
        require_equal_ranks(
            await _results({m.slot.name: self._prepared(m, operation) for m in workers})
        )
        capacity = self.kv_capacity
        assert capacity is not None, "a full epoch came before"
        leader, *followers = self._fallbacks
        await self._meet(leader, [*followers, *verify], operation, num_pages=capacity.num_pages)

    async def _fill(self, slots: Sequence[RankSlot], operation: str) -> dict[str, LoadedRank]:
        """Fills empty slots, and waits until every worker has loaded."""

        async def fill(slot: RankSlot) -> None:
            with self._diagnosis.blaming(slot.name):
                await self.workers.fill(slot, operation)
            self.spawned_s = time.monotonic()
            if slot.stage == "draft":
                self._unprepared.add(slot.name)

        async def prepare(worker: Worker) -> LoadedRank:
            with self._diagnosis.blaming(worker.slot.name):
                return await self._prepared(worker, operation)

        filler = SlotFiller(
            self.workers,
            fill=fill,
            prepare=prepare,
            may_replace=lambda slot: not self._has_fallback_for(slot),
            operation=operation,
        )
        return await filler.run(slots)

    def _has_fallback_for(self, slot: RankSlot) -> bool:
        """Returns whether streams need not wait for a new worker in this slot."""
        is_full = self.kind is EpochKind.NONE and self._has_been_full
        return self._parallel.fallback and slot.stage == "draft" and is_full

    async def _prepared(self, worker: Worker, operation: str) -> LoadedRank:
        """Lets a worker load what it has not loaded; returns what it holds."""
        loaded: LoadedRank = await worker.ask(
            "prepare", operation, *self._preparations.cost_known_to(worker)
        )
        self._unprepared.discard(worker.slot.name)
        return loaded

    async def _meet(
        self, leader: Worker, ranks: Sequence[Worker], operation: str, *, num_pages: int
    ) -> None:
        store = await leader.ask("host_store", operation)
        epoch = Epoch(
            number=self.epoch,
            store=store,
            num_verify_ranks=self._parallel.verify_tensor_parallel_size,
            num_draft_ranks=len(self._draft_slots),
            timeout_s=self._parallel.timeout_s,
            num_pages=num_pages,
            is_degraded=bool(self._fallbacks),
        )
        await _all(
            [
                self._take_part(leader, "connect", operation, epoch),
                *[self._take_part(rank, "join", operation, epoch) for rank in ranks],
            ]
        )
        await self._take_part(leader, "join", operation, epoch)
        for worker in (leader, *ranks):
            worker.joined(self.epoch)

    async def _take_part(self, worker: Worker, method: str, operation: str, epoch: Epoch) -> None:
        """A fallback that fails has no slot, and a host that may be in good health."""
        with self._diagnosis.blaming(None if worker.host is not None else worker.slot.name):
            await worker.ask(method, operation, epoch)

    async def _within(
        self, timeout_s: float, work: Coroutine[Any, Any, object], operation: str
    ) -> None:
        """Runs the work; raises PeerLost when it takes too long."""
        working = asyncio.ensure_future(work)
        keeping = asyncio.ensure_future(self.workers.placement_groups.keep())
        try:
            await asyncio.wait({working}, timeout=timeout_s)
            if working.done():
                working.result()
                return
            absent = [slot.name for slot in self.workers.slots if self._is_late(slot)]
            missing = f" (missing: {', '.join(absent)})" if absent else ""
            raise PeerLost(
                peer=f"pipeline {self.workers.spec.pipeline}",
                operation=operation,
                reason=". ".join(
                    [
                        f"not all workers were there after {timeout_s:g} s{missing}",
                        *self.workers.placement_groups.missing,
                    ]
                ),
            )
        finally:
            tasks = (working, keeping)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _while_alive(
        self, workers: Sequence[Worker], work: Coroutine[Any, Any, None]
    ) -> None:
        """Runs the work of these workers; raises the loss of one as soon as it is known."""
        self._is_meeting = True
        working = asyncio.ensure_future(work)
        losses = [loss for worker in workers for loss in (worker.death, worker.failure)]
        try:
            await asyncio.wait({working, *losses}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            for worker in workers:
                if worker.is_dead or worker.failure.done():
                    if not worker.is_dead:
                        self._diagnosis.broken.add((worker.host or worker).slot.name)
                    raise worker.loss(f"epoch {self.epoch}")
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _all(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Runs calls concurrently; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _results(calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Runs calls concurrently, like `_all`; returns their results by name, in the given order."""
    results: dict[str, T] = {}

    async def run(name: str, call: Coroutine[Any, Any, T]) -> None:
        results[name] = await call

    await _all(run(name, call) for name, call in calls.items())
    return {name: results[name] for name in calls}
