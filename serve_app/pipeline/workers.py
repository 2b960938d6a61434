"""The workers of a pipeline: detached actors, each started in the bundle of its slot.

A worker outlives the supervisor that started it: it holds a lease, which heartbeats renew, and
another supervisor may claim it. The worker group starts epochs and finds out why they end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray

from cluster.ray_compat import actor_class
from eesd_dist.config import EngineConfig
from eesd_dist.errors import (
    EesdError,
    EngineError,
    PeerLost,
)
from eesd_dist.workers.crash_report import crash_report, last_words, require_room
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import (
    Lease,
    ProcessInfo,
    RouterAdvice,
    RouterNews,
    TelemetryOptions,
    Tenancy,
    WorkerIdentity,
)
from eesd_dist.workers.process import thread_environment
from eesd_dist.workers.rank_actor import RankActor
from eesd_dist.workers.roles import StageFactory
from eesd_dist.workers.tenure import detached_tenure, pipeline_prefix
from serve_app.pipeline.placement.placement_groups import PlacementGroups
from serve_app.pipeline.placement.rank_slots import LEADER, RankSlot
from serve_app.pipeline.spares import Spares
from serve_app.pipeline.timings import Timings
from serve_app.pipeline.worker import Worker, converted, death_of, pid_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Description from which an actor of this pipeline is made."""

    app: str
    namespace: str
    """Ray's namespace of the workers' names."""
    pipeline: str
    digest: str
    """Digest of the configuration: only a supervisor with the same one may claim the workers."""
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


