"""A pipeline: one draft stage and one verify stage, kept ready, and the streams they feed.

The Serve replica is thin: it answers for a pipeline to ingresses, Serve, the router and operators.
Its `Supervisor` owns the actors and replaces what breaks; its `Streams` are the ledger from which a
live request can be resumed. It computes nothing and never sees text.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.exceptions import RayError

from eesd_dist.errors import EesdError, EngineError, PeerLost
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.types import (
    PROBE,
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from eesd_dist.workers.messages import (
    ControlReport,
    DraftStats,
    HeadReport,
    LoadReport,
    ProcessInfo,
    StreamItem,
)
from eesd_dist.workers.process import prepare_process, process_info
from eesd_dist.workers.roles import StageFactory
from serve_app.config import ServiceConfig
from serve_app.pipeline.drain import AskServe, Drained, Draining
from serve_app.pipeline.fallback import degraded_page
from serve_app.pipeline.kv_migration import Contacts, KvMigration
from serve_app.pipeline.relative_speed import SpeedOf
from serve_app.pipeline.streams import lost
from serve_app.pipeline.supervisor import DEGRADED, Supervisor
from serve_app.pipeline.workers import Worker
from serve_app.router import beat, find_peer_pipeline, found_again, router_handle

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """First item of a stream: from here on this pipeline is responsible for the request."""

    pipeline: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a pipeline emits tokens, and if not, why."""

    pipeline: str
    is_healthy: bool
    reason: str
    degraded: str = ""
    """Why a healthy pipeline is degraded; empty if it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    pipeline: str
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineControl:
    """What a pipeline's controllers decide from."""

    pipeline: str
    num_live: int
    control: ControlReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    name: str
    pid: int
    host: str
    node_id: str
    loaded_bytes: int | None
    """Of its share of the checkpoint; None before it has begun to load."""
    load_s: float | None
    peak_memory_bytes: int | None
    """Of its process until its weights were loaded, mapped files included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """A pipeline's state, for operators and the router."""

    pipeline: str
    pid: int
    """Of the Serve replica itself."""
    epoch: int
    is_ready: bool
    num_live: int
    num_interruptions: int
    last_trouble: str
    """What interrupted it last; empty if nothing has."""
    recovery_s: float | None
    """Seconds from that to the next token; None before the first."""
    address: str
    """Its Serve replica's id."""
    weight: float | None
    """Its speed, as measured at the start of its epoch; None if it was not measured."""
    draining: str
    """Why it takes no more requests; empty if it does."""
    workers: tuple[WorkerReport, ...]
    is_degraded: bool = False
    """Fallbacks in the verify ranks' processes take the draft stage's part."""
    degraded_s: float = 0.0
    """Seconds in degraded mode so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The pipeline's live requests, which end when it does, and the process of its replica."""

    pipeline: str
    process_info: ProcessInfo
    live: tuple[RequestId, ...]


