"""A pipeline: one draft stage and one verify stage, kept ready.

The Serve replica is thin: it answers for a pipeline to Serve, the router, ingresses and operators.
Its `Supervisor` replaces what breaks. It computes nothing, and no token passes through it: when it
dies, streams go on, and the next replica claims its workers.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from eesd_dist.errors import ConfigError, EesdError, EngineError, PeerLost
from eesd_dist.routing.activity import NO_ACTIVITY
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.telemetry.span_records import SpanRecord
from eesd_dist.types import RequestId, RoundStats
from eesd_dist.workers.messages import (
    ControlReport,
    DraftStats,
    HeadReport,
    Lease,
)
from eesd_dist.workers.process import prepare_process, process_info, set_log_level
from eesd_dist.workers.roles import StageFactory
from serve_app.config import ServiceConfig, live_config
from serve_app.pipeline.assembly import Assembly
from serve_app.pipeline.claim import orphans_of
from serve_app.pipeline.drain import Drained, Draining
from serve_app.pipeline.interruptions import state_page
from serve_app.pipeline.kv_migration import Contacts, KvMigration
from serve_app.pipeline.relative_speed import SpeedOf
from serve_app.pipeline.reports import (
    Health,
    Ledger,
    MetricsPage,
    PipelineControl,
    PipelineState,
    WorkerReport,
    slow_kernel_notes,
)
from serve_app.pipeline.supervisor import DEGRADED, Supervisor
from serve_app.pipeline.timings import timings_of
from serve_app.pipeline.worker import Worker
from serve_app.router.actor import router_handle
from serve_app.router.calls import beat, find_peer_pipeline, found_again, promotion_of

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 3.0


class Pipeline:
    """Deployed by `serve_app.app`; Serve builds it inside a running event loop."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServiceConfig, stages: StageFactory
    ) -> None:
        prepare_process(config.log_format)
        self._config = config
        self._router = router_handle(config)
        owner = ray.get_runtime_context().get_actor_id() or ""
        lease = Lease(owner=owner, seconds=config.recovery.lease_s)
        orphans = await orphans_of(config, lease)
        name = f"{config.app_name}-{uuid.uuid4().hex[:8]}"
        self._name = name if orphans is None else orphans.pipeline
        promotion = await promotion_of(self._router, head_key=_head_key(config))
        self._speed = SpeedOf(self._of_leader)
        self._last_report_s = time.monotonic()
        """Time at which the router last took a heartbeat."""
        assembly = Assembly(
            config,
            stages,
            pipeline=self._name,
            owner=owner,
            router=self._router,
            orphans=orphans,
            head=None if promotion is None else promotion.head,
        )
        self._is_claiming = orphans is not None
        self._supervisor = Supervisor(
            assembly,
            waiting_for=lambda: assembly.waiting_for,
            pipeline=self._name,
            timings=timings_of(config),
            max_interruptions=config.recovery.max_interruptions,
            publish_status=self._publish_status,
        )
        self._supervisor.promotion = promotion
        self._draining = Draining(
            pipeline=self._name,
            num_live=self._num_live,
            find_peer_pipeline=self._find_peer_pipeline,
            publish_status=self._publish_status,
            migrate=KvMigration(
                contacts=self.contacts,
                how=config.recovery.kv_migration,
                timeout_s=config.engine.parallel.timeout_s,
            ),
        )
        self._finding: asyncio.Task[None] | None = None
        self._heart = asyncio.ensure_future(self._beat())

    async def __del__(self) -> None:
        """Called by Serve before it stops this replica: streams leave, then the workers end."""
        await self._draining.leave(timeout_s=self._config.recovery.drain_s)
        await self._supervisor.stop()
        self._heart.cancel()

    async def reconfigure(self, user_config: object) -> None:
        """Called by Serve with `user_config`. A wrong one is logged and changes nothing: an error
        here would end the replica."""
        try:
            set_log_level(live_config(user_config).log_level)  # workers follow with their heartbeat
        except ConfigError as error:
            logger.error("ignored: pipeline=%s %s", self._name, error)

    async def report(self) -> PipelineReport:
        """Returns what the router is told: for ingresses while the router is silent. Raises
        EngineError before there is a worker group."""
        self._supervisor.require_group()
        return self._report()

    async def contacts(self) -> Contacts:
        """Returns its actors, for a KV migration. Raises PeerLost while the drafting actor is being
        replaced."""
        self._supervisor.require_group().leader  # noqa: B018  # raises
        return Contacts(pipeline=self._name, ranks=self._ranks())

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
        """Healthy if every worker of the present epoch answers and makes progress."""
        reason = self._why_unavailable()
        notes = [f"degraded: {DEGRADED}"] if self._supervisor.is_degraded else []
        if (group := self._supervisor.group) is not None:
            notes += slow_kernel_notes(group.workers)
        degraded = ", ".join(notes)
        return Health(pipeline=self._name, is_healthy=not reason, reason=reason, degraded=degraded)

    async def metrics(self) -> MetricsPage:
        """The drafting actor's metrics, as long as there is one, and the state of the pipeline."""
        try:
            text = await self._of_leader("metrics")
        except EesdError as error:
            logger.warning("no metrics: pipeline=%s error=%s", self._name, error)
            text = b""
        supervisor = self._supervisor
        text += state_page(
            is_ready=supervisor.is_ready,
            num_interruptions=supervisor.interruptions.number,
            recovery_s=supervisor.interruptions.recovery_s,
            is_degraded=supervisor.is_degraded if self._config.engine.parallel.fallback else None,
            degraded_s=supervisor.degraded_s,
        )
        return MetricsPage(pipeline=self._name, text=text)

    async def rounds(self) -> tuple[RoundStats, ...]:
        """The latest rounds' statistics, oldest first."""
        rounds: tuple[RoundStats, ...] = await self._of_leader("rounds")
        return rounds

    async def spans(self, trace_ids: Collection[str]) -> tuple[SpanRecord, ...]:
        """Returns the spans of these traces that the workers keep and that answer."""
        group = self._supervisor.group
        if group is None:
            return ()
        workers = dict.fromkeys([*group.workers, *filter(None, [self._leader()])])

        async def of(worker: Worker) -> tuple[SpanRecord, ...]:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    spans: tuple[SpanRecord, ...] = await worker.ask("spans", "spans", trace_ids)
            except (TimeoutError, EesdError):
                return ()
            return spans

        answers = await asyncio.gather(*[of(worker) for worker in workers])
        return tuple(span for spans in answers for span in spans)

    async def control(self) -> PipelineControl:
        """Returns what the controllers of this pipeline decide from."""
        control: ControlReport = await self._of_leader("control")
        if control.head is not None:
            control = replace(control, head=replace(control.head, pipeline=self._name))
        return PipelineControl(
            pipeline=self._name, num_live=await self._num_live(), control=control
        )

    async def load_head(self, folder: str) -> HeadReport:
        """Drafts with another exit head from the next round on, and in epochs to come.

        Raises CheckpointError or ConfigError for a head that does not fit; the old one stays.
        """
        pause_s = self._config.recovery.pause_for(self._supervisor.start_s)
        report = await self._supervisor.load_head(
            folder, head_key=_head_key(self._config), pause_s=pause_s
        )
        await self._publish_status()
        logger.info("promoted: pipeline=%s head=%s", self._name, report.sha256[:12])
        return report

    async def flush(self) -> None:
        """Sends and writes what every worker still holds, before they are taken down."""
        group = self._supervisor.group
        for worker in () if group is None else group.workers:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await worker.handle.flush.remote()
            except (TimeoutError, RayError) as error:
                logger.warning("spans not sent: %s error=%r", worker.label, error)

    async def state(self) -> PipelineState:
        return self._state(num_live=await self._num_live())

    def _state(self, *, num_live: int) -> PipelineState:
        """Returns the state of one moment: nothing is waited for in between."""
        supervisor = self._supervisor
        group, leader = supervisor.require_group(), self._leader()
        return PipelineState(
            pipeline=self._name,
            pid=os.getpid(),
            epoch=group.epoch,
            is_ready=supervisor.is_ready,
            num_live=num_live,
            unavailable=self._why_unavailable(),
            num_interruptions=supervisor.interruptions.number,
            last_trouble=supervisor.interruptions.last,
            recovery_s=supervisor.interruptions.recovery_s,
            start_s=supervisor.start_s,
            leader="" if leader is None else leader.name,
            weight=self._speed.value,
            draining=self._draining.reason,
            workers=tuple(WorkerReport.of(worker) for worker in group.workers),
            is_degraded=supervisor.is_degraded,
            degraded_s=supervisor.degraded_s,
            last_trouble_unix_s=supervisor.interruptions.trouble_unix_s,
            kv_cache=group.kv_capacity,
            spares=tuple(WorkerReport.of(spare) for spare in group.workers.spares.ready),
        )

    async def ledger(self) -> Ledger:
        return Ledger(pipeline=self._name, process_info=process_info(), live=await self._live())

    async def stats(self) -> DraftStats:
        stats: DraftStats = await self._of_leader("stats")
        return stats

    async def _of_leader(self, method: str) -> Any:
        leader = self._supervisor.require_group().leader
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await leader.ask(method, method)
        except TimeoutError as error:
            raise PeerLost(
                peer=leader.label,
                operation=method,
                reason=f"no answer within {_ANSWER_TIMEOUT_S:g} s",
            ) from error

    async def _live(self) -> tuple[RequestId, ...]:
        """Returns the open streams; none if the drafting actor does not answer."""
        try:
            live: tuple[RequestId, ...] = await self._of_leader("live")
        except EesdError:
            return ()
        return live

    async def _num_live(self) -> int:
        return len(await self._live())

    async def check_health(self) -> None:
        """Raises when this pipeline cannot recover: Serve then starts another."""
        await self._supervisor.check()

    async def _beat(self) -> None:
        """Sends heartbeats to the router."""
        while True:
            if self._supervisor.is_ready and not self._supervisor.is_degraded:
                await self._speed.ask(self._supervisor.epoch)
            await self._publish_status()
            await asyncio.sleep(self._config.router.heartbeat_s)

    async def _publish_status(self) -> None:
        """Tells the router. Of a claimed pipeline the router knows the drafting actor: without one
        in the report its streams would end, so they are claimed first."""
        if self._is_claiming and self._supervisor.group is None:
            return
        try:
            self._draining.follow(must_leave=await beat(self._router, self._report()))
            self._last_report_s = time.monotonic()
        except PeerLost:
            self._without_router()
            if self._finding is None or self._finding.done():
                self._finding = asyncio.ensure_future(self._find_router())
        except EngineError as error:  # the pipeline works without the router
            self._without_router()
            logger.debug("heartbeat failed: error=%s", error)

    def _without_router(self) -> None:
        """Takes requests again if autoscaling has drained this pipeline: its router is away."""
        if time.monotonic() - self._last_report_s > self._config.router.expiry_s:
            self._draining.follow(must_leave=False)

    async def _find_router(self) -> None:
        """Ray's head answers, or the router is started, in its own time: recovery waits for
        neither."""
        self._router = await found_again(self._router, self._config)

    def _report(self) -> PipelineReport:
        supervisor = self._supervisor
        group, leader = supervisor.group, self._leader()
        capacity = None if group is None else group.kv_capacity
        unavailable = self._why_unavailable()
        return PipelineReport(
            pipeline_id=PipelineId(self._name),
            leader="" if leader is None else leader.name,
            address=None if leader is None else leader.handle,
            ranks=self._ranks(),
            crashed=() if group is None else tuple(group.crashed_leaders),
            epoch=supervisor.epoch,
            app=self._config.app_name,
            num_running=0 if leader is None else leader.status.num_live,
            is_ready=not unavailable,
            unavailable=unavailable,
            is_starting=not supervisor.has_started,
            start=supervisor.start_report() if unavailable else None,
            start_s=supervisor.start_s,
            kv_tokens=None if capacity is None else capacity.num_tokens,
            draining=bool(self._draining.reason),
            is_stopping=self._draining.is_last,
            activity=NO_ACTIVITY if leader is None else leader.status.activity,
            cost=self._speed.cost,
            max_running=self._config.engine.scheduler.max_running,
            weight=self._speed.value,
            promotion=supervisor.promotion,
        )

    def _why_unavailable(self) -> str:
        reason = self._supervisor.why_unavailable()
        if not reason:
            return "" if self._leader() is not None else "no process takes its requests"
        loading = self._supervisor.loading()
        return f"{reason}; loading: {loading}" if loading else reason

    def _leader(self) -> Worker | None:
        """Returns the process that takes requests; None while there is none."""
        group = self._supervisor.group
        if group is None:
            return None
        try:
            return group.leader
        except PeerLost:
            return None

    def _ranks(self) -> dict[str, Any]:
        """Returns the handles of all workers; of fallbacks only the leader, since they have no
        peers in other pipelines: their streams are recomputed."""
        group, leader = self._supervisor.group, self._leader()
        if group is None or leader is None:
            return {}
        if group.is_degraded:
            return {f"{leader.slot.name} of {self._name}": leader.handle}
        return {worker.slot.name: worker.handle for worker in group.workers}

    async def _find_peer_pipeline(self) -> PipelineReport | None:
        return await find_peer_pipeline(
            self._router, app=self._config.app_name, excluded=[PipelineId(self._name)]
        )


def _head_key(config: ServiceConfig) -> str:
    """Returns what a promoted head replaces; a service with another configured head differs."""
    model = config.engine.model
    return f"{config.app_name}:{model.path}:{model.head or ''}"
