"""The ingress's way to the pipelines: requests go out over Serve, emissions come back.

A stream whose pipeline is lost goes on from its tokens with whichever pipeline Serve offers next.
Serve's and Ray's exceptions become ours here.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

import ray
from ray.serve.exceptions import BackPressureError, RayServeException

from eesd_dist.actors.contracts import StreamItem
from eesd_dist.errors import CapacityError, EesdError, EngineError, PeerLost
from eesd_dist.telemetry import names
from eesd_dist.telemetry.tracing import Tracing, open_route_span
from eesd_dist.types import Emission, Request, RequestId, RoundStats
from serve_app._resume import resumed
from serve_app.config import RecoveryConfig
from serve_app.pipeline import Health, MetricsPage, PipelineControl, PipelineState, Taken

T = TypeVar("T")

_ASK_AGAIN_S = 0.5


class ServiceClient:
    """An `EngineClient` (serve_app.openai.client) over a handle to the pipelines."""

    def __init__(self, pipelines: Any, *, recovery: RecoveryConfig, tracing: Tracing) -> None:
        self._pipelines = pipelines
        self._tracing = tracing
        self._streams = pipelines.options(stream=True)
        self._recovery = recovery
        self._open: dict[RequestId, Any] = {}

    async def stream(self, request: Request) -> AsyncIterator[Emission]:
        async with aclosing(
            resumed(
                request,
                source=self._from_pipeline,
                until_whole=self._until_whole,
                max_interruptions=self._recovery.max_interruptions,
                room_wait_s=self._recovery.stream_pause_s,
            )
        ) as parts:
            async for emissions in parts:
                for emission in emissions:
                    yield emission

    async def abort(self, request_id: RequestId) -> None:
        responses = self._open.get(request_id)
        if responses is not None:
            responses.cancel()

    async def health(self, *, timeout_s: float) -> tuple[Health, ...]:
        """Every pipeline's own word; raises EngineError when none can be asked."""
        return await self._of_all("health", timeout_s=timeout_s)

    async def states(self, *, timeout_s: float) -> tuple[PipelineState, ...]:
        return await self._of_all("state", timeout_s=timeout_s)

    async def metrics(self, *, timeout_s: float) -> tuple[MetricsPage, ...]:
        """Every pipeline's metrics in Prometheus' text form."""
        return await self._of_all("metrics", timeout_s=timeout_s)

    async def control(self, *, timeout_s: float) -> tuple[PipelineControl, ...]:
        """What every pipeline's controllers go by."""
        return await self._of_all("control", timeout_s=timeout_s)

    async def rounds(self, *, timeout_s: float) -> tuple[RoundStats, ...]:
        """Every pipeline's latest rounds."""
        parts = await self._of_all("rounds", timeout_s=timeout_s)
        return tuple(stats for part in parts for stats in part)

    async def _of_all(self, method: str, *, timeout_s: float) -> tuple[Any, ...]:
        try:
            answers = await asyncio.wait_for(
                self._pipelines.broadcast(method).results_async(return_exceptions=True), timeout_s
            )
        except TimeoutError as error:
            raise EngineError(f"no pipeline has answered within {timeout_s:g} s") from error
        except (ray.exceptions.RayError, RayServeException) as error:
            raise _ours(error) from error
        good = tuple(answer for answer in answers if not isinstance(answer, Exception))
        if not good:
            raise EngineError(
                f"no pipeline answers: {answers[0]}" if answers else "no pipeline is running"
            )
        return good

    async def _from_pipeline(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        responses = self._streams.stream.remote(request)
        self._open[request.request_id] = responses
        is_over = False
        try:
            with open_route_span(
                self._tracing, traceparent=request.traceparent, request_id=request.request_id
            ) as route:
                taken = await self._taken(responses)
                route.set({names.PIPELINE: taken.pipeline})
            async for item in responses:
                is_over = isinstance(item, EesdError) or item[-1].finish_reason is not None
                yield item
        except (ray.exceptions.RayError, RayServeException) as error:
            is_over = True
            yield _ours(error)
        except EesdError as error:
            yield error
        finally:
            if self._open.get(request.request_id) is responses:
                del self._open[request.request_id]
            if not is_over:
                responses.cancel()

    async def _taken(self, responses: Any) -> Taken:
        """Waits for the first item: a pipeline has the request in its ledger."""
        pause_s = self._recovery.stream_pause_s
        try:
            taken: Taken = await asyncio.wait_for(responses.__anext__(), pause_s)
        except TimeoutError as error:
            raise EngineError(f"no pipeline took the request within {pause_s:g} s") from error
        except StopAsyncIteration as error:
            raise PeerLost(
                peer="pipeline", operation="stream", reason="it ended before it began"
            ) from error
        return taken

    async def _until_whole(self, lost: EesdError) -> None:
        """Until some pipeline is whole; Serve replaces the one that was lost."""
        pause_s = self._recovery.stream_pause_s
        try:
            async with asyncio.timeout(pause_s):
                while not await self._is_any_whole():  # noqa: ASYNC110  # they are elsewhere
                    await asyncio.sleep(_ASK_AGAIN_S)
        except TimeoutError as error:
            raise EngineError(f"no pipeline within {pause_s:g} s to go on with: {lost}") from error

    async def _is_any_whole(self) -> bool:
        try:
            states = await self.states(timeout_s=self._recovery.stream_pause_s)
        except EngineError:  # none is there yet
            return False
        return any(state.is_whole for state in states)


def _ours(error: Exception) -> EesdError:
    if isinstance(error, BackPressureError):
        return CapacityError(str(error))
    if isinstance(error, ray.exceptions.RayActorError):
        return PeerLost(peer="pipeline replica", operation="stream", reason="its process has died")
    cause = getattr(error, "cause", None)
    return (
        cause if isinstance(cause, EesdError) else EngineError(f"{type(error).__name__}: {error}")
    )
