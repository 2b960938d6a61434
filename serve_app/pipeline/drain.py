"""Draining of a pipeline: how it learns that it has to, and how its live streams leave.

Serve takes a replica that it will stop out of the set of those it sends requests to, waits for its
requests to end, and tells it nothing. So the replica asks: once a second it calls itself, through
Serve, by its address. When another replica answers, it is no longer in that set. An operator can
also drain it directly.

Either way the pipeline takes no more requests and migrates its live streams: they continue in
another pipeline from their tokens. If there is no other pipeline, it serves them to their ends.
Nothing here depends on what a stream carries.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eesd_dist.errors import ConfigError, EesdError, Migrated
from eesd_dist.routing.directory import PipelineReport
from eesd_dist.types import RequestId
from serve_app.pipeline.kv_migration import MigrationReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_TIMEOUT_S = 3.0
_BY_HAND = "drained by hand"
_BY_SERVE = "Serve takes it down"

FindPeerPipeline = Callable[[], Awaitable[PipelineReport | None]]
"""Returns another pipeline that takes requests, if there is one."""
Migrate = Callable[[PipelineReport, Collection[RequestId]], Awaitable[MigrationReport]]
"""Migrates live requests with their pages, and ends their streams with `Migrated`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Result of draining by an operator."""

    pipeline: str
    num_migrated: int
    """Live streams that were told to continue in another pipeline."""
    migration: MigrationReport | None = None
    """How they were migrated; None if there were none, or the other pipeline did not answer."""


class Draining:
    """Drains one pipeline."""

    def __init__(
        self,
        *,
        pipeline: str,
        address: str,
        answering_replica: Callable[[], Awaitable[str | None]],
        find_peer_pipeline: FindPeerPipeline,
        publish_status: Callable[[], Awaitable[None]],
        migrate: Migrate | None = None,
        period_s: float = 1.0,
        doubt_s: float = 0.2,
        keep_s: float = 10.0,
    ) -> None:
        """`answering_replica` returns the address of the replica that answers a call to `address`
        (this one, while Serve counts on it), or None if unknown. `publish_status` tells the router;
        `migrate` is tried before streams are told to leave.
        """
        self._pipeline = pipeline
        self._address = address
        self._answering_replica = answering_replica
        self._find_peer_pipeline = find_peer_pipeline
        self._publish_status = publish_status
        self._migrate = migrate
        self._period_s = period_s
        self._doubt_s = doubt_s
        self._keep_s = keep_s
        """How long a stream is kept that no other pipeline took: longer than a dead pipeline stays
        in the router's directory."""
        self._by_hand = False
        self._by_serve = False
        self._was_counted_on = False
        """Whether Serve has ever sent a call here: a starting replica is not in the set yet."""
        self._is_other_known = False
        """Whether there was another pipeline when it was last looked for."""
        self._last_migration: MigrationReport | None = None
        """None before the first, and after a failed one."""
        self._exits: set[_Exit] = set()
        self._one_by_one = asyncio.Lock()

    @property
    def reason(self) -> str:
        """Why no more requests are taken; empty if they are."""
        return _BY_HAND if self._by_hand else _BY_SERVE if self._by_serve else ""

    async def watch(self) -> None:
        """Runs as long as the pipeline does."""
        while True:
            try:
                await self._poll()
            except Exception:  # any error: without this watch no stream would ever leave
                logger.exception("drain watch goes on: pipeline=%s", self._pipeline)
            await asyncio.sleep(self._period_s)

    async def drain(self) -> Drained:
        """Takes no more requests and migrates the live ones.

        Raises ConfigError when there is no other pipeline that takes requests.
        """
        if await self._find_peer_pipeline() is None:
            raise ConfigError(
                f"{self._pipeline} goes on: no other pipeline takes requests; start another one "
                "first (pipelines.min_count), or wait until it is ready"
            )
        async with self._one_by_one:
            self._by_hand = True
            await self._publish_status()
            num_migrated = await self._migrate_all()
            return Drained(
                pipeline=self._pipeline, num_migrated=num_migrated, migration=self._last_migration
            )

    async def undrain(self) -> None:
        """Takes requests again, unless Serve drains it too."""
        self._by_hand = False
        await self._publish_status()

    async def watched(
        self, parts: AsyncGenerator[T, None], request_id: RequestId, *, must_take: bool = False
    ) -> AsyncGenerator[T, None]:
        """Yields the same parts; raises Migrated, also during a wait, when the stream is to leave.

        With `must_take` not at once: its sender has tried all pipelines, and one that is known here
        may be dead.
        """
        async with aclosing(parts):
            if self.reason and self._is_other_known and not must_take:
                raise self._migrated()
            now_s = asyncio.get_running_loop().time()
            opens_s = now_s + self._keep_s if must_take else now_s
            way_out = _Exit(request_id, opens_s=opens_s)
            self._exits.add(way_out)
            try:
                while True:
                    try:
                        part = await way_out.or_next(parts)
                    except StopAsyncIteration:
                        return
                    yield part
            finally:
                self._exits.discard(way_out)

    async def _poll(self) -> None:
        was, self._by_serve = self._by_serve, await self._is_left_out()
        if was != self._by_serve:
            logger.info("draining=%s: pipeline=%s", self._by_serve, self._pipeline)
            await self._publish_status()
        async with self._one_by_one:
            if self.reason:
                await self._migrate_all()

    async def _is_left_out(self) -> bool:
        """Returns whether Serve sends no more requests here; the last answer if it is unknown."""
        answered = await self._answering_replica()
        if answered not in (None, self._address):
            await asyncio.sleep(self._doubt_s)
            answered = await self._answering_replica()
        self._was_counted_on = self._was_counted_on or answered == self._address
        if answered is None:
            return self._by_serve
        return self._was_counted_on and answered != self._address

    async def _migrate_all(self) -> int:
        """Returns how many streams were told to leave."""
        self._last_migration = None
        other = await self._find_peer_pipeline()
        self._is_other_known = other is not None
        exits = self._open_exits()
        if other is None or not exits:
            return 0
        to = None  # the sender of a request chooses by the load of the pipelines
        if self._migrate is not None:
            try:
                leaving = [way_out.request_id for way_out in exits]
                self._last_migration = await self._migrate(other, leaving)
                to = other.pipeline_id if self._last_migration.how == "pages" else None
            except EesdError as error:
                logger.warning("recomputed: pipeline=%s error=%s", self._pipeline, error)
            except Exception:  # a bug costs the pages, but the streams still leave
                logger.exception("recomputed: pipeline=%s", self._pipeline)
        for way_out in self._open_exits():
            way_out.take(self._migrated(to=to))
        logger.info("streams told to leave: pipeline=%s streams=%d", self._pipeline, len(exits))
        return len(exits)

    def _open_exits(self) -> "tuple[_Exit, ...]":
        now_s = asyncio.get_running_loop().time()
        return tuple(way_out for way_out in self._exits if way_out.opens_s <= now_s)

    def _migrated(self, *, to: str | None = None) -> Migrated:
        return Migrated(by=self._pipeline, to=to, reason=self.reason)


