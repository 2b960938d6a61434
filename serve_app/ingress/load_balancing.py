"""Load balancing in an ingress: which pipeline a request goes to.

The router's directory answers as soon as a pipeline comes, goes or stops taking requests. A choice
makes no call; while the router is silent the pipelines themselves are asked. The decision itself is
`eesd_dist.routing.choice`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from ray.exceptions import RayError

from eesd_dist.errors import EesdError
from eesd_dist.routing.choice import PipelineChoice, PipelineChooser
from eesd_dist.routing.directory import Listed, PipelineId
from eesd_dist.routing.fleet.size import FleetTargets
from eesd_dist.routing.quotas import Held
from eesd_dist.types import RequestId
from serve_app.config import ServiceConfig
from serve_app.ingress.replicas import of_all
from serve_app.ingress.retry import Attempts
from serve_app.router.actor import find_router
from serve_app.router.calls import pipelines_of

logger = logging.getLogger(__name__)

_POLL_S = 0.5
"""Longest time for which the router may keep an answer back that changes no membership."""
_ASK_S = 2.0
_TELL_S = 2.0
"""Greatest age of the metrics of an ingress that another one shows."""
_MAX_BLOCKS = 4096
"""Blocks remembered of each pipeline where it has not reported how many pages it has."""
_KEPT_S = 0.5
"""Time that a pipeline has to say whether it keeps a stream; later the stream is computed again."""


class LoadBalancer:
    """Chooses pipelines for one ingress."""

    def __init__(self, config: ServiceConfig, *, pipelines: Any, ingress: str = "") -> None:
        """`pipelines` is Serve's handle, `ingress` the label of its metrics."""
        self._config = config
        self._pipelines = pipelines
        self._ingress = ingress
        cache = config.engine.cache
        self._chooser = PipelineChooser(
            block_size=cache.page_size,
            max_blocks=_MAX_BLOCKS if cache.prefix_caching else 0,
            clock=time.monotonic,
            rng=Random(),
            expiry_s=config.router.expiry_s,
        )
        self._counts = Counts(ingress)
        self._changed = asyncio.Event()
        """Set at every answer, and then replaced."""
        self.on_answer: Callable[[dict[str, str]], None] = lambda _: None
        """Called at every answer, with the leader of each pipeline."""
        self.num_waiting = 0
        """Requests of this ingress for which no pipeline is ready; the router is told."""
        self.targets: FleetTargets | None = None
        """Targets of autoscaling, from `user_config`; None: those of the application."""
        self._polling: asyncio.Task[None] | None = None
        """None before the first request."""
        self._is_silent = False
        self.page_of_ingress: Callable[[], bytes] = self.page
        """Returns all metrics of this ingress, for the router."""
        self.permits_held: Callable[[], Held] = dict
        """Returns the permits in use at this ingress, for the router."""
        self.router: Any = None
        """None while it is silent."""
        self._last_report_s = 0.0

    def start(self) -> None:
        """Starts to ask the router; needs a running event loop."""
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._poll())

    def choose(self, attempts: Attempts) -> PipelineChoice | None:
        """Returns the pipeline for the next attempt at a request; None if none is ready.

        Raises PoisonRequest for a request that has killed the engine it was alone in.
        """
        attempts.blame(self._chooser.crashed())
        tokens, salt = attempts.tokens, attempts.cache_salt
        choice = None
        if attempts.target is not None:
            choice = self._chooser.choose(tokens, cache_salt=salt, only=attempts.target)
            attempts.target = None
        if choice is None:
            choice = self._chooser.choose(tokens, cache_salt=salt, excluded=attempts.refused)
        if choice is not None:
            self._counts.count(choice)
        return choice

    async def pipeline_keeping(self, request_id: RequestId) -> str | None:
        """Returns the pipeline that keeps most of a stream; None if none says that it does."""
        if not self._chooser.addresses():  # this ingress has just started
            await self.news(timeout_s=_ASK_S)
        addresses = self._chooser.addresses()
        calls = [_num_kept(address, request_id) for address in addresses.values()]
        answers = zip(await asyncio.gather(*calls), addresses, strict=True)
        holders = [(num_tokens, name) for num_tokens, name in answers if num_tokens is not None]
        pipeline = max(holders)[1] if holders else None
        logger.info("stream resumed: request=%s kept_by=%s", request_id, pipeline or "none")
        return pipeline

    def migrated(self) -> None:
        """Counts a stream that another pipeline continues."""
        self._counts.migrations.inc()

    def ended(self, pipeline: str, attempts: Attempts) -> None:
        """A stream is over; its pipeline has computed the tokens of its attempts."""
        self._chooser.ended(PipelineId(pipeline), attempts.tokens, cache_salt=attempts.cache_salt)

    def lost(self, pipeline: str) -> None:
        self._chooser.lost(PipelineId(pipeline))

    async def news(self, *, timeout_s: float) -> None:
        """Waits for the next answer about the pipelines."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    @property
    def slowest_start_s(self) -> float | None:
        """The longest start of a pipeline; None if none was measured."""
        return self._chooser.slowest_start_s()

    def unavailable(self) -> dict[str, str]:
        """Returns why each pipeline is not ready that is not, by the latest answer: also of those
        that start, which Serve's handles do not reach."""
        return self._chooser.unavailable()

    def kv_tokens(self) -> int | None:
        """Returns the least that the KV pages of a pipeline hold; None while it is not known."""
        return self._chooser.kv_tokens()

    def page(self) -> bytes:
        """Returns the counters as Prometheus text."""
        return generate_latest(self._counts.registry)

    async def _poll(self) -> None:
        router: Any = None
        membership_id = ""
        while True:
            try:
                if router is None:
                    router = await asyncio.to_thread(find_router, self._config.router)
                membership_id, listed = await pipelines_of(
                    router,
                    app=self._config.app_name,
                    membership_id=membership_id,
                    wait_s=_POLL_S,
                    ingress=self._ingress,
                    num_waiting=self.num_waiting,
                    targets=self.targets,
                )
                self._refresh(listed)
                self._is_silent = False
                self.router = router
                self._tell(router)
            except (EesdError, RayError) as error:
                self.router = router = None  # it may have been restarted under its name
                if not self._is_silent:
                    logger.warning("router silent, pipelines are asked: error=%s", error)
                self._is_silent = True
                await self._ask_pipelines()
                await asyncio.sleep(_POLL_S)
            except Exception as error:  # a bug: without this task no request would find a pipeline
                if str(error).startswith("cannot schedule new futures"):  # its process ends
                    return
                logger.exception("pipelines not listed")
                await asyncio.sleep(_POLL_S)

    def _tell(self, router: Any) -> None:
        """Sends the metrics and permits of this ingress, without waiting for an answer."""
        time_s = time.monotonic()
        # A permit that is not told of in time is taken back.
        if time_s - self._last_report_s >= min(_TELL_S, self._config.router.expiry_s / 3):
            self._last_report_s = time_s
            page = self.page_of_ingress()
            router.note_page.remote(self._config.app_name, self._ingress, page)
            router.hold.remote(self._config.app_name, self._ingress, self.permits_held())

    async def _ask_pipelines(self) -> None:
        try:
            reports = await of_all(self._pipelines, "report", timeout_s=_ASK_S)
        except EesdError as error:
            logger.info("no answer from the pipelines: error=%s", error)
            return
        self._refresh([Listed(report=report, age_s=0.0) for report in reports])

    def _refresh(self, listed: Sequence[Listed]) -> None:
        self._chooser.refresh(listed)
        self.on_answer(self._chooser.leaders())
        self._changed.set()
        self._changed = asyncio.Event()


async def _num_kept(address: Any, request_id: RequestId) -> int | None:
    try:
        async with asyncio.timeout(_KEPT_S):
            num_tokens: int | None = await address.num_kept.remote(request_id)
    except (TimeoutError, RayError):
        return None
    return num_tokens


class Counts:
    """Counters of the requests that came through this ingress."""

    def __init__(self, ingress: str) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str) -> Counter:
            return Counter(name, what, ["ingress"], registry=self.registry).labels(ingress)

        self.requests = counter("eesd_router_requests", "Requests sent to a pipeline.")
        self.hits = counter("eesd_router_prefix_hits", "Requests sent to a cached prefix.")
        self.tokens = counter("eesd_router_prefix_tokens", "Prompt tokens expected in that cache.")
        self.migrations = counter(
            "eesd_router_migrations", "Streams migrated from one pipeline to another."
        )

    def count(self, choice: PipelineChoice) -> None:
        self.requests.inc()
        if choice.num_cached_tokens:
            self.hits.inc()
            self.tokens.inc(choice.num_cached_tokens)
