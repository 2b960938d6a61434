"""The workers of a pipeline: detached actors, each started in the bundle of its slot.

A worker outlives the supervisor that started it: it holds a lease, which heartbeats renew, and
another supervisor may claim it. The worker group starts epochs and finds out why they end.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

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
from eesd_dist.workers.crash_report import crash_report
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import (
    Lease,
    LoadReport,
    ProcessInfo,
    RouterAdvice,
    RouterNews,
    TelemetryOptions,
    Tenancy,
    WorkerIdentity,
    WorkerStatus,
)
from eesd_dist.workers.process import PROCESS_LOST, thread_environment
from eesd_dist.workers.rank_actor import RankActor
from eesd_dist.workers.roles import StageFactory
from eesd_dist.workers.tenure import detached_tenure, pipeline_prefix
from serve_app.pipeline.fallback import FallbackHandle
from serve_app.pipeline.placement import RankSlot
from serve_app.pipeline.placement_groups import PlacementGroups
from serve_app.pipeline.pulse import Pulse
from serve_app.pipeline.timings import Timings

logger = logging.getLogger(__name__)

_NODE_DIED = "its node has died"
"""Why an actor died, if its node did; Ray's words for it."""

_LOAD_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """How an actor of this pipeline is made."""

    app: str
    namespace: str
    """Ray's namespace of the workers' names."""
    pipeline: str
    digest: str
    """Of the configuration: only a supervisor with the same one may claim the workers."""
    owner: str
    """The supervisor's name in their leases."""
    node_id: str
    """The node of the supervisor."""
    engine: EngineConfig
    stages: StageFactory
    telemetry: TelemetryOptions
    ask_router: Callable[[RouterNews], Awaitable[RouterAdvice]] | None
    timings: Timings

    def with_head(self, folder: str) -> "WorkerSpec":
        """The same with another exit head."""
        model = self.engine.model.model_copy(update={"head": Path(folder)})
        return replace(self, engine=self.engine.model_copy(update={"model": model}))