class Pipeline:
    """Deployed by `serve_app.app`; Serve builds it inside a running event loop."""

    def __init__(self, config: ServiceConfig, stages: StageFactory) -> None:
        prepare_process()
        self._config = config
        self._router = router_handle(config)
        self._name = f"{config.app_name}-{uuid.uuid4().hex[:8]}"
        self._supervisor = Supervisor(
            config,
            stages,
            pipeline=self._name,
            router=self._router,
            find_peer_pipeline=self._find_peer_pipeline,
            publish_status=self._publish_status,
        )
        self._streams = self._supervisor.streams
        self._address: str = serve.get_replica_context().replica_id.unique_id
        self._speed = SpeedOf(self._of_drafter)
        self._draining = Draining(
            pipeline=self._name,
            address=self._address,
            answering_replica=AskServe(
                app=config.app_name,
                deployment=serve.get_replica_context().deployment,
                address=self._address,
            ),
            find_peer_pipeline=self._find_peer_pipeline,
            publish_status=self._publish_status,
            migrate=KvMigration(
                app=config.app_name,
                deployment=serve.get_replica_context().deployment,
                contacts=self.contacts,
                how=config.recovery.kv_migration,
                timeout_s=config.engine.parallel.timeout_s,
            ),
        )
        self._drain_watch = asyncio.ensure_future(self._draining.watch())
        self._heart = asyncio.ensure_future(self._beat())

    async def stream(
        self,
        request: Request,
        target: str | None = None,
        attempt: int = 0,
        must_take: bool = False,
        sender: str = "",
    ) -> AsyncGenerator[Admitted | StreamItem, None]:
        """Yields `Admitted` at once, then the tokens to the last, or as last item the error.

        `target` is for Serve, which has used it by now: this replica, if it existed. A higher
        `attempt` of the same sender displaces a lower one; `must_take` keeps a draining pipeline
        from migrating the stream at once. The stream ends when the router no longer hears of the
        `sender`.
        """
        del target
        try:
            yield Admitted(pipeline=self._name, address=self._address)
            stream = self._streams.stream(request, attempt=attempt, sender=sender)
            watched = self._draining.watched(stream, request.request_id, must_take=must_take)
            async with aclosing(watched) as parts:
                async for emissions in parts:
                    yield emissions
        except EesdError as error:
            yield error
        # At the end of a call Ray stops this whole process for as long as the caller is frozen.
        await self._streams.heard_again(sender)

    async def cancel(
        self, request_id: RequestId, attempt: int, sender: str, target: str | None = None
    ) -> str:
        """Cancels a stream, up to this attempt, that its sender cannot read any more. Returns the
        address of this replica."""
        del target
        self._streams.cancel(request_id, attempt=attempt, sender=sender)
        return self._address

    async def whoami(self, target: str | None = None) -> str:
        """Returns the address of the replica that a call for `target` reaches."""
        del target
        return self._address

    async def contacts(self, target: str | None = None) -> Contacts:
        """Returns its actors, for another pipeline that migrates its streams to this one.

        Raises PeerLost while the drafting actor is being replaced.
        """
        del target
        group = await self._supervisor.worker_group()
        leader = group.drafter
        if group.is_degraded:  # fallbacks have no peer rank: their streams are recomputed
            ranks = {f"{leader.slot.name} of {self._name}": leader.handle}
            return Contacts(pipeline=self._name, ranks=ranks)
        return Contacts(pipeline=self._name, ranks={m.slot.name: m.handle for m in group.workers})

    async def drain(self, name: str) -> Drained | None:
        """Drains this pipeline: its live requests continue in others, and it takes no more.

        Returns None when `name` is another pipeline. Raises ConfigError if there is no other.
        """
        return await self._draining.drain() if name == self._name else None

    async def undrain(self, name: str) -> str | None:
        """Takes requests again, and returns the name; None when it is another pipeline."""
        if name != self._name:
            return None
        await self._draining.undrain()
        return name

    async def health(self) -> Health:
        """Healthy if a round was completed lately, or is when it is tried now."""
        reason = await self._why_unhealthy()
        degraded = f"degraded: {DEGRADED}" if self._supervisor.is_degraded and not reason else ""
        return Health(pipeline=self._name, is_healthy=not reason, reason=reason, degraded=degraded)

    async def metrics(self) -> MetricsPage:
        """The drafting actor's metrics; an empty page while there is none."""
        try:
            text = await self._of_drafter("metrics")
        except EesdError as error:
            logger.warning("no metrics: pipeline=%s error=%s", self._name, error)
            text = b""
        if self._config.engine.parallel.fallback:
            text += degraded_page(
                is_degraded=self._supervisor.is_degraded, seconds=self._supervisor.degraded_s
            )
        return MetricsPage(pipeline=self._name, text=text)

    async def rounds(self) -> tuple[RoundStats, ...]:
        """The latest rounds' statistics, oldest first."""
        rounds: tuple[RoundStats, ...] = await self._of_drafter("rounds")
        return rounds

    async def control(self) -> PipelineControl:
        """Returns what the controllers of this pipeline decide from."""
        control: ControlReport = await self._of_drafter("control")
        if control.head is not None:
            control = replace(control, head=replace(control.head, pipeline=self._name))
        return PipelineControl(
            pipeline=self._name, num_live=self._streams.num_live, control=control
        )

    async def load_head(self, folder: str) -> HeadReport:
        """Drafts with another exit head from the next round on, and in epochs to come.

        Raises CheckpointError or ConfigError for a head that does not fit; the old one stays.
        """
        report = await self._supervisor.load_head(folder)
        await self._publish_status()
        logger.info("promoted: pipeline=%s head=%s", self._name, report.sha256[:12])
        return report

    async def flush(self) -> None:
        """Sends and writes what every worker still holds, before they are taken down."""
        for worker in (await self._supervisor.worker_group()).workers:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await worker.handle.flush.remote()
            except (TimeoutError, RayError) as error:
                logger.warning("spans not sent: %s error=%r", worker.label, error)

    async def state(self) -> PipelineState:
        group = await self._supervisor.worker_group()
        workers, loads = tuple(group.workers), await group.workers.loads()
        return PipelineState(
            pipeline=self._name,
            pid=os.getpid(),
            epoch=group.epoch,
            is_ready=self._supervisor.is_ready,
            num_live=self._streams.num_live,
            num_interruptions=self._supervisor.num_interruptions,
            last_trouble=str(self._supervisor.trouble)
            if self._supervisor.num_interruptions
            else "",
            recovery_s=self._supervisor.recovery_s,
            address=self._address,
            weight=self._speed.value,
            draining=self._draining.reason,
            workers=tuple(
                _worker_report(worker, loads.get(worker.slot.name)) for worker in workers
            ),
            is_degraded=self._supervisor.is_degraded,
            degraded_s=self._supervisor.degraded_s,
        )

    async def ledger(self) -> Ledger:
        return Ledger(pipeline=self._name, process_info=process_info(), live=self._streams.live)

    async def stats(self) -> DraftStats:
        stats: DraftStats = await self._of_drafter("stats")
        return stats

    async def _of_drafter(self, method: str) -> Any:
        drafter = (await self._supervisor.worker_group()).drafter
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await getattr(drafter.handle, method).remote()
        except TimeoutError as error:
            raise PeerLost(
                peer=drafter.label,
                operation=method,
                reason=f"no answer within {_ANSWER_TIMEOUT_S:g} s",
            ) from error
        except RayError as error:
            raise lost(drafter, error, operation=method) from error

    async def check_health(self) -> None:
        """Raises when this pipeline cannot recover: Serve then starts another."""
        await self._supervisor.check()

    async def _beat(self) -> None:
        """Sends heartbeats to the router."""
        while True:
            if self._supervisor.is_ready and not self._supervisor.is_degraded:
                await self._speed.ask((await self._supervisor.worker_group()).epoch)
            await self._publish_status()
            await asyncio.sleep(self._config.router.heartbeat_s)

    async def _publish_status(self) -> None:
        report = PipelineReport(
            pipeline_id=PipelineId(self._name),
            address=self._address,
            app=self._config.app_name,
            num_running=self._streams.num_live,
            is_ready=self._supervisor.is_ready,
            draining=bool(self._draining.reason),
            weight=self._speed.value,
            promotion=self._supervisor.promotion,
        )
        try:
            self._streams.cancel_silent(await beat(self._router, report))
        except PeerLost:
            self._router = await found_again(self._router, self._config)
        except EngineError as error:  # the pipeline works without the router
            logger.debug("heartbeat failed: error=%s", error)

    async def _find_peer_pipeline(self) -> PipelineReport | None:
        return await find_peer_pipeline(
            self._router, app=self._config.app_name, excluded=[PipelineId(self._name)]
        )

    async def _why_unhealthy(self) -> str:
        if not self._supervisor.is_ready:
            loading = await self._supervisor.loading()
            why = self._supervisor.why_unavailable()
            return f"{why}; loading: {loading}" if loading else why
        try:
            stats = await self.stats()
        except EesdError as error:
            return str(error)
        if time.time() - stats.last_round_unix_s < self._config.health.fresh_s:
            return ""
        if self._streams.num_suspects:
            return f"tests {self._streams.num_suspects} requests alone: one may break the engine"
        return await self._probe()

    async def _probe(self) -> str:
        """Generates one token to see whether rounds go through."""
        timeout_s = self._config.health.probe_timeout_s
        request = Request(
            request_id=RequestId(f"probe-{uuid.uuid4().hex}"),
            prompt=(TokenId(0),),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            speculation=SpeculationParams(mode="off"),
            workload=PROBE,
        )
        try:
            async with asyncio.timeout(timeout_s):
                async for item in self._streams.probe(request):
                    if isinstance(item, EesdError):
                        return f"a probe failed: {item}"
        except TimeoutError:
            return f"no round went through within {timeout_s:g} s"
        except EesdError as error:
            return f"a probe failed: {error}"
        return ""


def _worker_report(worker: Worker, load: LoadReport | None) -> WorkerReport:
    return WorkerReport(
        name=worker.slot.name,
        pid=worker.process_info.pid,
        host=worker.process_info.host,
        node_id=worker.process_info.node_id,
        loaded_bytes=None if load is None else load.bytes_done,
        load_s=None if load is None else load.seconds,
        peak_memory_bytes=None if load is None else load.peak_memory_bytes,
    )
