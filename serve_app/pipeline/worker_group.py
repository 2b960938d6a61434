"""The workers of one pipeline: brought together into epochs, watched, and killed.

An epoch is full, with a worker in every slot, or degraded: fallbacks, which live in the verify
ranks' processes, take the draft stage's part while its own processes are replaced.

A group carries out what the supervisor decides. `workers` fills slots; neither depends on what the
workers compute, and for which requests.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from eesd_dist.errors import (
    ConfigError,
    EesdError,
    EngineError,
    LeaseLost,
    PeerLost,
)
from eesd_dist.workers.messages import ControlReport, Epoch, HeadReport, LoadedRank, LoopEnd
from serve_app.pipeline.agreement import Agreement, KvCapacity, require_equal_ranks
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.placement.rank_slots import RankSlot
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
        self._broken: set[str] = set()
        """Slots with a worker that cannot stay: its loop ended with a bug, with unknown damage, or
        it makes no progress."""
        self._accused: set[str] = set()
        """Group names of workers for which others have waited in vain while they went on: they are
        probably stuck."""
        self._fallbacks: tuple[Worker, ...] = ()
        """Fallbacks of a degraded epoch, rank 0 first; empty in a full one."""
        self._unprepared: set[str] = set()
        """Draft slots filled since the last full epoch, with weights still to be loaded."""
        self._agreement = Agreement(workers.spec.engine, pipeline=workers.spec.pipeline)
        self._has_been_full = False
        self._is_meeting = False
        """Workers may be in the present epoch, or on their way into it."""
        self._preparing: set[asyncio.Task[None]] = set()
        """Tasks that load fallbacks, and learn what a later recovery needs."""
        self._cost: tuple[str, Mapping[str, object]] | None = None
        """Node of the last drafting actor, and what its engine measured there."""
        self._epoch = 0
        self.kind = EpochKind.NONE
        """Kind of the present epoch."""
        self.claimed_trouble: EesdError | None = None
        """Error for which the epoch of claimed workers cannot go on; None if it can, and without
        claims."""
        self.crashed_leaders: deque[str] = deque(maxlen=8)
        """Names of the latest leaders that have reported their own crash."""
        self.spawned_s = 0.0
        """Time at which the last slot was filled, by the clock of `time.monotonic`."""

    @property
    def epoch(self) -> int:
        """The present epoch, or the last one."""
        return self._epoch

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
        self._end_preparations()
        self.workers.spares.release()  # they have the head before
        self._prepare_for_deaths()
        return replace(report, pipeline=self.workers.spec.pipeline)

    def continue_after(self, epoch: int) -> None:
        """Numbers the next epoch higher than the last one of the claimed workers, which are in none
        now."""
        self._epoch = epoch

    def keep_pages(self, num_pages: int) -> None:
        """Keeps the number of KV pages of the claimed workers."""
        self._agreement.go_on_with(num_pages)

    def adopt(self, *, epoch: int, kind: EpochKind, trouble: EesdError | None) -> None:
        """Goes on with the newest epoch of the claimed workers. `trouble`: they are not all in
        it."""
        self._epoch, self.kind, self.claimed_trouble = epoch, kind, trouble
        self._has_been_full = self._is_meeting = True
        if kind is EpochKind.DEGRADED:
            self._set_fallbacks()
            self._unprepared = {slot.name for slot in self._draft_slots}
        elif trouble is None:
            self._prepare_for_deaths()

    async def start_epoch(self, *, timeout_s: float) -> None:
        """Fills empty slots and brings all workers into a new epoch. Workers that are lost before
        all have loaded are replaced within the same start."""
        self._epoch += 1
        operation = f"start of epoch {self._epoch}"
        await self._within(timeout_s, self._gather(operation), operation)
        self.kind = EpochKind.FULL
        self._has_been_full = True
        self._prepare_for_deaths()

    async def start_degraded_epoch(self, *, timeout_s: float) -> None:
        """Brings the verify ranks and their fallbacks into a new epoch; `can_fall_back` holds.

        Raises the error of a fallback that cannot load.
        """
        self._epoch += 1
        operation = f"start of epoch {self._epoch} with fallbacks"
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
        ends = {
            worker: asyncio.ensure_future(worker.ask("ended", f"epoch {self._epoch}"))
            for worker in self.engaged
        }
        deaths = [worker.death for worker in self.engaged]
        failures = [worker.failure for worker in self.engaged]
        try:
            await asyncio.wait(
                {*ends.values(), *deaths, *failures}, return_when=asyncio.FIRST_COMPLETED
            )
            if not any(m.is_dead or m.failure.done() for m in self.engaged):
                await asyncio.wait(
                    deaths, timeout=self._timings.grace_s, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for pending in ends.values():
                pending.cancel()  # no effect on those that are done
        errors = {m: _result(end) for m, end in ends.items() if end.done()}
        self._broken = {
            m.slot.name
            for m, error in errors.items()
            if error is not None and not isinstance(error, PeerLost)
        }
        self._accused = {
            name
            for error in errors.values()
            if isinstance(error, PeerLost)
            for name in _members_in(error)
        } - {_member(worker) for worker in errors}
        for worker in self.engaged:
            if worker.failure.done():
                errors[worker] = worker.failure.result()
                self._broken.add((worker.host or worker).slot.name)
        return await self._own_fault() or self._culprit(errors)

    async def _own_fault(self) -> EesdError | None:
        """Returns the crash that the process of a dead worker has reported, if one has."""
        for worker in self.engaged:
            if worker.is_dead and (crash := await self.workers.crash_of(worker)):
                if worker is self.engaged[0]:
                    self.crashed_leaders.append(worker.name)
                return EngineError(f"{worker.label} crashed: {crash}")
        return None

    async def end_epoch(self, trouble: EesdError, *, is_crash: bool = False) -> None:
        """Ends the epoch: streams end with its trouble, survivors leave, and workers that cannot
        are killed."""
        self._end_preparations()
        leaving = [self._leave_or_go(worker, trouble, is_crash=is_crash) for worker in self.engaged]
        await asyncio.gather(*leaving)
        for fallback in self._fallbacks:
            fallback.stop_beating()
        self._broken.clear()
        self._accused.clear()
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
            logger.warning("not halted: epoch=%d error=%r", self._epoch, error)

    async def stop(self) -> None:
        self._end_preparations()
        await self.workers.release_all()
        await asyncio.to_thread(self.workers.placement_groups.remove)

    def _set_fallbacks(self) -> None:
        hosts = {slot.name for slot in self._verify_slots[: len(self._draft_slots)]}
        self._fallbacks = tuple(m.fallback() for m in self.workers if m.slot.name in hosts)

    async def _leave_or_go(self, worker: Worker, trouble: EesdError, *, is_crash: bool) -> None:
        host = worker.host or worker
        is_suspect = worker.failure.done() or _member(worker) in self._accused
        is_sound = not (worker.is_dead or is_suspect or host.slot.name in self._broken)
        if is_sound and not self._is_meeting:
            return  # it loads, and is in no epoch
        # A worker with a failed loop cannot stay, but its event loop still tells its streams why.
        has_left = await worker.leaves(trouble, is_crash=is_crash, is_suspect=is_suspect)
        if has_left and host.slot.name not in self._broken:
            return
        if host not in self.workers:
            return  # killed together with its fallback or host
        self._kill(host)
        if not await self.workers.fill_from_spares(host.slot):
            self.workers.start_spawn(host.slot, f"start of epoch {self._epoch + 1}")

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
            with self._blaming(slot.name):
                await self.workers.fill(slot, operation)
            self.spawned_s = time.monotonic()
            if slot.stage == "draft":
                self._unprepared.add(slot.name)

        async def prepare(worker: Worker) -> LoadedRank:
            with self._blaming(worker.slot.name):
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
        loaded: LoadedRank = await worker.ask("prepare", operation, *self._cost_known_to(worker))
        self._unprepared.discard(worker.slot.name)
        return loaded

    async def _meet(
        self, leader: Worker, ranks: Sequence[Worker], operation: str, *, num_pages: int
    ) -> None:
        store = await leader.ask("host_store", operation)
        epoch = Epoch(
            number=self._epoch,
            store=store,
            num_verify_ranks=len(self._verify_slots),
            num_draft_ranks=len(self._draft_slots),
            timeout_s=self._parallel.timeout_s,
            num_pages=num_pages,
            shares_gpu=any(0 < p.resources.get("GPU", 0) < 1 for p in self.workers.slots),
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
            worker.joined(self._epoch)

    async def _take_part(self, worker: Worker, method: str, operation: str, epoch: Epoch) -> None:
        """A fallback that fails has no slot, and a host that may be in good health."""
        with self._blaming(None if worker.host is not None else worker.slot.name):
            await worker.ask(method, operation, epoch)

    @contextmanager
    def _blaming(self, slot: str | None) -> Iterator[None]:
        """Marks the worker of this slot as broken if it fails by itself, since it would fail in the
        next epoch too."""
        try:
            yield
        except (PeerLost, ConfigError):
            raise
        except EesdError:
            if slot is not None:
                self._broken.add(slot)
            raise

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
                        self._broken.add((worker.host or worker).slot.name)
                    raise self._loss_of(worker)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _cost_known_to(self, worker: Worker) -> list[Mapping[str, object]]:
        """Returns what an earlier drafting actor has measured on the worker's node, if anything."""
        if worker.slot.rank is not None or self._cost is None:
            return []
        node_id, cost = self._cost
        return [cost] if node_id == worker.process_info.node_id else []

    def _prepare_for_deaths(self) -> None:
        """Prepares, during rounds, what streams would otherwise wait for."""
        preparations = [
            self._learn_cost(self.leader),
            self.workers.spares.keep(self._prepare_spare),
        ]
        if self._parallel.fallback:
            verify = [m for m in self.workers if m.slot.stage == "verify"]
            hosts = verify[: len(self._draft_slots)]
            preparations += [self._prepare_fallback(host) for host in hosts]
        for preparation in preparations:
            task = asyncio.ensure_future(preparation)
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    def _end_preparations(self) -> None:
        for task in self._preparing:
            task.cancel()

    async def _prepare_spare(self, spare: Worker) -> None:
        if spare.slot.stage == "draft":
            await spare.ask("prepare", "preparation", *self._cost_known_to(spare))

    async def _prepare_fallback(self, host: Worker) -> None:
        try:
            await host.ask("fallback", "preparation", "prepare")
        except EesdError as error:  # asked again when it is needed
            logger.warning("fallback not prepared: %s error=%s", host.label, error)

    async def _learn_cost(self, leader: Worker) -> None:
        """Keeps the costs for the next drafting actor on the node: measuring delays streams."""
        try:
            control: ControlReport = await leader.ask("control", "preparation")
        except EesdError as error:
            logger.warning("costs not learnt: %s error=%s", leader.label, error)
        else:
            cost = control.cost
            self._cost = None if cost is None else (leader.process_info.node_id, cost)

    def _culprit(self, ends: dict[Worker, EesdError | None]) -> EesdError:
        """Returns the most specific known cause: a death, then a bug, then an error of a rank."""
        for worker in self.engaged:
            if worker.is_dead:
                return self._loss_of(worker)
        failures = [(worker, error) for worker, error in ends.items() if error is not None]
        if not failures:
            return EngineError(f"epoch {self._epoch} of this pipeline ended by itself")
        bugs = [error for _, error in failures if not isinstance(error, PeerLost)]
        of_ranks = [error for worker, error in failures if worker.slot.rank is not None]
        return [*bugs, *of_ranks, failures[0][1]][0]

    def _loss_of(self, worker: Worker) -> EesdError:
        return worker.loss(f"epoch {self._epoch}")


def _member(worker: Worker) -> str:
    """Returns the name that a worker has in the groups of an epoch."""
    return f"{worker.slot.stage} rank {worker.slot.rank or 0}"


def _members_in(error: PeerLost) -> list[str]:
    """Returns the members that an error of a group names."""
    return [name.split(" on ")[0] for name in error.peer.split(" or ")]


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


def _result(end: "asyncio.Future[LoopEnd]") -> EesdError | None:
    if end.cancelled():
        return None
    error = end.exception()
    if error is not None:
        return error if isinstance(error, EesdError) else EngineError(repr(error))
    return end.result().error