@dataclass(kw_only=True, eq=False)
class Worker:
    """One actor in its slot, with its heartbeats; built inside a running event loop."""

    slot: RankSlot
    handle: Any
    process_info: ProcessInfo
    death: asyncio.Future[str]
    """Done when the process behind the actor is gone; says why."""
    lease: Callable[[], Lease]
    timings: Timings
    load: LoadReport | None = None
    """Progress of its weights at the last call."""
    host: "Worker | None" = None
    """Of a fallback: the verify rank in the same process."""

    def __post_init__(self) -> None:
        self._pulse = Pulse(self.timings)
        self.failure: asyncio.Future[EesdError] = asyncio.get_running_loop().create_future()
        """Done when it does not answer, or makes no progress."""
        self._beating = asyncio.ensure_future(self._beat())

    @property
    def name(self) -> str:
        """Unique; a worker that replaces it has another one, and a new supervisor the same."""
        return f"{self.slot.name} {self.process_info.actor_id}"

    @property
    def label(self) -> str:
        return f"{self.slot.name} (pid {self.process_info.pid} on {self.process_info.host})"

    @property
    def is_dead(self) -> bool:
        return self.death.done()

    @property
    def status(self) -> WorkerStatus:
        """The last heartbeat."""
        return self._pulse.status

    @property
    def still_s(self) -> float:
        """Seconds without progress, or without an answer."""
        return self._pulse.still_s

    def joined(self, epoch: int) -> None:
        self._pulse.joined(epoch)

    def stop_beating(self) -> None:
        self._beating.cancel()

    async def _beat(self) -> None:
        """Renews the lease and takes the pulse, until the worker is lost."""
        beat_s = self.timings.beat_s
        last_s = time.monotonic()
        call = asyncio.ensure_future(self.ask("beat", "heartbeat", self.lease()))
        try:
            while not (self.is_dead or self.failure.done()):
                await asyncio.wait({call}, timeout=beat_s)
                now_s = time.monotonic()
                # This process may have been stopped, and could then hear nothing.
                self._pulse.passed(min(now_s - last_s, 2 * beat_s))
                last_s = now_s
                if call.done():
                    self._hear(call)
                    await asyncio.sleep(beat_s)
                    call = asyncio.ensure_future(self.ask("beat", "heartbeat", self.lease()))
                if (failure := self._pulse.failure()) is not None and not self.failure.done():
                    self.failure.set_result(self._lost(*failure))
        finally:
            call.cancel()

    def _hear(self, call: "asyncio.Future[WorkerStatus]") -> None:
        error = call.exception()
        if error is None:
            self._pulse.heard(call.result())
        elif not isinstance(error, PeerLost) and not self.failure.done():
            # Another supervisor has claimed it.
            self.failure.set_result(error if isinstance(error, EesdError) else self._bug(error))

    def _bug(self, error: BaseException) -> EesdError:
        return EngineError(f"{self.label} failed during heartbeat: {error!r}")

    def _lost(self, operation: str, reason: str) -> PeerLost:
        epoch = self.status.epoch or None
        return PeerLost(peer=self.label, operation=operation, reason=reason, epoch=epoch)

    def fallback(self) -> "Worker":
        """Returns the fallback in a verify rank's process; it dies with it."""
        name = f"fallback in {self.slot.name}"
        return Worker(
            slot=replace(self.slot, name=name, stage="draft", rank=self.slot.rank or None),
            handle=FallbackHandle(self.handle),
            process_info=self.process_info,
            death=self.death,
            lease=self.lease,
            timings=self.timings,
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

    async def leaves(self, trouble: EesdError | None = None, *, is_crash: bool = False) -> bool:
        """Asks it to leave its epoch, for this reason; returns whether it did."""
        if self.is_dead:
            return False
        try:
            async with asyncio.timeout(self.timings.ping_s):
                await self.ask("process_info", "leave")
            async with asyncio.timeout(self.timings.leave_s):
                return bool(await self.ask("leave", "leave", trouble, is_crash))
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
        self.start_s: float | None = None
        """How long the start of all workers took; None before the first."""
        self._in_slot: dict[str, Worker] = {}
        self._coming: dict[str, asyncio.Task[Worker]] = {}
        """Tasks that spawn workers, by slot: they start while the survivors still leave."""

    def lease(self) -> Lease:
        spec = self.spec
        return Lease(owner=spec.owner, seconds=spec.timings.lease_s, start_s=self.start_s)

    def __iter__(self) -> Iterator[Worker]:
        """Iterates over the present workers, in the order of the slots."""
        return iter([self._in_slot[p.name] for p in self.slots if p.name in self._in_slot])

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

    async def crash_of(self, dead: Worker) -> str:
        """Returns what the process of a dead worker has reported as its own crash; empty if it was
        killed from outside, or if nothing on its node can tell."""
        node_id, pid = dead.process_info.node_id, dead.process_info.pid
        if node_id == self.spec.node_id:
            return await asyncio.to_thread(crash_report, pid)
        for worker in self:
            if worker.process_info.node_id != node_id or worker.is_dead:
                continue
            try:
                async with asyncio.timeout(self.spec.timings.ping_s):
                    return str(await worker.ask("crash_report", "crash report", pid))
            except (EngineError, TimeoutError) as error:
                logger.info("no crash report: worker=%s error=%r", dead.label, error)
        return ""

    def start_spawn(self, slot: RankSlot, operation: str) -> asyncio.Task[Worker]:
        """Starts to spawn a worker for the slot."""
        coming = asyncio.ensure_future(self._spawned(slot, operation))
        self._coming[slot.name] = coming
        return coming

    async def claim(self, name: str, tenancy: Tenancy) -> Worker:
        """Takes a worker over from a dead supervisor. Raises LeaseLost when another one was
        faster, PeerLost when the worker does not answer."""
        slot = next(slot for slot in self.slots if slot.name == tenancy.identity.slot)
        handle = await asyncio.to_thread(ray.get_actor, name, namespace=self.spec.namespace)
        async with asyncio.timeout(self.spec.timings.ping_s):
            try:
                await handle.claim.remote(self.lease(), tenancy.owner)
            except Exception as error:
                raise _ours(error, peer=slot.name, operation="claim") from error
        worker = self._worker(slot, handle, tenancy.process_info)
        self._in_slot[slot.name] = worker
        return worker

    def kill(self, worker: Worker) -> None:
        worker.stop_beating()
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
        timeout_s = self.spec.timings.spawn_s
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
        return self._worker(slot, handle, process_info)

    def _worker(self, slot: RankSlot, handle: Any, process_info: ProcessInfo) -> Worker:
        return Worker(
            slot=slot,
            handle=handle,
            process_info=process_info,
            death=asyncio.ensure_future(_death_of(handle)),
            lease=self.lease,
            timings=self.spec.timings,
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
            "lifetime": "detached",
            "name": f"{pipeline_prefix(how.app, how.pipeline)}{slot.name}/{uuid4().hex[:8]}",
            "namespace": how.namespace,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": thread_environment(how.engine.parallel.num_threads)},
            "scheduling_strategy": self.placement_groups.strategy_for(slot),
        }
        identity = WorkerIdentity(
            app=how.app, pipeline=how.pipeline, slot=slot.name, digest=how.digest
        )
        common = {
            "name": f"{slot.name} of {how.pipeline}",
            "stages": how.stages,
            "telemetry": how.telemetry,
            "tenure": partial(
                detached_tenure,
                identity,
                owner=how.owner,
                namespace=how.namespace,
                number=self.slots.index(slot),
                lease_s=how.timings.lease_s,
            ),
        }
        if slot.rank is None:
            drafter = ray.remote(DraftActor).options(**options)
            return drafter.remote(how.engine, **common, ask_router=how.ask_router)
        rank = ray.remote(RankActor).options(**options)
        return rank.remote(how.engine, **common, stage=slot.stage, rank=slot.rank)


def _kill_spawned(coming: asyncio.Task[Worker]) -> None:
    """Ends a worker that is no longer needed: it would keep the bundle that the next one needs."""
    if not coming.cancel() and not coming.cancelled() and coming.exception() is None:
        worker = coming.result()
        worker.stop_beating()
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
