"""Draining of a pipeline: it takes no more requests, and its live streams leave.

Serve calls `leave` before it stops a replica; an operator can drain a pipeline directly, and
autoscaling does before it wants fewer. Each time its streams continue in another pipeline, with
their KV pages or from their tokens. If there is no other pipeline, it serves them to their ends.
Nothing here depends on what a stream carries.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from eesd_dist.errors import ConfigError, EesdError
from eesd_dist.routing.directory import PipelineReport
from serve_app.pipeline.kv_migration import MigrationReport

logger = logging.getLogger(__name__)

_BY_HAND = "drained by hand"
_BY_SERVE = "Serve takes it down"
_BY_AUTOSCALING = "autoscaling wants fewer pipelines"

FindPeerPipeline = Callable[[], Awaitable[PipelineReport | None]]
"""Returns another pipeline that takes requests, if there is one."""
Migrate = Callable[[PipelineReport, str, float | None], Awaitable[MigrationReport]]
"""Migrates all live requests to a pipeline, for this reason: their streams end with `Migrated`.
Pages are copied for so many seconds, or as long as that makes progress."""
_TELLING_S = 2.0
"""Left for telling the streams to leave that were not copied in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Result of draining by an operator."""

    pipeline: str
    num_migrated: int
    """Live streams that were told to continue in another pipeline."""
    migration: MigrationReport | None = None
    """Report of their migration; None if there were none, or the other pipeline did not answer."""


class Draining:
    """Drains one pipeline."""

    def __init__(
        self,
        *,
        pipeline: str,
        num_live: Callable[[], Awaitable[int]],
        find_peer_pipeline: FindPeerPipeline,
        publish_status: Callable[[], Awaitable[None]],
        migrate: Migrate,
        period_s: float = 1.0,
    ) -> None:
        """`publish_status` tells the router, which tells the ingresses."""
        self._pipeline = pipeline
        self._num_live = num_live
        self._find_peer_pipeline = find_peer_pipeline
        self._publish_status = publish_status
        self._migrate = migrate
        self._period_s = period_s
        self._reason = ""
        self._one_by_one = asyncio.Lock()
        self._emptying: asyncio.Task[None] | None = None
        """Migrates what arrives late; None while it is not drained."""

    @property
    def reason(self) -> str:
        """Reason why no more requests are taken; empty if they are."""
        return self._reason

    @property
    def is_last(self) -> bool:
        """True if Serve takes the pipeline down."""
        return self._reason == _BY_SERVE

    async def drain(self) -> Drained:
        """Takes no more requests and migrates the live ones.

        Raises ConfigError when there is no other pipeline that takes requests.
        """
        if await self._find_peer_pipeline() is None:
            raise ConfigError(
                f"{self._pipeline} goes on: no other pipeline takes requests; start another one "
                "first (pipelines.min_count), or wait until it is ready"
            )
        if self._reason != _BY_SERVE:
            self._reason = _BY_HAND
        await self._publish_status()
        migration = await self._migrate_all()
        if self._emptying is None:
            self._emptying = asyncio.ensure_future(self._keep_empty())
        num_migrated = 0 if migration is None else migration.num_requests
        return Drained(pipeline=self._pipeline, num_migrated=num_migrated, migration=migration)

    async def undrain(self) -> None:
        """Takes requests again. Raises ConfigError if it was not drained by hand."""
        if self._reason and self._reason != _BY_HAND:
            raise ConfigError(f"{self._pipeline} stays drained: {self._reason}")
        self._take_requests()
        await self._publish_status()

    def follow(self, *, must_leave: bool) -> None:
        """Does what autoscaling wants: it drains a pipeline before the number is lowered, and lets
        it take requests again where another one was stopped. The next heartbeat tells the
        router."""
        if must_leave and not self._reason:
            self._reason = _BY_AUTOSCALING
            self._emptying = asyncio.ensure_future(self._keep_empty())
        elif not must_leave and self._reason == _BY_AUTOSCALING:
            self._take_requests()

    def _take_requests(self) -> None:
        self._reason = ""
        if self._emptying is not None:
            self._emptying.cancel()
            self._emptying = None

    async def leave(self, *, timeout_s: float) -> None:
        """Returns when no stream is live, or after `timeout_s`."""
        ends_s = time.monotonic() + timeout_s
        self._reason = _BY_SERVE
        if self._emptying is not None:  # it may copy for longer
            self._emptying.cancel()
        logger.info("draining: pipeline=%s", self._pipeline)
        await self._publish_status()
        try:
            async with asyncio.timeout(timeout_s):
                while await self._num_live():
                    left_s = ends_s - time.monotonic()
                    await self._migrate_all(budget_s=max(left_s - _TELLING_S, left_s / 2))
                    await asyncio.sleep(self._period_s)
        except TimeoutError:
            logger.warning("live streams are cut off: pipeline=%s", self._pipeline)

    async def _keep_empty(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                if await self._num_live():
                    await self._migrate_all()
            except Exception:  # any error: without this task no later stream would ever leave
                logger.exception("draining goes on: pipeline=%s", self._pipeline)

    async def _migrate_all(self, *, budget_s: float | None = None) -> MigrationReport | None:
        """Migrates all live streams if another pipeline takes them; None if it could not."""
        async with self._one_by_one:
            other = await self._find_peer_pipeline()
            if other is None or not await self._num_live():
                return None
            try:
                return await self._migrate(other, self._reason, budget_s)
            except EesdError as error:
                logger.warning("not migrated: pipeline=%s error=%s", self._pipeline, error)
                return None
