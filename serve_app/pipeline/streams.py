"""The live streams of one pipeline: the ledger, and the admission queue of its engine.

A stream is admitted when the pipeline is ready and `quarantine` allows it. When the engine breaks
under it, it returns to the queue and is admitted again, with its tokens so far. The supervisor says
when the pipeline broke and when it is ready again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Set
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError

from eesd_dist.errors import (
    PROCESS_DIED,
    CapacityError,
    EesdError,
    EngineError,
    Migrated,
    PeerLost,
    PoisonRequest,
    RequestError,
)
from eesd_dist.types import Emission, Request, RequestId
from eesd_dist.workers.messages import StreamItem
from serve_app.config import RecoveryConfig
from serve_app.pipeline.quarantine import Quarantine
from serve_app.pipeline.resume import Resubmit, resumed
from serve_app.pipeline.workers import Worker

logger = logging.getLogger(__name__)

_NOTICE_S = 2.0
"""Longest time between a stream's notice of a broken engine and the supervisor's."""
_EMPTY_S = 2.0
"""Timeout of calls to the drafting actor for its state, or to evict its streams."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """The call that reads a live request's tokens."""

    attempt: int
    """Number of the sender's attempt."""
    sender: str
    """Empty if unknown; then it is never taken for dead."""
    task: asyncio.Task[Any] | None


async def _nowhere() -> None:
    """There is no other pipeline."""