class Workers:
    """The worker in each slot, and the workers that are being spawned."""

    def __init__(
        self,
        placement_groups: PlacementGroups,
        slots: Sequence[RankSlot],
        *,
        spec: WorkerSpec,
        require_room: Callable[[], None] = require_room,
    ) -> None:
        """`require_room` raises EngineError where the disks of this node are full."""
        self._require_room = require_room
        self.placement_groups = placement_groups
        self.slots = tuple(slot for slot in slots if not slot.is_spare)
        self.spares = Spares(
            [slot for slot in slots if slot.is_spare],
            spawn=self._spawned,
            period_s=spec.timings.max_retry_s,
        )
        self._bundles = {slot.name: slot for slot in slots}
        """The slot with the bundle, by the name of the slot that uses it: a spare brings its
        own, and leaves that of the lost worker to the next spare."""
        self.spec = spec
        """Description from which later workers are made."""
        self.start_s: float | None = None
        """Seconds that the start of all workers took; None before the first."""
        self._in_slot: dict[str, Worker] = {}
        self._coming: dict[str, asyncio.Task[Worker]] = {}
        """Tasks that spawn workers, by slot: they start while the survivors still leave."""

    def lease(self) -> Lease:
        """Returns what every heartbeat renews; workers log at the level of this process."""
        spec = self.spec
        return Lease(
            owner=spec.owner,
            seconds=spec.timings.lease_s,
            start_s=self.start_s,
            log_level=logging.getLevelName(logging.getLogger("serve_app").level),
        )

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

    async def fill(self, slot: RankSlot, operation: str) -> None:
        """Waits for a worker in an empty slot; raises what its start raised. When this is
        cancelled, the worker still comes, and the next call waits for it."""
        if (lost := self._in_slot.pop(slot.name, None)) is not None:
            lost.end()  # it may live behind a cut link, and would keep the bundle
        if slot.name not in self._coming and await self.fill_from_spares(slot):
            return
        coming = self._coming.get(slot.name) or self.start_spawn(slot, operation)
        await asyncio.wait({coming})
        self._coming.pop(slot.name, None)
        self._in_slot[slot.name] = coming.result()
        logger.info("spawned: %s", coming.result().label)

    async def fill_from_spares(self, slot: RankSlot) -> bool:
        """Puts a spare into an empty slot; returns whether there was one."""
        spare = self.spares.take(slot)
        if spare is None:
            return False
        try:
            async with asyncio.timeout(self.spec.timings.ping_s):
                await spare.ask("take_slot", "start", slot.name, slot.rank)
        except (EesdError, TimeoutError) as error:
            logger.warning("not usable: %s error=%r", spare.label, error)
            spare.end()
            return False
        except BaseException:  # cancelled
            spare.end()
            raise
        logger.info("taken: %s for %s", spare.label, slot.name)
        self._use_bundle(slot, self._bundles[spare.slot.name].name)
        spare.slot = slot
        self._in_slot[slot.name] = spare
        return True

    def _use_bundle(self, slot: RankSlot, bundle: str) -> None:
        """Exchanges the bundles of this slot and of the one that uses the bundle."""
        bundles = self._bundles
        other = next(name for name, of in bundles.items() if of.name == bundle)
        bundles[slot.name], bundles[other] = bundles[other], bundles[slot.name]

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
        identity = tenancy.identity
        slots = (*self.slots, *self.spares.slots)
        slot = next(slot for slot in slots if slot.name == identity.slot)
        handle = await asyncio.to_thread(ray.get_actor, name, namespace=self.spec.namespace)
        async with asyncio.timeout(self.spec.timings.ping_s):
            try:
                await handle.claim.remote(self.lease(), tenancy.owner)
            except Exception as error:
                raise converted(error, peer=slot.name, operation="claim") from error
        worker = self._worker(slot, handle, tenancy.process_info)
        self._use_bundle(slot, identity.bundle or slot.name)
        if slot.is_spare:
            self.spares.add(worker)
        else:
            self._in_slot[slot.name] = worker
        return worker

    def kill(self, worker: Worker) -> None:
        worker.end()
        self._in_slot.pop(worker.slot.name, None)

    async def release_all(self) -> None:
        """Ends all workers, those that are being spawned too."""
        await asyncio.gather(*[worker.leaves() for worker in self])
        for worker in self:
            self.kill(worker)
        self.spares.release()
        coming = tuple(self._coming.values())
        self._coming.clear()
        for task in coming:
            _kill_spawned(task)
        await asyncio.gather(*coming, return_exceptions=True)

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
        self._require_room()
        handle = self._create_actor(slot)
        try:
            process_info = await handle.process_info.remote()
        except BaseException as error:
            ray.kill(handle)  # or it keeps the bundle that the next attempt needs
            if isinstance(error, Exception):
                raise await self._failed_start(error, slot, operation) from error
            raise
        return self._worker(slot, handle, process_info)

    async def _failed_start(self, error: Exception, slot: RankSlot, operation: str) -> EesdError:
        """Returns why an actor could not be built: its own error, or what is known of its death."""
        failure = converted(error, peer=slot.name, operation=operation)
        if not isinstance(failure, PeerLost):
            return failure
        try:
            self._require_room()
        except EngineError as full:
            return full
        words = await asyncio.to_thread(last_words, pid) if (pid := pid_of(error)) else ""
        if not words:
            return failure
        reason = f"{failure.reason}; its last words: {words}"
        return PeerLost(peer=slot.name, operation=operation, reason=reason)

    def _worker(self, slot: RankSlot, handle: Any, process_info: ProcessInfo) -> Worker:
        return Worker(
            slot=slot,
            handle=handle,
            process_info=process_info,
            death=asyncio.ensure_future(death_of(handle)),
            lease=self.lease,
            timings=self.spec.timings,
        )

    def _create_actor(self, slot: RankSlot) -> Any:
        how, bundle = self.spec, self._bundles[slot.name]
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
            "enable_task_events": False,  # the GCS keeps 100,000 calls otherwise: minutes of tokens
            "runtime_env": {"env_vars": thread_environment(how.engine.parallel.num_threads)},
            "scheduling_strategy": self.placement_groups.strategy_for(bundle),
        }
        identity = WorkerIdentity(
            app=how.app,
            pipeline=how.pipeline,
            slot=slot.name,
            digest=how.digest,
            bundle=bundle.name,
            mode=slot.mode,
        )
        common = {
            "name": f"{slot.name if slot.rank is not None else LEADER} of {how.pipeline}",
            "stages": how.stages,
            "telemetry": how.telemetry,
            "tenure": partial(
                detached_tenure,
                identity,
                owner=how.owner,
                namespace=how.namespace,
                lease_s=how.timings.lease_s,
            ),
        }
        engine = engine_on(slot, how.engine)
        if slot.rank is None:
            drafter = actor_class(DraftActor).options(**options)
            return drafter.remote(
                engine,
                **common,
                ask_router=how.ask_router,
                holds_verify_rank=slot.mode == "shared",
            )
        rank = actor_class(RankActor).options(**options)
        return rank.remote(engine, **common, stage=slot.stage, rank=slot.rank)


def engine_on(slot: RankSlot, engine: EngineConfig) -> EngineConfig:
    """Returns the configuration for a slot: with a part of a GPU, for that part of its memory."""
    gpu_share = slot.resources.get("GPU", 0.0)
    if not 0.0 < gpu_share < 1.0:
        return engine
    utilization = engine.cache.gpu_memory_utilization * gpu_share
    cache = engine.cache.model_copy(update={"gpu_memory_utilization": utilization})
    return engine.model_copy(update={"cache": cache})


def _kill_spawned(coming: asyncio.Task[Worker]) -> None:
    """Ends a worker that is no longer needed: it would keep the bundle that the next one needs."""
    if not coming.cancel() and not coming.cancelled() and coming.exception() is None:
        coming.result().end()