class _Exit:
    """Ends one stream's wait for its next part, from outside.

    A timeout without a deadline costs microseconds a part; a task for each would cost more.
    """

    def __init__(self, request_id: RequestId, *, opens_s: float) -> None:
        """It may be taken from `opens_s` on, on the event loop's clock."""
        self.request_id = request_id
        self.opens_s = opens_s
        self._order: Migrated | None = None
        self._wait: asyncio.Timeout | None = None
        """None between two waits."""

    def take(self, order: Migrated) -> None:
        self._order = order
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    async def or_next(self, parts: AsyncGenerator[T, None]) -> T:
        if self._order is not None:
            raise self._order
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._wait = wait
                try:
                    return await anext(parts)
                finally:
                    self._wait = None
        except TimeoutError:
            if self._order is None:
                raise
            raise self._order from None


class AskServe:
    """Calls the replica itself, through Serve; another one answers when it is left out."""

    def __init__(self, *, app: str, deployment: str, address: str) -> None:
        self._app = app
        self._deployment = deployment
        self._address = address
        self._handle: Any = None
        """None before the first call: making it asks Serve's controller."""

    async def __call__(self) -> str | None:
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(
                    serve.get_deployment_handle, self._deployment, self._app
                )
            response = self._handle.whoami.remote(target=self._address)
            return await self._answer(response)
        except (TimeoutError, RayError, RayServeException) as error:
            logger.debug("Serve does not answer: error=%r", error)
            return None

    async def _answer(self, response: Any) -> str:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answer: str = await response
        except TimeoutError:
            response.cancel()
            raise
        return answer