class Streams:
    """Owns the live streams; built inside a running event loop, with the pipeline unavailable."""

    def __init__(
        self,
        *,
        pipeline: str,
        drafter: Callable[[], Awaitable[Worker]],
        recovery: RecoveryConfig,
        delivered: Callable[[], None],
        find_peer_pipeline: Callable[[], Awaitable[object | None]] = _nowhere,
        round_timeout_s: float = 20.0,
    ) -> None:
        """`drafter` raises PeerLost if there is none; `delivered` is called for every item;
        `find_peer_pipeline` returns another pipeline that takes streams. A round that takes longer
        than `round_timeout_s` breaks the engine."""
        self._pipeline = pipeline
        self._drafter = drafter
        self._recovery = recovery
        self._on_delivery = delivered
        self._find_peer_pipeline = find_peer_pipeline
        self._round_timeout_s = round_timeout_s
        self._quarantine = Quarantine(
            suspect_after=recovery.suspect_after,
            refuse_after=recovery.suspect_after + recovery.max_interruptions,
        )
        self._live: dict[RequestId, _Reader] = {}
        """Live requests and their readers."""
        self._submissions = count(1)
        self._silent: Set[str] = frozenset()
        """Senders that the router last reported as silent."""
        self._is_ready = False
        self._broken_s = time.monotonic()
        """Since when it has been unavailable, if it is."""
        self._trouble: EesdError = EngineError(f"pipeline {pipeline} is starting")
        self._refused: dict[RequestId, PoisonRequest] = {}
        self._leaving = ""
        """Why streams have to continue in another pipeline; empty: they wait here."""
        self._given_up: EesdError | None = None
        """The error that ends every stream, when the pipeline is given up."""
        self._changed = asyncio.Event()
        """Set at every change of the above, and then replaced."""

    @property
    def live(self) -> tuple[RequestId, ...]:
        return tuple(self._live)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_calm(self) -> bool:
        """Returns whether no request is a suspect."""
        return self._quarantine.is_calm

    @property
    def num_suspects(self) -> int:
        """Suspects, which are tested alone before the others go on."""
        return self._quarantine.num_suspects

    def paused(self, trouble: EesdError) -> None:
        """The pipeline is unavailable: streams outside the engine wait."""
        self._trouble = trouble
        if self._is_ready:
            self._broken_s = time.monotonic()
        self._is_ready = False
        self._tell()

    async def broke(
        self,
        trouble: EesdError,
        *,
        drafter: Worker | None,
        keeps_streams: bool = True,
        is_attributable: bool = True,
    ) -> int:
        """Handles a crash of the engine; returns the number of streams in it. `drafter` has
        survived and keeps its streams, unless they have to be tested alone or `keeps_streams` is
        False. `is_attributable`: a request can have caused the crash."""
        interruption = self._quarantine.broke(
            keeps_streams=keeps_streams and drafter is not None, is_attributable=is_attributable
        )
        if interruption.refused is not None:
            self._refuse(interruption.refused, trouble)
        elif self._quarantine.num_suspects:
            logger.warning(
                "streams go on one at a time: pipeline=%s suspects=%d",
                self._pipeline,
                self._quarantine.num_suspects,
            )
        if interruption.evicts_all and drafter is not None:
            await self._recall(drafter, self._lost(trouble))
        self._tell()
        return len(interruption.running)

    async def leave(self, reason: str, *, drafter: Worker | None) -> None:
        """While the pipeline is unavailable, streams migrate to another one; suspects wait here."""
        if self._is_ready:
            return
        self._leaving = reason
        self._quarantine.release_all()
        if drafter is not None:
            await self._recall(drafter, self._lost(EngineError(reason)))
        self._tell()

    async def evict_all(self, *, drafter: Worker | None) -> None:
        """Evicts all streams to the queue without counting a crash: the paused pipeline is about to
        get another engine."""
        self._quarantine.release_all()
        if drafter is not None:
            await self._recall(drafter, Resubmit())
        self._tell()

    def resume(self) -> None:
        """The pipeline is ready."""
        self._is_ready = True
        self._leaving = ""
        self._tell()

    def give_up(self, error: EesdError) -> None:
        """The pipeline will not be ready again: every stream ends as lost, and may be resumed in
        another one."""
        self._is_ready = False
        self._given_up = EngineError(str(error))  # streams would wait after a PeerLost
        self._tell()

    async def stream(
        self, request: Request, *, attempt: int = 0, sender: str = ""
    ) -> AsyncGenerator[tuple[Emission, ...], None]:
        """Yields the request's emissions to the last; raises what ended them.

        A sender that has lost its stream sends it again with a higher `attempt`; then the earlier
        one ends, though it has not noticed that its caller no longer reads it. Serve's own retries
        have the same `attempt`.
        """
        request_id = request.request_id
        await self._displace(request_id, attempt=attempt, sender=sender)
        reader = _Reader(attempt=attempt, sender=sender, task=asyncio.current_task())
        self._live[request_id] = reader
        self._quarantine.add(
            request_id, crashes=request.crashes, attributable=request.attributable_crashes
        )
        parts = resumed(
            request,
            source=self._submitted,
            until_ready=self._no_wait,
            max_interruptions=None,
            room_wait_s=self._recovery.stream_pause_s,
        )
        try:
            async with aclosing(parts):
                async for part in parts:
                    yield part
        except EngineError as error:
            if error is self._given_up:
                raise self._lost(error) from error
            raise
        except asyncio.CancelledError:
            if reader.task is None or sender not in self._silent:
                raise
            reader.task.uncancel()  # if the sender is alive after all, it goes on from its tokens
            raise self._lost(EngineError("its sender was taken for dead")) from None
        finally:
            self._live.pop(request_id, None)
            self._refused.pop(request_id, None)
            self._quarantine.remove(request_id)
            self._tell()

    async def _displace(self, request_id: RequestId, *, attempt: int, sender: str) -> None:
        """Waits until the id is not in use. Raises RequestError if another sender uses it, and
        CapacityError, to be retried, if the sender's earlier attempt takes long to end."""
        deadline_s = time.monotonic() + _EMPTY_S
        while (reader := self._live.get(request_id)) is not None:
            is_repeat = reader.attempt == attempt and reader.sender == sender != ""
            if reader.attempt >= attempt and not is_repeat:
                raise RequestError(
                    f"request id {request_id} is already being served: choose another",
                    param="request_id",
                )
            if time.monotonic() > deadline_s:
                raise CapacityError(
                    f"request {request_id} has not yet left pipeline {self._pipeline}"
                )
            if reader.task is not None:
                reader.task.cancel()
            await _set_within(self._changed, _POLL_S)

    def cancel_silent(self, silent: Set[str]) -> None:
        """Ends the streams of senders that are newly reported as `silent`. Later requests of such a
        sender show that it is alive, and are served."""
        fallen, self._silent = silent - self._silent, silent
        self._tell()
        unread = [r.task for r in self._live.values() if r.task and r.sender in fallen]
        for task in unread:
            task.cancel()
        if unread:
            count = len(unread)
            logger.warning("unread streams ended: pipeline=%s streams=%d", self._pipeline, count)

    def cancel(self, request_id: RequestId, *, attempt: int, sender: str) -> None:
        """Ends a stream that its sender can no longer read here and reads from another pipeline."""
        reader = self._live.get(request_id)
        if reader is None or reader.sender != sender or reader.attempt > attempt:
            return
        if reader.task is not None:
            reader.task.cancel()
            logger.info("unread stream ended: pipeline=%s request=%s", self._pipeline, request_id)

    async def heard_again(self, sender: str) -> None:
        """Waits while the sender is reported as silent."""
        while sender in self._silent:
            await self._changed.wait()

    async def probe(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        """Yields one submission outside the queue, while no suspect is tested; an error ends it."""
        async with aclosing(self._submission(request)) as items:
            async for item in items:
                yield item

    async def _submitted(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        """Waits for admission, then yields one stay in the engine."""
        request_id = request.request_id
        await self._admit(request_id)
        has_broken = False
        try:
            async with aclosing(self._submission(request)) as items:
                async for item in items:
                    has_broken = isinstance(item, PeerLost)
                    is_evicted = not isinstance(item, EesdError) and self._delivered(request_id)
                    yield item
                    if isinstance(item, EesdError) or item[-1].finish_reason is not None:
                        return
                    if is_evicted:
                        break
            await self._until_empty()
            yield Resubmit()
        finally:
            if has_broken:
                self._quarantine.mark_dropped(request_id)
            else:
                self._quarantine.release(request_id)
            self._tell()

    async def _submission(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        """Yields what the drafting actor returns for the request."""
        try:
            drafter = await self._drafter()
        except PeerLost as error:
            yield error
            return
        request = replace(request, submission=next(self._submissions))
        items = drafter.handle.submit.options(num_returns="streaming").remote(request)
        is_over = False
        try:
            async for reference in items:
                item: StreamItem = await reference
                is_over = isinstance(item, EesdError) or item[-1].finish_reason is not None
                yield item
        except RayError as error:
            is_over = True
            yield lost(drafter, error, operation="stream")
        finally:
            if not is_over:
                drafter.handle.cancel.remote(request.request_id, request.submission)

    async def _admit(self, request_id: RequestId) -> None:
        """Waits until the stream is admitted; raises why it will not be."""
        since_s = time.monotonic()
        while not (self._is_ready and self._quarantine.may_admit(request_id)):
            self._raise_refusal(request_id)
            wait_s = self._patience_left_s(request_id, since_s)
            if wait_s > 0:
                await _set_within(self._changed, wait_s)
            elif self._is_ready:
                self._drop_alone(request_id)
            else:
                pause_s = self._recovery.stream_pause_s
                if not self._quarantine.is_suspect(request_id) and await self._find_peer_pipeline():
                    raise self._migrated(request_id, f"it is unavailable after {pause_s:g} s")
                raise EngineError(
                    f"pipeline {self._pipeline} is not ready again after {pause_s:g} s: "
                    f"{self._trouble}"
                )
        self._raise_refusal(request_id)
        self._quarantine.admit(request_id)

    def _raise_refusal(self, request_id: RequestId) -> None:
        if request_id in self._refused:  # a poison request does not migrate
            raise self._refused[request_id]
        if self._given_up is not None:
            raise self._given_up
        if self._leaving and not self._quarantine.is_suspect(request_id):
            raise self._migrated(request_id, self._leaving)

    def _migrated(self, request_id: RequestId, reason: str) -> Migrated:
        return Migrated(
            by=self._pipeline,
            to=None,
            reason=reason,
            crashes=self._quarantine.crashes(request_id),
            attributable_crashes=self._quarantine.attributable(request_id),
        )

    def _patience_left_s(self, request_id: RequestId, since_s: float) -> float:
        """Returns how long the stream still waits in the present state."""
        now_s = time.monotonic()
        if not self._is_ready:
            return max(since_s, self._broken_s) + self._recovery.stream_pause_s - now_s
        if self._quarantine.was_dropped(request_id):
            return since_s + _NOTICE_S - now_s
        return self._recovery.stream_pause_s  # others are tested, one after the other

    def _delivered(self, request_id: RequestId) -> bool:
        """Notes an item; returns whether the stream is evicted for the next suspect."""
        self._on_delivery()
        was_calm = self._quarantine.is_calm
        is_evicted = self._quarantine.delivered(request_id)
        if not was_calm:
            self._tell()
        return is_evicted

    def _drop_alone(self, request_id: RequestId) -> None:
        """The engine dropped this stream and did not break."""
        crashes = self._quarantine.drop_alone(request_id)
        if crashes > self._recovery.max_interruptions:
            raise EngineError(
                f"request {request_id} is given up: dropped {crashes} times since its last token"
            )

    async def _until_empty(self) -> None:
        """Waits until the last round of an evicted stream is over: the next stream runs alone."""
        deadline_s = time.monotonic() + self._round_timeout_s
        while self._is_ready and time.monotonic() < deadline_s:
            try:
                drafter = await self._drafter()
                async with asyncio.timeout(_EMPTY_S):
                    stats = await drafter.handle.stats.remote()
            except (TimeoutError, PeerLost, RayError):  # the next submission raises it
                return
            if stats.num_running + stats.num_waiting == 0:
                return
            await asyncio.sleep(_POLL_S)

    async def _no_wait(self, error: EesdError) -> None:
        """Streams wait for admission instead."""

    def _refuse(self, request_id: RequestId, trouble: EesdError) -> None:
        error = PoisonRequest(
            request_id=request_id,
            crashes=self._quarantine.crashes(request_id),
            reason=str(trouble),
        )
        self._refused[request_id] = error
        logger.error("refused: pipeline=%s error=%s", self._pipeline, error)

    def _lost(self, trouble: EesdError) -> PeerLost:
        return PeerLost(peer=self._pipeline, operation="rounds", reason=str(trouble))

    async def _recall(self, drafter: Worker, word: EesdError) -> None:
        """The drafting actor evicts all streams, which return to the admission queue."""
        try:
            async with asyncio.timeout(_EMPTY_S):
                await drafter.handle.evict.remote(None, word)
        except (TimeoutError, RayError) as error:  # dead: its streams return by themselves
            logger.warning("streams not recalled: pipeline=%s error=%r", self._pipeline, error)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def lost(worker: Worker, error: RayError, *, operation: str) -> PeerLost:
    """Converts Ray's error about an actor."""
    has_died = isinstance(error, ray.exceptions.RayActorError)
    return PeerLost(
        peer=worker.label,
        operation=operation,
        reason=PROCESS_DIED if has_died else str(error),
    )


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    try:  # `wait_for` would swallow a cancellation that comes together with the event
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
