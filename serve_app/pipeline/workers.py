"""The workers of a pipeline: actors, each started in the bundle of its slot, called and killed.

Their worker group starts epochs and finds out why they end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from eesd_dist.config import EngineConfig
from eesd_dist.errors import (
    PROCESS_DIED,
    CapacityError,
    CheckpointError,
    ConfigError,
    EesdError,
    EngineError,
    PeerLost,
)
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import (
    LoadReport,
    ProcessInfo,
    RouterAdvice,
    RouterNews,
    TelemetryOptions,
)
from eesd_dist.workers.process import PROCESS_LOST, thread_environment
from eesd_dist.workers.rank_actor import RankActor
from eesd_dist.workers.roles import StageFactory
from serve_app.pipeline.fallback import FallbackHandle
from serve_app.pipeline.placement import RankSlot
from serve_app.pipeline.placement_groups import PlacementGroups

logger = logging.getLogger(__name__)

_NODE_DIED = "its node has died"
"""Why an actor died, if its node did; Ray's words for it."""

LEAVE_TIMEOUT_S = 8.0
"""A little longer than an actor waits until its loop ends."""
_PING_S = 2.0
"""An actor's event loop answers at once, whatever its loop of rounds does: an actor that does not
is frozen or cut off, and is not waited for."""
_LOAD_ANSWER_S = 1.0
_SPAWN_S = 15.0
"""First timeout of a new process, doubled for each retry. It may have been sent to a node that is
cut off, which Ray has not noticed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """How an actor of this pipeline is made."""

    pipeline: str
    engine: EngineConfig
    stages: StageFactory
    telemetry: TelemetryOptions
    ask_router: Callable[[RouterNews], Awaitable[RouterAdvice]] | None

    def with_head(self, folder: str) -> "WorkerSpec":
        """The same with another exit head."""
        model = self.engine.model.model_copy(update={"head": Path(folder)})
        return replace(self, engine=self.engine.model_copy(update={"model": model}))


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One actor in its slot."""

    slot: RankSlot
    handle: Any
    process_info: ProcessInfo
    death: asyncio.Future[str]
    """Done when the process behind the actor is gone; says why."""

    load: LoadReport | None = None
    """Progress of its weights at the last call."""
    host: "Worker | None" = None
    """Of a fallback: the verify rank in the same process."""

    @property
    def label(self) -> str:
        return f"{self.slot.name} (pid {self.process_info.pid} on {self.process_info.host})"

    @property
    def is_dead(self) -> bool:
        return self.death.done()

    def fallback(self) -> "Worker":
        """Returns the fallback in a verify rank's process; it dies with it."""
        name = f"fallback in {self.slot.name}"
        return Worker(
            slot=replace(self.slot, name=name, stage="draft", rank=self.slot.rank or None),
            handle=FallbackHandle(self.handle),
            process_info=self.process_info,
            death=self.death,
            host=self,
        )

    async def ask(self, method: str, operation: str, *args: object) -> Any:
        """Calls the actor; raises any failure as an EesdError that names it."""
        try:
            return await getattr(self.handle, method).remote(*args)
        except Exception as error:
            raise _ours(error, peer=self.label, operation=operation) from error

    async def ask_load(self) -> None:
        """Updates `load`, unless loading is over or no answer comes in time."""
        if self.is_dead or (self.load is not None and self.load.is_over):
            return
        try:
            async with asyncio.timeout(_LOAD_ANSWER_S):
                self.load = await self.ask("loading", "loading")
        except (EngineError, TimeoutError) as error:
            logger.info("loading progress unknown: %s error=%r", self.label, error)

    async def leaves(self) -> bool:
        """Asks it to leave its epoch; returns whether it did."""
        if self.is_dead:
            return False
        try:
            async with asyncio.timeout(_PING_S):
                await self.ask("process_info", "leave")
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                return bool(await self.ask("leave", "leave"))
        except (EngineError, TimeoutError) as error:
            logger.warning("does not leave: %s error=%r", self.label, error)
            return False


