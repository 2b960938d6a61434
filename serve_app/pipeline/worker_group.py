"""The workers of one pipeline: brought together into epochs, watched, and killed.

An epoch is full, with a worker in every slot, or degraded: fallbacks, which live in the verify
ranks' processes, take the draft stage's part while its own processes are replaced.

A group handles workers and epochs. `workers` fills slots; neither depends on what the workers
compute, and for which requests.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eesd_dist.errors import PROCESS_DIED, ConfigError, EesdError, EngineError, PeerLost
from eesd_dist.workers.messages import ControlReport, Epoch, HeadReport, LoopEnd
from serve_app.pipeline.placement import RankSlot
from serve_app.pipeline.workers import LEAVE_TIMEOUT_S, Worker, Workers

logger = logging.getLogger(__name__)

_GRACE_S = 0.3
"""A killed rank's peers notice a moment before Ray reports which process died."""
_CALL_EVERY_S = 1.0
_BUSY_S = 10.0
"""Minimum timeout of a starting worker: opening libraries may block a process for seconds."""


class WorkerGroup:
    """Owns the workers of one pipeline and reports which are missing."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._pipeline = workers.spec.pipeline
        self._parallel = workers.spec.engine.parallel
        self._as_configured = workers.spec
        self._draft_slots = tuple(slot for slot in workers.slots if slot.stage == "draft")
        self._verify_slots = tuple(slot for slot in workers.slots if slot.stage == "verify")
        self._broken: set[str] = set()
        """Slots with a worker that cannot stay: its loop ended with a bug, with unknown damage, or
        it does not answer."""
        self._fallbacks: tuple[Worker, ...] = ()
        """Fallbacks of a degraded epoch, rank 0 first; empty in a full one."""
        self._unprepared: set[str] = set()
        """Draft slots filled since the last full epoch, with weights still to be loaded."""
        self._has_been_full = False
        self._preparing: set[asyncio.Task[None]] = set()
        """Tasks that load fallbacks, and learn what a later recovery needs."""
        self._cost: tuple[str, Mapping[str, object]] | None = None
        """Node of the last drafting actor, and what its engine measured there."""
        self._epoch = 0
        self._spawned_s = 0.0
        """When the last slot was filled, by the clock of `time.monotonic`."""

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def spawned_s(self) -> float:
        return self._spawned_s

    @property
    def drafter(self) -> Worker:
        """Leader of the present epoch, or the last one. Raises PeerLost if it is gone."""
        if not self._fallbacks:
            return self.workers.at(self.workers.slots[0])
        leader = self._fallbacks[0]
        if self.workers.at((leader.host or leader).slot) is not leader.host:
            raise PeerLost(peer=leader.slot.name, operation="call", reason="its process is gone")
        return leader

    @property
    def is_degraded(self) -> bool:
        """Whether the present epoch, or the last one, has fallbacks."""
        return bool(self._fallbacks)

    @property
    def can_fall_back(self) -> bool:
        """Whether the draft stage is missing, or not ready, and all verify ranks are there."""
        is_empty = self.workers.is_empty
        return (
            self._parallel.fallback
            and self._has_been_full
            and not any(is_empty(slot) for slot in self._verify_slots)
            and any(is_empty(p) or p.name in self._unprepared for p in self._draft_slots)
        )

    @property
    def has_other_head(self) -> bool:
        """Whether new workers get another exit head than the configured one."""
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
        asked = [worker.ask("load_head", "load_head", folder) for worker in followers]
        digests: list[str] = await asyncio.gather(*asked)
        if len(set(digests)) > 1:
            raise ConfigError(
                f"{folder} is not the same exit head on every node of the draft ranks: found "
                f"{' and '.join(sorted({digest[:12] for digest in digests}))}; copy it again"
            )
        report: HeadReport = await self.drafter.ask(
            "load_head", "load_head", folder, digests[0] if digests else None
        )
        self.set_head(folder)
        return replace(report, pipeline=self._pipeline)

    async def start_epoch(self, *, timeout_s: float) -> None:
        """Fills empty slots and brings all workers into a new epoch."""
        self._epoch += 1
        self._fallbacks = ()
        operation = f"start of epoch {self._epoch}"
        keeping = asyncio.ensure_future(self.workers.placement_groups.keep())
        try:
            async with asyncio.timeout(timeout_s):
                await self._while_all_answer(self._gather(operation))
        except TimeoutError as error:
            raise PeerLost(
                peer=f"pipeline {self._pipeline}",
                operation=operation,
                reason=". ".join(
                    [
                        f"not all workers were there after {timeout_s:g} s",
                        *self.workers.placement_groups.missing,
                    ]
                ),
            ) from error
        finally:
            keeping.cancel()
        self._has_been_full = True
        self._unprepared.clear()
        self._prepare_for_deaths()

    async def start_degraded_epoch(self, *, timeout_s: float) -> None:
        """Brings the verify ranks and their fallbacks into a new epoch; `can_fall_back` holds.

        Raises the error of a fallback that cannot load.
        """
        self._epoch += 1
        operation = f"start of epoch {self._epoch} with fallbacks"
        verify = [self.workers.at(slot) for slot in self._verify_slots]
        self._fallbacks = tuple(host.fallback() for host in verify[: len(self._draft_slots)])
        self._spawned_s = time.monotonic()
        drafter, *followers = self._fallbacks
        try:
            async with asyncio.timeout(timeout_s):
                meeting = self._meet(drafter, [*followers, *verify], operation)
                await self._while_all_answer(meeting)
        except TimeoutError as error:
            raise PeerLost(
                peer=f"pipeline {self._pipeline}",
                operation=operation,
                reason=f"not all workers were there after {timeout_s:g} s",
            ) from error

    async def replace_drafters(self, *, timeout_s: float) -> None:
        """Fills the draft stage's empty slots during a degraded epoch, and loads weights. When
        cancelled, it continues from there the next time.

        Raises PeerLost when either takes too long; a worker that does not load is killed.
        """
        operation = "return of the draft stage"
        keeping = asyncio.ensure_future(self.workers.placement_groups.keep())
        try:
            empty = [slot for slot in self._draft_slots if self.workers.is_empty(slot)]
            await _all(
                self._fill_in_background(slot, operation, timeout_s=timeout_s) for slot in empty
            )
            unprepared = [slot for slot in self._draft_slots if slot.name in self._unprepared]
            await _all(self._prepare(p, operation, timeout_s=timeout_s) for p in unprepared)
        finally:
            keeping.cancel()

    async def _gather(self, operation: str) -> None:
        workers = self.workers
        self._spawned_s = time.monotonic()
        empty = [slot for slot in workers.slots if workers.is_empty(slot)]
        await _all(self._fill(slot, operation) for slot in empty)
        drafter, *ranks = [workers.at(slot) for slot in workers.slots]
        await self._meet(drafter, ranks, operation)

    async def _fill(self, slot: RankSlot, operation: str) -> None:
        """Fills a slot; a draft rank loads at once, a verify rank when the epoch begins."""
        await self.workers.fill(slot, operation)
        self._spawned_s = time.monotonic()
        if slot.stage == "draft":
            self._unprepared.add(slot.name)
            worker = self.workers.at(slot)
            await worker.ask("prepare", operation, *self._cost_known_to(worker))
            self._unprepared.discard(slot.name)

    async def _meet(self, drafter: Worker, ranks: Sequence[Worker], operation: str) -> None:
        store = await drafter.ask("host_store", operation)
        epoch = Epoch(
            number=self._epoch,
            store=store,
            num_verify_ranks=len(self._verify_slots),
            num_draft_ranks=len(self._draft_slots),
            timeout_s=self._parallel.timeout_s,
            shares_gpu=any(0 < p.resources.get("GPU", 0) < 1 for p in self.workers.slots),
            is_degraded=self.is_degraded,
        )
        await _all(
            [
                self._take_part(drafter, "connect", operation, epoch),
                *[self._take_part(rank, "join", operation, epoch) for rank in ranks],
            ]
        )
        await self._take_part(drafter, "join", operation, epoch)

    async def _take_part(self, worker: Worker, method: str, operation: str, epoch: Epoch) -> None:
        """Marks a worker that fails by itself as broken, since it would fail in the next epoch too;
        not a fallback, which has no slot and a host that may be in good health."""
        try:
            await worker.ask(method, operation, epoch)
        except (PeerLost, ConfigError):
            raise
        except EesdError:
            if worker.host is None:
                self._broken.add(worker.slot.name)
            raise

    async def trouble(self) -> EesdError:
        """Waits until this epoch is broken; returns the cause."""
        ends = {
            worker: asyncio.ensure_future(worker.ask("ended", f"epoch {self._epoch}"))
            for worker in self._engaged
        }
        timeout_s = self._parallel.timeout_s
        silences = {
            m: asyncio.ensure_future(self._silence_of(m, timeout_s=timeout_s))
            for m in self._engaged
        }
        deaths = [worker.death for worker in self._engaged]
        waiting = {*ends.values(), *silences.values(), *deaths}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not any(worker.is_dead for worker in self._engaged):
                await asyncio.wait(deaths, timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pending in (*ends.values(), *silences.values()):
                pending.cancel()  # no effect on those that are done
        errors = {m: _result(end) for m, end in ends.items() if end.done()}
        self._broken = {
            m.slot.name
            for m, error in errors.items()
            if error is not None and not isinstance(error, PeerLost)
        }
        for worker, silence in silences.items():
            if silence.done() and not silence.cancelled() and worker not in errors:
                errors[worker] = silence.result()
                self._broken.add(worker.slot.name)
        return self._culprit(errors)

    async def _while_all_answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work; raises PeerLost as soon as a worker that takes part is frozen. Loading is
        done in threads, so a worker that loads answers calls."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._first_silence())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise watching.result()
            working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _first_silence(self) -> EesdError:
        """Watches all workers, those that are spawned during the wait too."""
        calls: dict[Worker, asyncio.Task[EesdError]] = {}
        try:
            while True:
                for worker in {m.host or m: None for m in self._engaged if not m.is_dead}:
                    if worker not in calls:
                        calls[worker] = asyncio.ensure_future(self._silence_while_busy(worker))
                await asyncio.sleep(_CALL_EVERY_S)
                for call in calls.values():
                    if call.done():
                        return call.result()
        finally:
            for call in calls.values():
                call.cancel()

    async def _silence_while_busy(self, worker: Worker) -> EesdError:
        timeout_s = max(self._parallel.timeout_s, _BUSY_S)
        return await self._silence_of(worker, timeout_s=timeout_s)

    async def _silence_of(self, worker: Worker, *, timeout_s: float) -> EesdError:
        """Returns when it has not answered a call in time: it is frozen, or cut off. Its peers
        cannot always tell: they wait for rounds as long as the link is up."""
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await worker.ask("process_info", "call")
            except TimeoutError:
                return PeerLost(
                    peer=worker.label,
                    operation="call",
                    reason=f"no answer within {timeout_s:g} s",
                    epoch=self._epoch,
                )
            except EngineError as error:  # `death` reports its death too
                return error
            await asyncio.sleep(_CALL_EVERY_S)

    async def halt(self) -> None:
        """Lets the last round end, after its streams were evicted: a rank that leaves in the middle
        of a round may wait for one that has left."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self.drafter.ask("halt", "halt")
        except (EngineError, TimeoutError) as error:
            logger.warning("not halted: epoch=%d error=%r", self._epoch, error)

    async def end_epoch(self) -> None:
        """Ends the epoch: survivors leave it, and workers that cannot are killed."""
        await asyncio.gather(*[self._leave_or_go(worker) for worker in self._engaged])
        self._broken.clear()

    async def _leave_or_go(self, worker: Worker) -> None:
        if worker.slot.name not in self._broken and await worker.leaves():
            return
        host = worker.host or worker
        if host not in self.workers:
            return  # killed together with its fallback or host
        self._kill(host)
        self.workers.start_spawn(host.slot, f"start of epoch {self._epoch + 1}")

    async def stop(self) -> None:
        await self.workers.release_all()
        self.workers.placement_groups.remove()

    @property
    def _engaged(self) -> tuple[Worker, ...]:
        """Workers of the present epoch."""
        if not self._fallbacks:
            return tuple(self.workers)
        return (*self._fallbacks, *(m for m in self.workers if m.slot.stage == "verify"))

    def _kill(self, worker: Worker) -> None:
        self.workers.kill(worker)
        self._unprepared.discard(worker.slot.name)

    async def _fill_in_background(
        self, slot: RankSlot, operation: str, *, timeout_s: float
    ) -> None:
        await self.workers.fill_in_background(slot, operation, timeout_s=timeout_s)
        self._unprepared.add(slot.name)

    async def _prepare(self, slot: RankSlot, operation: str, *, timeout_s: float) -> None:
        worker = self.workers.at(slot)
        known = self._cost_known_to(worker)
        preparing = asyncio.ensure_future(worker.ask("prepare", operation, *known))
        silence = asyncio.ensure_future(self._silence_while_busy(worker))
        try:
            await asyncio.wait(
                {preparing, silence}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not preparing.done():
                self._kill(worker)
                raise (
                    silence.result()
                    if silence.done()
                    else PeerLost(
                        peer=worker.label,
                        operation=operation,
                        reason=f"its weights are not loaded after {timeout_s:g} s",
                    )
                )
            try:
                preparing.result()
            except (PeerLost, ConfigError):
                raise
            except EesdError:  # it would fail again
                self._kill(worker)
                raise
        finally:
            preparing.cancel()
            silence.cancel()
        self._unprepared.discard(slot.name)

    def _cost_known_to(self, worker: Worker) -> list[Mapping[str, object]]:
        """Returns what an earlier drafting actor has measured on the worker's node, if anything."""
        if worker.slot.rank is not None or self._cost is None:
            return []
        node_id, cost = self._cost
        return [cost] if node_id == worker.process_info.node_id else []

    def _prepare_for_deaths(self) -> None:
        """Prepares, during the first rounds, what streams would otherwise wait for."""
        preparations = [self._learn_cost(self.drafter)]
        if self._parallel.fallback:
            verify = [m for m in self.workers if m.slot.stage == "verify"]
            hosts = verify[: len(self._draft_slots)]
            preparations += [self._prepare_fallback(host.fallback()) for host in hosts]
        for preparation in preparations:
            task = asyncio.ensure_future(preparation)
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    async def _prepare_fallback(self, fallback: Worker) -> None:
        try:
            await fallback.ask("prepare", "preparation")
        except EesdError as error:  # asked again when it is needed
            logger.warning("not prepared: %s error=%s", fallback.label, error)

    async def _learn_cost(self, drafter: Worker) -> None:
        """Keeps the costs for the next drafting actor on the node: measuring delays streams."""
        try:
            control: ControlReport = await drafter.ask("control", "preparation")
        except EesdError as error:
            logger.warning("costs not learnt: %s error=%s", drafter.label, error)
        else:
            cost = control.cost
            self._cost = None if cost is None else (drafter.process_info.node_id, cost)

    def _culprit(self, ends: dict[Worker, EesdError | None]) -> EesdError:
        """Returns the most specific known cause: a death, then a bug, then an error of a rank."""
        operation = f"epoch {self._epoch}"
        for worker in self._engaged:
            if worker.is_dead:
                death = worker.death
                reason = PROCESS_DIED if death.cancelled() else death.result()
                return PeerLost(peer=worker.label, operation=operation, reason=reason)
        errors = [error for error in ends.values() if error is not None]
        bugs = [error for error in errors if not isinstance(error, PeerLost)]
        of_ranks = [
            error for m, error in ends.items() if error is not None and m.slot.rank is not None
        ]
        for candidates in (bugs, of_ranks, errors):
            if candidates:
                return candidates[0]
        return EngineError(f"{operation} of pipeline {self._pipeline} ended by itself")


async def _all(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Runs calls concurrently; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _result(end: "asyncio.Future[LoopEnd]") -> EesdError | None:
    if end.cancelled():
        return None
    error = end.exception()
    if error is not None:
        return error if isinstance(error, EesdError) else EngineError(repr(error))
    return end.result().error
