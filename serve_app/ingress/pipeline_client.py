"""The ingress's client of the pipelines: requests go out over Serve, emissions come back.

When its pipeline is lost, a stream continues from its tokens in another one; when its pipeline
migrates it, it does so at once. Serve's and Ray's exceptions are converted to this project's.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import ray
from ray.serve.exceptions import BackPressureError, RayServeException

from eesd_dist.errors import PROCESS_DIED, CapacityError, EesdError, EngineError, Migrated, PeerLost
from eesd_dist.telemetry import names
from eesd_dist.telemetry.request_spans import route_span
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Emission, Request, RequestId, RoundStats
from eesd_dist.workers.messages import StreamItem
from eesd_dist.workers.process import PROCESS_LOST
from serve_app.config import RecoveryConfig
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.pipeline.deployment import (
    Admitted,
    Health,
    MetricsPage,
    PipelineControl,
    PipelineState,
)
from serve_app.pipeline.resume import resumed

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ASK_AGAIN_S = 0.5
_STATE_S = 3.0
"""How long a pipeline may take to say whether it is ready: a frozen one delays no stream."""
_REST_S = 2.0
"""Time that the other pipelines have left after the first answer to a health check."""
_LISTEN_S = 2.0
"""Interval at which a stream without new items checks that its pipeline still exists."""
_CANCEL_S = 10.0
"""How long a pipeline is asked to cancel a stream that continues in another one."""
_MAX_MIGRATIONS = 3
"""Maximum migrations in a row without a token before the stream backs off."""


@dataclass(slots=True)
class _Journey:
    """Where a stream has been sent so far."""

    migrated: Migrated | None = None
    """The last migration, until a pipeline has admitted the stream."""
    refused: set[str] = field(default_factory=set)
    """Pipelines that have migrated it since its last token."""
    num_attempts: int = 0

    def heard(self, item: StreamItem) -> None:
        self.migrated = item if isinstance(item, Migrated) else None
        if self.migrated is not None:
            self.refused.add(self.migrated.by)
        elif not isinstance(item, EesdError):
            self.refused.clear()


class ServiceClient:
    """An `EngineClient` (serve_app.openai.client) over a handle to the pipelines."""

    def __init__(
        self,
        pipelines: Any,
        *,
        recovery: RecoveryConfig,
        tracing: Tracing,
        load_balancer: LoadBalancer,
    ) -> None:
        self._pipelines = pipelines
        self._load_balancer = load_balancer
        self._tracer = tracing.tracer
        self._streams = pipelines.options(stream=True)
        self._recovery = recovery
        self._open: dict[RequestId, Any] = {}
        self._background_tasks: set[asyncio.Task[None]] = set()

    async def stream(self, request: Request) -> AsyncIterator[Emission]:
        self._load_balancer.start()
        async with aclosing(
            resumed(
                request,
                source=partial(self._from_pipeline, journey=_Journey()),
                until_ready=self._until_ready,
                max_interruptions=self._recovery.max_interruptions,
                room_wait_s=self._recovery.stream_pause_s,
                max_migrations=_MAX_MIGRATIONS,
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
        """Returns the health of the pipelines that answer. Raises EngineError if none does."""
        return await self._of_all("health", timeout_s=timeout_s, rest_s=_REST_S)

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
        parts = await self._of_all("rounds", timeout_s=timeout_s)
        return tuple(stats for part in parts for stats in part)

    async def _of_all(
        self, method: str, *, timeout_s: float, rest_s: float | None = None
    ) -> tuple[Any, ...]:
        """Returns the answers that come in time; after the first one the others have `rest_s`.

        Raises EngineError if there is none."""
        deadline_s = time.monotonic() + timeout_s
        broadcast = self._pipelines.broadcast(method)
        try:
            # Ray's `results_async` has one deadline for all answers.
            async with asyncio.timeout(timeout_s):
                calls = await broadcast._fetch_replica_results_async()
            answers = await answered(
                [call.get_async() for call in calls],
                timeout_s=deadline_s - time.monotonic(),
                rest_s=rest_s,
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

    async def _from_pipeline(
        self, request: Request, *, journey: _Journey
    ) -> AsyncGenerator[StreamItem, None]:
        tokens = [*request.prompt, *request.generated]
        choice = self._load_balancer.choose(
            tokens, migrated=journey.migrated, refused=journey.refused
        )
        target = None if choice is None else choice.address
        pipeline: str | None = None if choice is None else choice.pipeline
        journey.num_attempts += 1
        attempt = journey.num_attempts
        # Serve gives all calls of one HTTP request the same id and routes only one of them: the
        # choices (n) of a request would wait for ever. Outside its context each call has an id.
        responses = Context().run(
            self._streams.stream.remote,
            request,
            target=target,
            attempt=attempt,
            sender=self._load_balancer.sender,
            must_take=choice is None and bool(journey.refused),
        )
        self._open[request.request_id] = responses
        is_over = False
        try:
            with route_span(
                self._tracer, traceparent=request.traceparent, request_id=request.request_id
            ) as route:
                admitted = await self._admitted(responses, pipeline)
                route.set_attribute(names.PIPELINE, admitted.pipeline)
            self._load_balancer.admitted(choice, by=admitted.pipeline)
            pipeline, target = admitted.pipeline, admitted.address
            while True:
                try:
                    item = await self._next(responses, pipeline)
                except StopAsyncIteration:
                    break
                journey.heard(item)
                is_over = isinstance(item, EesdError) or item[-1].finish_reason is not None
                if not isinstance(item, EesdError):
                    tokens += [token for emission in item for token in emission.tokens]
                yield item
        except (ray.exceptions.RayError, RayServeException) as error:
            # After a short failure of the link the call may still run there: it is cancelled too.
            is_over = False
            if isinstance(error, PROCESS_LOST) and pipeline is not None:
                self._load_balancer.lost(pipeline)
            if isinstance(error, ray.exceptions.ActorUnavailableError):
                self._cancel_attempt(request.request_id, attempt, at=target)
            yield _ours(error)
        except EesdError as error:
            if isinstance(error, PeerLost) and pipeline is not None:
                self._load_balancer.lost(pipeline)
            yield error
        finally:
            if pipeline is not None:
                self._load_balancer.ended(pipeline, tokens)
            if self._open.get(request.request_id) is responses:
                del self._open[request.request_id]
            if not is_over:
                responses.cancel()

    def _cancel_attempt(self, request_id: RequestId, attempt: int, *, at: str | None) -> None:
        """Ray cancels no call that has failed; behind a broken link the call may still run."""
        if at is not None:
            self._background_tasks.add(
                task := asyncio.ensure_future(self._told(request_id, attempt, at))
            )
            task.add_done_callback(self._background_tasks.discard)

    async def _told(self, request_id: RequestId, attempt: int, address: str) -> None:
        sender, call = self._load_balancer.sender, self._pipelines.cancel.remote
        deadline_s = time.monotonic() + _CANCEL_S
        while time.monotonic() < deadline_s:
            try:
                async with asyncio.timeout(_STATE_S):
                    told = await Context().run(call, request_id, attempt, sender, target=address)
                if told == address:
                    return
            except (TimeoutError, ray.exceptions.RayError, RayServeException) as error:
                logger.debug("not cancelled: request=%s error=%r", request_id, error)
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _next(self, responses: Any, pipeline: str | None) -> Any:
        """Returns the next item. Raises PeerLost when the pipeline is gone."""
        return await next_of(
            responses,
            is_gone=lambda: pipeline is not None and self._load_balancer.is_gone(pipeline),
        )

    async def _admitted(self, responses: Any, pipeline: str | None) -> Admitted:
        """Waits for the first item: then a pipeline has the request in its ledger."""
        pause_s = self._recovery.stream_pause_s
        try:
            async with asyncio.timeout(pause_s):
                admitted: Admitted = await self._next(responses, pipeline)
        except TimeoutError as error:
            raise PeerLost(
                peer="pipeline", operation="stream", reason=f"no answer within {pause_s:g} s"
            ) from error
        except StopAsyncIteration as error:
            raise PeerLost(
                peer="pipeline", operation="stream", reason="the stream ended before it began"
            ) from error
        return admitted

    async def _until_ready(self, lost: EesdError) -> None:
        """Waits until a pipeline takes requests, or is ready for those it must take; Serve
        replaces the lost one."""
        pause_s = self._recovery.stream_pause_s
        try:
            async with asyncio.timeout(pause_s):
                while not await self._is_any_there():  # noqa: ASYNC110  # in other processes
                    await asyncio.sleep(_ASK_AGAIN_S)
        except TimeoutError as error:
            raise EngineError(
                f"no pipeline to continue with within {pause_s:g} s: {lost}"
            ) from error

    async def _is_any_there(self) -> bool:
        if self._load_balancer.num_usable:
            return True
        try:  # the router may be silent, and a draining pipeline is better than none
            states = await self._of_all("state", timeout_s=_STATE_S)
        except EngineError:  # none is there yet
            return False
        return any(state.is_ready for state in states)


async def answered(
    calls: Sequence[Awaitable[Any]], *, timeout_s: float, rest_s: float | None = None
) -> tuple[Any, ...]:
    """Returns what the calls answer in time, exceptions included.

    After the first answer the other calls have `rest_s`; None: all the time left. Raises
    TimeoutError if there is none.
    """
    loop = asyncio.get_running_loop()
    tasks = [asyncio.ensure_future(call) for call in calls]
    silent = set(tasks)
    deadline_s = loop.time() + timeout_s
    try:
        while silent and (left_s := deadline_s - loop.time()) > 0:
            done, silent = await asyncio.wait(
                silent, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if rest_s is not None and any(task.exception() is None for task in done):
                deadline_s = min(deadline_s, loop.time() + rest_s)
    finally:
        for task in silent:
            task.cancel()
    if tasks and len(silent) == len(tasks):
        raise TimeoutError
    return tuple(task.exception() or task.result() for task in tasks if task not in silent)


async def next_of(items: AsyncIterator[Any], *, is_gone: Callable[[], bool]) -> Any:
    """Waits for the next item without a limit. Raises PeerLost when its sender `is_gone`."""
    loop = asyncio.get_running_loop()
    wait = asyncio.timeout(None)
    timer: asyncio.TimerHandle

    def listen() -> None:
        nonlocal timer
        if is_gone():
            wait.reschedule(loop.time())
        else:
            timer = loop.call_later(_LISTEN_S, listen)

    timer = loop.call_later(_LISTEN_S, listen)
    try:
        async with wait:
            return await anext(items)
    except TimeoutError as error:
        if not wait.expired():
            raise
        raise PeerLost(
            peer="pipeline", operation="stream", reason="the router no longer lists it"
        ) from error
    finally:
        timer.cancel()


def _ours(error: Exception) -> EesdError:
    if isinstance(error, BackPressureError):
        return CapacityError(str(error))
    if isinstance(error, PROCESS_LOST):
        return PeerLost(peer="pipeline replica", operation="stream", reason=PROCESS_DIED)
    cause = getattr(error, "cause", None)
    return (
        cause if isinstance(cause, EesdError) else EngineError(f"{type(error).__name__}: {error}")
    )
