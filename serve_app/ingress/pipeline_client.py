"""The ingress's client of the pipelines: an `EngineClient` over drafting actors.

It chooses a pipeline for each attempt at a request, and repeats what breaks until it has waited too
long. Ray's exceptions are converted to this project's.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from itertools import count
from typing import Any

from eesd_dist.errors import EesdError, EngineError, Migrated, PeerLost, QueueFull
from eesd_dist.routing.choice import PipelineChoice
from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import route_span
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Emission, Request, RequestId, RoundStats
from eesd_dist.workers.streams.outboxes import TAKE_WAIT_S
from serve_app.config import ServiceConfig
from serve_app.ingress.links import Links
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.replicas import of_all, of_named
from serve_app.ingress.retry import Attempts
from serve_app.pipeline.reports import Health, MetricsPage, PipelineControl, PipelineState

_GRACE_S = 2.0
"""Time that the other pipelines have left after the first answer to a health check."""


class ServiceClient:
    """An `EngineClient` (serve_app.openai.generation) over the pipelines of a service."""

    def __init__(
        self,
        pipelines: Any,
        *,
        config: ServiceConfig,
        tracing: Tracing,
        load_balancer: LoadBalancer,
    ) -> None:
        """`pipelines` is Serve's handle; no token passes through it."""
        self._pipelines = pipelines
        self._load_balancer = load_balancer
        self._tracer = tracing.tracer
        self._recovery = config.recovery
        self._max_waiting = config.engine.scheduler.max_waiting
        self._links = Links(silence_s=TAKE_WAIT_S + config.engine.parallel.timeout_s)
        load_balancer.on_answer = self._links.keep
        self._submissions = count(time.time_ns())
        """Unique over all ingresses, and growing in each."""

    async def stream(self, request: Request) -> AsyncIterator[tuple[Emission, ...]]:
        self._load_balancer.start()
        attempts = Attempts(
            request, suspect_after=self._recovery.suspect_after, clock=time.monotonic
        )
        if request.resumption:
            attempts.target = await self._load_balancer.pipeline_keeping(request.request_id)
        while True:
            with route_span(
                self._tracer,
                traceparent=request.traceparent,
                request_id=request.request_id,
                num_interruptions=attempts.num_interruptions,
            ) as route:
                choice = await self._chosen(attempts)
                route.set_attribute(names.PIPELINE, choice.pipeline)
            async with aclosing(self._attempt(attempts, choice)) as batches:
                try:
                    async for emissions in batches:
                        yield emissions
                        if emissions[-1].finish_reason is not None:
                            return
                    error: EesdError = PeerLost(
                        peer=choice.pipeline, operation="stream", reason="it has no last token"
                    )
                except EesdError as raised:
                    error = raised
            if isinstance(error, PeerLost):
                self._load_balancer.lost(choice.pipeline)
            elif isinstance(error, Migrated):
                self._load_balancer.migrated()
            await asyncio.sleep(attempts.failed(error, patience_s=self._patience_s))

    async def abort(self, request_id: RequestId) -> None:
        """The reader of a stream ends it by closing it."""

    async def health(self, *, timeout_s: float) -> tuple[Health, ...]:
        """Returns the health of the pipelines that answer. Raises EngineError if none does."""
        return await self._of_all("health", timeout_s=timeout_s, grace_s=_GRACE_S)

    async def states(self, *, timeout_s: float) -> tuple[PipelineState, ...]:
        return await self._of_all("state", timeout_s=timeout_s)

    async def metrics(self, *, timeout_s: float) -> tuple[MetricsPage, ...]:
        """Returns the Prometheus text of every pipeline."""
        return await self._of_all("metrics", timeout_s=timeout_s)

    async def control(self, *, timeout_s: float) -> tuple[PipelineControl, ...]:
        """Returns what every pipeline's controllers decide from."""
        return await self._of_all("control", timeout_s=timeout_s)

    async def rounds(self, *, timeout_s: float) -> tuple[RoundStats, ...]:
        """Returns every pipeline's latest rounds."""
        answers = await self._of_all("rounds", timeout_s=timeout_s)
        return tuple(stats for answer in answers for stats in answer)

    async def change(self, method: str, pipeline: str, *, timeout_s: float) -> Any:
        """Returns what the pipeline of this name answers; None if there is none."""
        return await of_named(self._pipelines, method, pipeline, timeout_s=timeout_s)

    @property
    def _patience_s(self) -> float:
        """Returns how long a stream waits for a pipeline: a few of its measured starts."""
        return self._recovery.pause_for(self._load_balancer.slowest_start_s)

    async def _chosen(self, attempts: Attempts) -> PipelineChoice:
        """Waits for a pipeline that is ready. Raises EngineError when it takes too long, QueueFull
        for a new request when too many wait already."""
        choice = self._load_balancer.choose(attempts)
        if choice is not None:
            return choice
        balancer = self._load_balancer
        if attempts.is_new and balancer.num_waiting >= self._max_waiting:
            raise QueueFull(num_waiting=balancer.num_waiting, limit=self._max_waiting)
        balancer.num_waiting += 1
        try:
            return await self._awaited(attempts)
        finally:
            balancer.num_waiting -= 1

    async def _awaited(self, attempts: Attempts) -> PipelineChoice:
        since_s = time.monotonic() - attempts.stuck_s
        while True:
            waited_s = time.monotonic() - since_s
            left_s = self._patience_s - waited_s
            if left_s <= 0:
                raise EngineError(
                    f"no pipeline is ready after {waited_s:.0f} s"
                    + (f": {attempts.last_error}" if attempts.last_error else "")
                )
            await self._load_balancer.news(timeout_s=left_s)
            if (choice := self._load_balancer.choose(attempts)) is not None:
                return choice

    async def _attempt(
        self, attempts: Attempts, choice: PipelineChoice
    ) -> AsyncGenerator[tuple[Emission, ...], None]:
        """Yields what one pipeline makes of the request; raises the error that ends it."""
        request = attempts.next(next(self._submissions))
        link = self._links.to(
            pipeline=choice.pipeline, leader=choice.leader, address=choice.address
        )
        try:
            async with aclosing(link.stream(request)) as items:
                async for item in items:
                    if isinstance(item, EesdError):
                        raise item
                    yield attempts.received(item)
        finally:
            was_admitted = link.has_admitted(request.submission)
            if link.is_lost:  # else the process lives, and no crash of it was this request's
                attempts.lost(choice.leader, was_admitted=was_admitted)
            self._load_balancer.ended(choice.pipeline, attempts)

    async def _of_all(
        self, method: str, *, timeout_s: float, grace_s: float | None = None
    ) -> tuple[Any, ...]:
        return await of_all(self._pipelines, method, timeout_s=timeout_s, grace_s=grace_s)
