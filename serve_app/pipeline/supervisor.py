"""Keeps one pipeline ready: spawns workers, starts and ends epochs, and gives up in the end.

It brings the worker group into epoch after epoch, and tells the streams when to wait, when to go on
and, while a process has to be replaced and another pipeline is ready, when to migrate there.
`quarantine` finds the request that caused an interruption.

With fallbacks, a pipeline that has lost its draft stage is ready again at once, degraded to plain
decoding. It fails back to a full epoch when the draft stage is back and its weights are loaded:
that is no interruption, and no crash of a request.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from eesd_dist.config import EngineConfig
from eesd_dist.errors import PROCESS_DIED, ConfigError, EesdError, EngineError, PeerLost
from eesd_dist.routing.directory import PipelineReport, Promotion
from eesd_dist.workers.messages import HeadReport
from eesd_dist.workers.roles import StageFactory
from serve_app.config import ServiceConfig
from serve_app.pipeline.placement import RankSlot, gpus_per_rank, rank_slots
from serve_app.pipeline.placement_groups import PlacementGroups, placement_groups_for
from serve_app.pipeline.quarantine import Patience
from serve_app.pipeline.streams import Streams
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import Worker, Workers, WorkerSpec
from serve_app.router import AskRouter, promotion_of

logger = logging.getLogger(__name__)

DEGRADED = "plain decoding on the verify ranks while the drafting actor is replaced"

_RETRY_S = 0.25
_MAX_RETRY_S = 4.0
_ASK_EVERY_S = 1.0
"""Interval of looking for another pipeline; without a process to replace, it is back earlier."""
_CALM_S = 0.1


@dataclass(slots=True, kw_only=True)
class _Recovery:
    """Times of one interruption, by the clock of `time.monotonic`."""

    trouble: EesdError
    noticed_s: float
    left_s: float = 0.0
    num_waiting: int = 0
    """Streams that were in the engine."""


class Supervisor:
    """Supervises one pipeline; built inside a running event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        stages: StageFactory,
        *,
        pipeline: str,
        router: Any,
        find_peer_pipeline: Callable[[], Awaitable[PipelineReport | None]],
        publish_status: Callable[[], Awaitable[None]],
    ) -> None:
        """`find_peer_pipeline` returns another pipeline that takes requests; `publish_status` sends
        this one's state to the router."""
        self._config = config
        self._stages = stages
        self._pipeline = pipeline
        self._router = router
        self._find_peer_pipeline = find_peer_pipeline
        self._publish_status = publish_status
        self._ready = asyncio.Event()
        self._trouble: EesdError = EngineError(f"pipeline {pipeline} is starting")
        self._since_s = time.monotonic()
        """Since when it has been ready, or unavailable."""
        self._num_interruptions = 0
        recovery = config.recovery
        self._patience = Patience(max_failures=recovery.suspect_after + recovery.max_interruptions)
        self._recovery: _Recovery | None = None
        """The present recovery, until the first token after it."""
        self._recovery_s: float | None = None
        self._degraded_since_s: float | None = None
        """None while it is not degraded."""
        self._degraded_s = 0.0
        """Seconds of earlier degraded epochs."""
        self._is_failing_back = False
        self._promotion: Promotion | None = None
        self._background_tasks: set[asyncio.Future[None]] = set()
        self._worker_group: asyncio.Future[WorkerGroup] = asyncio.get_running_loop().create_future()
        self.streams = Streams(
            pipeline=pipeline,
            drafter=self._drafter,
            recovery=recovery,
            delivered=self._delivered,
            find_peer_pipeline=find_peer_pipeline,
            round_timeout_s=config.engine.parallel.timeout_s,
        )
        self._supervising = asyncio.ensure_future(self._supervise())

    async def worker_group(self) -> WorkerGroup:
        """Waits for the first worker group; raises why there will be none."""
        return await asyncio.shield(self._worker_group)

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def is_degraded(self) -> bool:
        """Whether it is ready with fallbacks for the draft stage."""
        return self.is_ready and self._degraded_since_s is not None

    @property
    def degraded_s(self) -> float:
        """Seconds in degraded mode so far."""
        if self._degraded_since_s is None:
            return self._degraded_s
        return self._degraded_s + time.monotonic() - self._degraded_since_s

    @property
    def num_interruptions(self) -> int:
        return self._num_interruptions

    @property
    def trouble(self) -> EesdError:
        """The last interruption; until the first, that the pipeline is starting."""
        return self._trouble

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the last interruption to the next token, or to a ready pipeline if no stream
        waited; None before the first."""
        return self._recovery_s

    @property
    def promotion(self) -> Promotion | None:
        """The promoted exit head; None: that of the configuration."""
        return self._promotion

    def why_unavailable(self) -> str:
        """Returns the reason, or an empty string if the pipeline is ready."""
        if self.is_ready:
            return ""
        waited_s = time.monotonic() - self._since_s
        if self._is_failing_back:
            return f"failing back for {waited_s:.1f} s: the draft stage is back"
        if self._num_interruptions == 0:
            return f"loading for {waited_s:.1f} s: {self._trouble}"
        number = self._worker_group.result().epoch
        return f"re-forming for {waited_s:.1f} s (epoch {number}): {self._trouble}"

    async def loading(self) -> str:
        """Returns which workers still load weights, and their progress; empty if none does."""
        if not self._worker_group.done() or self._worker_group.exception() is not None:
            return ""
        loads = await self._worker_group.result().workers.loads()
        return ", ".join(f"{name} {load.told}" for name, load in loads.items() if not load.is_over)

    async def check(self) -> None:
        """Waits for the first start; raises when this pipeline will not be ready again."""
        if not self._supervising.done() and self._num_interruptions == 0:
            first_start = asyncio.ensure_future(self._ready.wait())
            await asyncio.wait(
                {first_start, self._supervising}, return_when=asyncio.FIRST_COMPLETED
            )
            first_start.cancel()
        if self._supervising.done():
            raise self._trouble

    async def load_head(self, folder: str) -> HeadReport:
        """Loads another exit head. Raises CheckpointError or ConfigError if it does not fit; then
        the old one stays."""
        group = await self.worker_group()
        recovery = self._config.recovery
        try:
            async with asyncio.timeout(recovery.stream_pause_s):
                await self._ready.wait()
        except TimeoutError as error:
            raise EngineError(
                f"cannot take {folder}: pipeline {self._pipeline} is unavailable after "
                f"{recovery.stream_pause_s:g} s: {self._trouble}"
            ) from error
        if self.is_degraded:
            raise EngineError(f"cannot take {folder} now: degraded: {DEGRADED}; try again")
        async with asyncio.timeout(recovery.load_timeout_s):
            report = await group.load_head(folder)
        self._promotion = Promotion(
            in_place_of=_head_key(self._config), head=folder, taken_unix_s=time.time()
        )
        return report

    async def _supervise(self) -> None:
        """Runs until an epoch cannot be started any more; then everything that waits is told."""
        try:
            self._worker_group.set_result(await self._make_group())
            await self._keep_ready(self._worker_group.result())
        except EesdError as error:
            logger.error("given up: pipeline=%s: %s", self._pipeline, error)
            await self._give_up(error)
        except Exception as error:
            logger.exception("a bug: pipeline=%s", self._pipeline)
            await self._give_up(
                EngineError(f"pipeline {self._pipeline} is given up by a bug: {error!r}")
            )

    async def _keep_ready(self, group: WorkerGroup) -> None:
        while True:
            await self._start_epoch(group)
            self._mark_ready(group)
            trouble = await self._end_of_epoch(group)
            if trouble is None:
                await self._fail_back(group)
            else:
                await self._interrupted(group, trouble)

    async def _give_up(self, error: EesdError) -> None:
        self._trouble = error
        self._ready.clear()
        self.streams.give_up(error)
        if not self._worker_group.done():
            self._worker_group.set_exception(error)
        elif self._worker_group.exception() is None:
            await self._worker_group.result().stop()

    async def _make_group(self) -> WorkerGroup:
        engine = self._config.engine
        slots, placement_groups = await self._placed()
        spec = WorkerSpec(
            pipeline=self._pipeline,
            engine=engine,
            stages=self._stages,
            telemetry=self._config.telemetry_options,
            ask_router=AskRouter(self._router),
        )
        group = WorkerGroup(Workers(placement_groups, slots, spec=spec))
        self._promotion = await promotion_of(self._router, in_place_of=_head_key(self._config))
        if self._promotion is not None:
            group.set_head(self._promotion.head)
        return group

    async def _placed(self) -> tuple[Sequence[RankSlot], PlacementGroups]:
        """Nodes may join during the wait for room: if that changes the GPUs per rank, the groups
        are placed again."""
        engine, placement = self._config.engine, self._config.placement
        gpus = _gpus_per_rank(engine)
        while True:
            slots = rank_slots(
                placement,
                num_verify_ranks=engine.parallel.verify_tensor_parallel_size,
                num_draft_ranks=engine.parallel.draft_tensor_parallel_size,
                gpus_per_rank=gpus,
            )
            placement_groups = await placement_groups_for(
                slots, placement=placement, name=self._pipeline
            )
            counted, gpus = gpus, _gpus_per_rank(engine)
            if counted == gpus:
                return slots, placement_groups
            logger.info(
                "placed again: pipeline=%s gpus_per_rank=%g, was %g", self._pipeline, gpus, counted
            )
            placement_groups.remove()

    async def _start_epoch(self, group: WorkerGroup) -> None:
        """Retries until it succeeds, unless the configuration is wrong."""
        deadline = time.monotonic() + self._config.recovery.load_timeout_s
        retry_s = _RETRY_S
        while True:
            try:
                await self._try_epoch(group, timeout_s=max(1.0, deadline - time.monotonic()))
            except ConfigError as error:
                if not group.has_other_head:
                    raise
                # The promoted head's folder is gone or has changed.
                logger.error(
                    "back to the configured head: pipeline=%s error=%s", self._pipeline, error
                )
                await group.reset_head()
                self._promotion = None
            except EngineError as error:
                logger.warning("not formed: pipeline=%s error=%s", self._pipeline, error)
                self._trouble = error
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"pipeline {self._pipeline} is given up: it was not formed within "
                        f"{self._config.recovery.load_timeout_s:g} s, the last time: {error}"
                    ) from error
                await group.end_epoch()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
            else:
                return

    async def _try_epoch(self, group: WorkerGroup, *, timeout_s: float) -> None:
        """Uses fallbacks if they help at once; if they fail, starts a full epoch."""
        if group.can_fall_back:
            if (leader := _drafter_of(group)) is not None:
                # It kept its streams when a verify rank was lost, but a fallback leads now.
                await self.streams.evict_all(drafter=leader)
            try:
                return await group.start_degraded_epoch(timeout_s=timeout_s / 2)
            except EesdError as error:
                logger.warning("no fallback: pipeline=%s error=%s", self._pipeline, error)
                await group.end_epoch()
        await group.start_epoch(timeout_s=timeout_s)

    async def _end_of_epoch(self, group: WorkerGroup) -> EesdError | None:
        """Waits for the end of the epoch; returns what broke it, or None to fail back."""
        trouble = asyncio.ensure_future(group.trouble())
        waiting: set[asyncio.Future[Any]] = {trouble}
        if group.is_degraded:
            waiting.add(asyncio.ensure_future(self._replace_drafters(group)))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {trouble}:
                ended.result()
            return trouble.result() if trouble in done else None
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _replace_drafters(self, group: WorkerGroup) -> None:
        """Returns when a full epoch can be started; retries as long as necessary."""
        retry_s = _RETRY_S
        while group.can_fall_back or not self.streams.is_calm:
            try:
                await group.replace_drafters(timeout_s=self._config.recovery.load_timeout_s)
            except EesdError as error:
                if isinstance(error, ConfigError) and group.has_other_head:
                    return  # the start of a full epoch resets the head
                logger.warning("still degraded: pipeline=%s error=%s", self._pipeline, error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
            else:
                await asyncio.sleep(_CALM_S)

    async def _fail_back(self, group: WorkerGroup) -> None:
        """Ends the degraded epoch in good order, so that a full one can be started."""
        logger.info("failing back: pipeline=%s epoch=%d", self._pipeline, group.epoch)
        self._is_failing_back = True
        self._mark_unavailable(EngineError("it is failing back to the draft stage that is back"))
        await self.streams.evict_all(drafter=_drafter_of(group))
        await group.halt()
        await group.end_epoch()
        # Evicts streams that were just being admitted; from now on none is.
        await self.streams.evict_all(drafter=_drafter_of(group))
        self._run(self._migrate_streams(group))

    def _mark_unavailable(self, trouble: EesdError) -> None:
        self._ready.clear()
        self._since_s = time.monotonic()
        self._degraded_s, self._degraded_since_s = self.degraded_s, None
        self.streams.paused(trouble)

    def _mark_ready(self, group: WorkerGroup) -> None:
        self._ready.set()
        self._since_s = time.monotonic()
        self._is_failing_back = False
        if group.is_degraded:
            self._degraded_since_s = self._since_s
            logger.warning("degraded: pipeline=%s: %s", self._pipeline, DEGRADED)
        logger.info("ready: pipeline=%s epoch=%d", self._pipeline, group.epoch)
        recovery = self._recovery
        if recovery is not None and (recovery.num_waiting == 0 or self.streams.num_live == 0):
            self._recovered()
        self.streams.resume()

    async def _interrupted(self, group: WorkerGroup, trouble: EesdError) -> None:
        """Ends a broken epoch, so that a new one can be started."""
        logger.warning("interrupted: pipeline=%s error=%s", self._pipeline, trouble)
        self._trouble = trouble
        self._mark_unavailable(trouble)
        recovery = self._recovery = _Recovery(trouble=trouble, noticed_s=self._since_s)
        self._num_interruptions += 1
        self._run(self._publish_status())
        await group.end_epoch()
        recovery.left_s = time.monotonic()
        recovery.num_waiting = await self.streams.broke(
            trouble,
            drafter=_drafter_of(group),
            keeps_streams=not (group.is_degraded or group.can_fall_back),
            is_attributable=_may_be_a_request(trouble),
        )
        if recovery.num_waiting > 0:
            self._patience.failed()
        self._raise_if_hopeless()
        self._run(self._migrate_streams(group))

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._ran)

    def _ran(self, task: "asyncio.Future[None]") -> None:
        self._background_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("not done: pipeline=%s", self._pipeline, exc_info=task.exception())

    async def _migrate_streams(self, group: WorkerGroup) -> None:
        """Migrates waiting streams to another pipeline that is ready: at once when a process has to
        be replaced, and later when the start of an epoch fails or hangs."""
        since_s = self._since_s

        def is_over() -> bool:
            return self.is_ready or self._since_s != since_s or self._supervising.done()

        if group.workers.are_complete or group.can_fall_back:
            await asyncio.sleep(_ASK_EVERY_S)
        while not is_over():
            there = await self._find_peer_pipeline()
            if there is not None and not is_over():
                reason = f"it is re-forming: {self._trouble}"
                return await self.streams.leave(reason, drafter=_drafter_of(group))
            await asyncio.sleep(_ASK_EVERY_S)

    def _raise_if_hopeless(self) -> None:
        if self._patience.is_exhausted:
            raise EngineError(
                f"pipeline {self._pipeline} is given up: it broke {self._patience.num_failures} "
                f"times in a row without a token in between, the last time: {self._trouble}"
            )

    async def _drafter(self) -> Worker:
        return (await self.worker_group()).drafter

    def _delivered(self) -> None:
        self._patience.works()
        if self._recovery is not None and self.is_ready:
            self._recovered()

    def _recovered(self) -> None:
        """Logs the recovery, which is over."""
        recovery, self._recovery = self._recovery, None
        assert recovery is not None
        start_s, now_s = recovery.noticed_s, time.monotonic()
        self._recovery_s = now_s - start_s
        group = self._worker_group.result()
        logger.info(
            "recovered: pipeline=%s epoch=%d left_s=%.2f spawned_s=%.2f ready_s=%.2f "
            "token_s=%.2f streams=%d after=%s",
            self._pipeline,
            group.epoch,
            recovery.left_s - start_s,
            group.spawned_s - start_s,
            self._since_s - start_s,
            self._recovery_s,
            recovery.num_waiting,
            recovery.trouble,
        )


def _may_be_a_request(trouble: EesdError) -> bool:
    """Returns whether a request can have caused it: it can cause a death or a bug. A lost link or
    node, or a worker that does not answer, is rather due to machines."""
    return not isinstance(trouble, PeerLost) or trouble.reason == PROCESS_DIED


def _drafter_of(group: WorkerGroup) -> Worker | None:
    try:
        return group.drafter
    except PeerLost:
        return None


def _head_key(config: ServiceConfig) -> str:
    """Returns what a promoted head replaces; a service with another configured head differs."""
    model = config.engine.model
    return f"{config.app_name}:{model.path}:{model.head or ''}"


def _gpus_per_rank(engine: EngineConfig) -> float:
    if engine.model.device == "cpu":
        return 0.0
    return gpus_per_rank(
        num_gpus=ray.cluster_resources().get("GPU", 0.0),
        num_verify_ranks=engine.parallel.verify_tensor_parallel_size,
        num_draft_ranks=engine.parallel.draft_tensor_parallel_size,
        must_have_one=engine.model.device == "cuda",
    )
