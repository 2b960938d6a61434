"""A pipeline: one draft stage and one verify stage, kept whole, and the streams they feed.

The Serve replica is thin. It owns a placement group and the actors in it, brings them together
into generations, watches them, and holds the ledger from which a live request can be resumed. It
computes nothing and never sees text.
"""

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from eesd_dist.actors.contracts import (
    ControlReport,
    DraftStats,
    HeadReport,
    StagesFactory,
    StreamItem,
)
from eesd_dist.config import EngineConfig
from eesd_dist.errors import ConfigError, EesdError, EngineError, PeerLost
from eesd_dist.routing.directory import PipelineId, PipelineReport, Promotion
from eesd_dist.types import (
    Emission,
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from serve_app._crew import Crew, Member, Recruiting, placed
from serve_app._placement import gpus_per_rank, posts_of
from serve_app._resume import resumed
from serve_app.config import ServiceConfig
from serve_app.router import AskRouter, beat, promotion_of, router_handle

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 3.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """From here on this pipeline answers for the request."""

    pipeline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether tokens come out of a pipeline, and if not, why."""

    pipeline: str
    is_healthy: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    pipeline: str
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineControl:
    """What a pipeline's controllers go by."""

    pipeline: str
    num_live: int
    control: ControlReport


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    name: str
    pid: int
    host: str
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """What a pipeline says of itself to people and to the router."""

    pipeline: str
    pid: int
    """Of the Serve replica itself."""
    generation: int
    is_whole: bool
    num_live: int
    num_interruptions: int
    last_trouble: str
    """What interrupted it last; empty when nothing ever has."""
    members: tuple[MemberReport, ...]


class Pipeline:
    """Deployed by `serve_app.app`; Serve builds it inside a running event loop."""

    def __init__(self, config: ServiceConfig, stages: StagesFactory) -> None:
        self._config = config
        self._stages = stages
        self._router = router_handle(config)
        self._name = f"{config.app_name}-{uuid.uuid4().hex[:8]}"
        self._live: dict[RequestId, float] = {}
        """Live requests and when they came."""
        self._whole = asyncio.Event()
        self._trouble: EesdError = EngineError(f"pipeline {self._name} is starting")
        """Why the pipeline is not whole, while it is not."""
        self._interruptions: deque[float] = deque()
        self._num_interruptions = 0
        self._promotion: Promotion | None = None
        """The exit head it was told to take; None: that of the configuration."""
        self._crew: asyncio.Future[Crew] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.ensure_future(self._supervise())
        self._heart = asyncio.ensure_future(self._beat())

    # -- what ingresses call --------------------------------------------------------------------

    async def stream(self, request: Request) -> AsyncGenerator[Taken | StreamItem, None]:
        """`Taken` at once; the tokens to the last; or, as the last item, what ended them."""
        self._live[request.request_id] = time.monotonic()
        try:
            yield Taken(pipeline=self._name)
            async with aclosing(self._resumed(request)) as parts:
                async for emissions in parts:
                    yield emissions
        except EesdError as error:
            yield error
        finally:
            self._live.pop(request.request_id, None)

    async def health(self) -> Health:
        """Healthy when a round went through lately, or when one does now."""
        reason = await self._why_unhealthy()
        return Health(pipeline=self._name, is_healthy=not reason, reason=reason)

    async def metrics(self) -> MetricsPage:
        """The drafting actor's metrics; an empty page while there is none."""
        try:
            text = await self._of_drafter("metrics")
        except EesdError as error:
            logger.warning("no metrics: pipeline=%s error=%s", self._name, error)
            text = b""
        return MetricsPage(pipeline=self._name, text=text)

    async def rounds(self) -> tuple[RoundStats, ...]:
        """The latest rounds' statistics, oldest first."""
        rounds: tuple[RoundStats, ...] = await self._of_drafter("rounds")
        return rounds

    async def control(self) -> PipelineControl:
        """What the controllers of this pipeline go by."""
        control: ControlReport = await self._of_drafter("control")
        if control.head is not None:
            control = replace(control, head=replace(control.head, pipeline=self._name))
        return PipelineControl(pipeline=self._name, num_live=len(self._live), control=control)

    async def load_head(self, folder: str) -> HeadReport:
        """Drafts with another exit head from the next round on, and in generations to come.

        Raises CheckpointError or ConfigError for one that does not fit; the old one goes on.
        """
        crew = await self._crew
        await self._until_whole(self._trouble)
        async with asyncio.timeout(self._config.recovery.load_timeout_s):
            report = await crew.load_head(folder)
        self._promotion = Promotion(
            in_place_of=_head_key(self._config), head=folder, taken_unix_s=time.time()
        )
        await self._say_hello()
        logger.info("promoted: pipeline=%s head=%s", self._name, report.sha256[:12])
        return report

    async def flush(self) -> None:
        """Sends and writes what every member still holds, before they are taken down."""
        for member in (await self._crew).members:
            try:
                await asyncio.wait_for(_awaited(member.handle.flush.remote()), _ANSWER_TIMEOUT_S)
            except (TimeoutError, RayError) as error:
                logger.warning("spans not sent: %s error=%r", member.label, error)

    async def state(self) -> PipelineState:
        members = (await self._crew).members
        return PipelineState(
            pipeline=self._name,
            pid=os.getpid(),
            generation=(await self._crew).generation,
            is_whole=self._whole.is_set(),
            num_live=len(self._live),
            num_interruptions=self._num_interruptions,
            last_trouble=str(self._trouble) if self._num_interruptions else "",
            members=tuple(
                MemberReport(
                    name=m.post.name,
                    pid=m.whereabouts.pid,
                    host=m.whereabouts.host,
                    node_id=m.whereabouts.node_id,
                )
                for m in members
            ),
        )

    async def stats(self) -> DraftStats:
        stats: DraftStats = await self._of_drafter("stats")
        return stats

    async def _of_drafter(self, method: str) -> Any:
        drafter = (await self._crew).drafter
        try:
            return await asyncio.wait_for(
                _awaited(getattr(drafter.handle, method).remote()), _ANSWER_TIMEOUT_S
            )
        except TimeoutError as error:
            raise PeerLost(
                peer=drafter.label,
                operation=method,
                reason=f"no answer within {_ANSWER_TIMEOUT_S:g} s",
            ) from error
        except RayError as error:
            raise self._lost(drafter, error) from error

    # -- what Serve calls -----------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises when this pipeline cannot heal itself: Serve then makes another."""
        if not self._supervisor.done():
            first_start = asyncio.ensure_future(self._whole.wait())
            if self._num_interruptions == 0:
                await asyncio.wait(
                    {first_start, self._supervisor}, return_when=asyncio.FIRST_COMPLETED
                )
            first_start.cancel()
        if self._supervisor.done():
            raise self._supervisor.exception() or self._trouble

    # -- keeping it whole -----------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Forms generation after generation until forming fails for good."""
        try:
            self._crew.set_result(await self._recruit())
        except EesdError as error:
            self._crew.set_exception(error)
            raise
        crew = await self._crew
        while True:
            await self._form(crew)
            self._whole.set()
            logger.info("whole: pipeline=%s generation=%d", self._name, crew.generation)
            self._trouble = await crew.trouble()
            self._whole.clear()
            await self._interrupted(crew)

    async def _recruit(self) -> Crew:
        engine = self._config.engine
        posts = posts_of(
            self._config.placement,
            num_verify_ranks=engine.parallel.verify_tensor_parallel_size,
            gpus_per_rank=_gpus_per_rank(engine),
        )
        group = await placed(posts, placement=self._config.placement, name=self._name)
        crew = Crew(
            group,
            posts,
            recruiting=Recruiting(
                pipeline=self._name,
                engine=engine,
                stages=self._stages,
                telemetry=self._config.telemetry_options,
                ask_router=AskRouter(self._router),
            ),
        )
        self._promotion = await promotion_of(self._router, in_place_of=_head_key(self._config))
        if self._promotion is not None:
            crew.recruit_with_head(self._promotion.head)
        return crew

    async def _form(self, crew: Crew) -> None:
        """Tries until it succeeds, while it is not the configuration that is to blame."""
        deadline = time.monotonic() + self._config.recovery.load_timeout_s
        while True:
            try:
                await crew.form(timeout_s=max(1.0, deadline - time.monotonic()))
            except ConfigError as error:
                if not crew.has_other_head:
                    await crew.stop()
                    raise
                # The promoted head's folder has gone or changed since; there was one before it.
                logger.error("back to the configured head: pipeline=%s error=%s", self._name, error)
                await crew.recruit_as_configured()
                self._promotion = None
            except EngineError as error:
                logger.warning("not formed: pipeline=%s error=%s", self._name, error)
                self._trouble = error
                self._interruptions.append(time.monotonic())
                await crew.disband()
                if time.monotonic() > deadline or self._is_hopeless():
                    await crew.stop()
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def _interrupted(self, crew: Crew) -> None:
        logger.warning("interrupted: pipeline=%s error=%s", self._name, self._trouble)
        self._num_interruptions += 1
        self._interruptions.append(time.monotonic())
        await crew.disband()
        if self._is_hopeless():
            await self._fail_streams(crew)
            self._interruptions.clear()

    def _is_hopeless(self) -> bool:
        recovery = self._config.recovery
        oldest = time.monotonic() - recovery.window_s
        while self._interruptions and self._interruptions[0] < oldest:
            self._interruptions.popleft()
        return len(self._interruptions) > recovery.max_interruptions

    async def _fail_streams(self, crew: Crew) -> None:
        error = EngineError(
            f"interrupted more than {self._config.recovery.max_interruptions} times within "
            f"{self._config.recovery.window_s:g} s, the last time: {self._trouble}"
        )
        try:
            await crew.drafter.handle.fail_all.remote(error)
        except (PeerLost, RayError) as lost:
            logger.warning("streams not told: pipeline=%s error=%r", self._name, lost)

    async def _beat(self) -> None:
        """Says to the router that this pipeline is there, for as long as it is."""
        while True:
            await self._say_hello()
            await asyncio.sleep(self._config.router.heartbeat_s)

    async def _say_hello(self) -> None:
        report = PipelineReport(
            pipeline_id=PipelineId(self._name),
            address=self._name,
            num_running=len(self._live),
            draining=not self._whole.is_set(),
            promotion=self._promotion,
        )
        await beat(self._router, report)

    # -- streams --------------------------------------------------------------------------------

    def _resumed(self, request: Request) -> AsyncGenerator[tuple[Emission, ...], None]:
        return resumed(
            request,
            source=self._from_drafter,
            until_whole=self._until_whole,
            max_interruptions=self._config.recovery.max_interruptions,
            room_wait_s=self._config.recovery.stream_pause_s,
        )

    async def _from_drafter(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        crew = await self._crew
        await self._until_whole(self._trouble)
        drafter = crew.drafter
        items = drafter.handle.submit.options(num_returns="streaming").remote(request)
        is_over = False
        try:
            async for reference in items:
                item: StreamItem = await reference
                is_over = isinstance(item, EesdError) or item[-1].finish_reason is not None
                yield item
        except RayError as error:
            is_over = True
            yield self._lost(drafter, error)
        finally:
            if not is_over:
                drafter.handle.cancel.remote(request.request_id)

    def _lost(self, drafter: Member, error: RayError) -> EesdError:
        return PeerLost(
            peer=drafter.label,
            operation="stream",
            reason=(
                "its process has died"
                if isinstance(error, ray.exceptions.RayActorError)
                else str(error)
            ),
        )

    async def _until_whole(self, lost: EesdError) -> None:
        """Waits for the pipeline to be whole again; raises what broke it when that takes long."""
        pause_s = self._config.recovery.stream_pause_s
        try:
            await asyncio.wait_for(self._whole.wait(), pause_s)
        except TimeoutError:
            raise EngineError(
                f"pipeline {self._name} is not whole again after {pause_s:g} s: "
                f"{self._trouble if isinstance(self._trouble, PeerLost) else lost}"
            ) from lost

    # -- health ---------------------------------------------------------------------------------

    async def _why_unhealthy(self) -> str:
        if not self._whole.is_set():
            return f"not whole: {self._trouble}"
        try:
            stats = await self.stats()
        except EesdError as error:
            return str(error)
        if time.time() - stats.last_round_unix_s < self._config.health.fresh_s:
            return ""
        return await self._probe()

    async def _probe(self) -> str:
        """Generates one token to see whether rounds go through."""
        timeout_s = self._config.health.probe_timeout_s
        request = Request(
            request_id=RequestId(f"probe-{uuid.uuid4().hex}"),
            prompt=(TokenId(0),),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            speculation=SpeculationParams(mode="off"),
            workload="probe",
        )
        try:
            async with asyncio.timeout(timeout_s):
                async for item in self._from_drafter(request):
                    if isinstance(item, EesdError):
                        return f"a probe failed: {item}"
        except TimeoutError:
            return f"no round went through within {timeout_s:g} s"
        except EesdError as error:
            return f"a probe failed: {error}"
        return ""


async def _awaited(reference: Any) -> Any:
    return await reference


def _head_key(config: ServiceConfig) -> str:
    """Names what a promoted head takes the place of: redeployed with another one, that one wins."""
    model = config.engine.model
    return f"{config.app_name}:{model.path}:{model.head or ''}"


def _gpus_per_rank(engine: EngineConfig) -> float:
    if engine.model.device == "cpu":
        return 0.0
    return gpus_per_rank(
        num_gpus=ray.cluster_resources().get("GPU", 0.0),
        num_verify_ranks=engine.parallel.verify_tensor_parallel_size,
        must_have_one=engine.model.device == "cuda",
    )