class Workers:
    """The worker in each slot, and the workers that are being spawned."""

    def __init__(
        self, placement_groups: PlacementGroups, slots: Sequence[RankSlot], *, spec: WorkerSpec
    ) -> None:
        self.placement_groups = placement_groups
        self.slots = tuple(slots)
        self.spec = spec
        """How later workers are made."""
        self._in_slot: dict[str, Worker] = {}
        self._coming: dict[str, asyncio.Task[Worker]] = {}
        """Tasks that spawn workers, by slot: they start while the survivors still leave."""

    def __iter__(self) -> Iterator[Worker]:
        """Iterates over the present workers, in the order of the slots."""
        return iter([self._in_slot[p.name] for p in self.slots if p.name in self._in_slot])

    @property
    def are_complete(self) -> bool:
        """Whether every slot has a worker: then a new epoch needs no new process."""
        return not any(self.is_empty(slot) for slot in self.slots)

    def is_empty(self, slot: RankSlot) -> bool:
        worker = self._in_slot.get(slot.name)
        return worker is None or worker.is_dead

    def at(self, slot: RankSlot) -> Worker:
        """Returns the worker of a slot. Raises PeerLost if there is none."""
        worker = self._in_slot.get(slot.name)
        if worker is None or worker.is_dead:
            raise PeerLost(peer=slot.name, operation="call", reason="its process is gone")
        return worker

    async def loads(self) -> dict[str, LoadReport]:
        """Returns the loading progress by slot; the last known where no answer comes."""
        await asyncio.gather(*[worker.ask_load() for worker in self])
        return {m.slot.name: m.load for m in self if m.load is not None}

    async def fill(self, slot: RankSlot, operation: str) -> None:
        """Waits for a worker in an empty slot; raises what its start raised."""
        coming = self._coming.pop(slot.name, None)
        if coming is None:
            coming = asyncio.ensure_future(self._spawned(slot, operation))
        try:
            worker = await coming
        except asyncio.CancelledError:  # the worker may have started at the same moment
            _kill_spawned(coming)
            raise
        self._arrived(worker)

    async def fill_in_background(self, slot: RankSlot, operation: str, *, timeout_s: float) -> None:
        """As `fill`, but cancelling or a timeout does not stop a worker that is being spawned."""
        coming = self._coming.get(slot.name) or self.start_spawn(slot, operation)
        await asyncio.wait({coming}, timeout=timeout_s)
        if not coming.done():
            raise PeerLost(
                peer=slot.name,
                operation=operation,
                reason=". ".join(
                    [f"no worker after {timeout_s:g} s", *self.placement_groups.missing]
                ),
            )
        self._coming.pop(slot.name, None)
        self._arrived(coming.result())

    def start_spawn(self, slot: RankSlot, operation: str) -> asyncio.Task[Worker]:
        """Starts to spawn a worker for the slot."""
        coming = asyncio.ensure_future(self._spawned(slot, operation))
        self._coming[slot.name] = coming
        return coming

    def kill(self, worker: Worker) -> None:
        ray.kill(worker.handle)
        self._in_slot.pop(worker.slot.name, None)
        if not worker.is_dead:
            worker.death.cancel()

    async def release_all(self) -> None:
        """Ends all workers, those that are being spawned too."""
        await asyncio.gather(*[worker.leaves() for worker in self])
        for worker in self:
            self.kill(worker)
        coming = tuple(self._coming.values())
        self._coming.clear()
        for task in coming:
            _kill_spawned(task)
        await asyncio.gather(*coming, return_exceptions=True)

    def _arrived(self, worker: Worker) -> None:
        self._in_slot[worker.slot.name] = worker
        logger.info("spawned: %s", worker.label)

    async def _spawned(self, slot: RankSlot, operation: str) -> Worker:
        """Spawns a worker in the slot, with retries; raises what its start raised."""
        timeout_s = _SPAWN_S
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._spawn(slot, operation)
            except TimeoutError:
                logger.warning("%s does not start within %g s: tried again", slot.name, timeout_s)
                timeout_s *= 2

    async def _spawn(self, slot: RankSlot, operation: str) -> Worker:
        handle = self._create_actor(slot)
        try:
            process_info = await handle.process_info.remote()
        except BaseException as error:
            ray.kill(handle)  # or it keeps the bundle that the next attempt needs
            if isinstance(error, Exception):
                raise _ours(error, peer=slot.name, operation=operation) from error
            raise
        return Worker(
            slot=slot,
            handle=handle,
            process_info=process_info,
            death=asyncio.ensure_future(_death_of(handle)),
        )

    def _create_actor(self, slot: RankSlot) -> Any:
        how = self.spec
        resources = dict(slot.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            # Restarted by the pipeline: Ray would report a death a second later.
            "max_restarts": 0,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": thread_environment(how.engine.parallel.num_threads)},
            "scheduling_strategy": self.placement_groups.strategy_for(slot),
        }
        name = f"{slot.name} of {how.pipeline}"
        common = {"name": name, "stages": how.stages, "telemetry": how.telemetry}
        if slot.rank is None:
            drafter = ray.remote(DraftActor).options(**options)
            return drafter.remote(how.engine, **common, ask_router=how.ask_router)
        rank = ray.remote(RankActor).options(**options)
        return rank.remote(how.engine, **common, stage=slot.stage, rank=slot.rank)


def _kill_spawned(coming: asyncio.Task[Worker]) -> None:
    """Ends a worker that is no longer needed: it would keep the bundle that the next one needs."""
    if not coming.cancel() and not coming.cancelled() and coming.exception() is None:
        worker = coming.result()
        ray.kill(worker.handle)
        worker.death.cancel()


async def _death_of(handle: Any) -> str:
    try:
        await handle.forever.remote()
    except ray.exceptions.RayError as error:
        return _why_gone(error)
    return PROCESS_DIED


def _ours(error: Exception, *, peer: str, operation: str) -> EesdError:
    """Converts Ray's exceptions."""
    cause = getattr(error, "cause", None)
    for candidate in (error, cause):
        if isinstance(candidate, EesdError) and not isinstance(candidate, CapacityError):
            ours = _plain(candidate)
            # A folder may be intact on one node and damaged on another.
            return ConfigError(f"{peer}: {ours}") if isinstance(ours, CheckpointError) else ours
    if isinstance(error, PROCESS_LOST):
        return PeerLost(peer=peer, operation=operation, reason=_why_gone(error))
    return EngineError(f"{peer} failed during {operation}: {cause or error!r}")


def _why_gone(error: ray.exceptions.RayError) -> str:
    """A process that could not be built reports why in its last line; a killed one cannot."""
    if _NODE_DIED in str(error):
        return _NODE_DIED
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"{PROCESS_DIED}: ended by Ray, since its node ran out of memory"
    if isinstance(error, ray.exceptions.ActorUnavailableError):  # Ray cannot tell which
        return f"{PROCESS_DIED}, or the link to it"
    if not getattr(error, "actor_init_failed", False):
        return PROCESS_DIED
    return f"it could not be started: {str(error).strip().splitlines()[-1]}"


def _plain(error: EesdError) -> EesdError:
    """Removes the class that Ray derives from the error's class and its own."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, EesdError) else error
