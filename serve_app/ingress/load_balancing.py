"""Load balancing in an ingress: which pipeline a request goes to.

Asks the router's directory twice a second and decides from the latest answer: a choice makes no
call, and while the router is silent the last answer stays in use. Where it cannot decide, Serve
does. The decision itself is `eesd_dist.routing.choice`.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from random import Random
from typing import Any
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter, generate_latest
from ray.exceptions import RayError

from eesd_dist.errors import EesdError, Migrated
from eesd_dist.routing.choice import PipelineChoice, PipelineChooser
from eesd_dist.routing.directory import PipelineId
from serve_app.config import ServiceConfig
from serve_app.router import find_router, pipelines_of

logger = logging.getLogger(__name__)

_POLL_S = 0.5


class LoadBalancer:
    """Chooses pipelines for one ingress."""

    def __init__(self, config: ServiceConfig, *, ingress: str = "") -> None:
        """`ingress` is the label of its metrics."""
        self._config = config
        cache = config.engine.cache
        self._chooser = PipelineChooser(
            block_size=cache.page_size,
            max_blocks=cache.num_pages if cache.prefix_caching else 0,
            clock=time.monotonic,
            rng=Random(),
            expiry_s=config.router.expiry_s,
        )
        self.sender = uuid4().hex
        """Identifies this ingress to the router and pipelines; unique even if `ingress` is not."""
        self._counts = _Counts(ingress)
        self._polling: asyncio.Task[None] | None = None
        """None before the first request."""
        self._is_silent = False

    def start(self) -> None:
        """Starts to poll the router; needs a running event loop."""
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._poll())

    def choose(
        self, tokens: Sequence[int], *, migrated: Migrated | None, refused: Collection[str] = ()
    ) -> PipelineChoice | None:
        """Returns the pipeline for a request with these tokens, new or `migrated`, none of those
        that have `refused` it; None leaves the choice to Serve."""
        if migrated is not None:
            self._counts.migrations.inc()
        choice = self._chosen(tokens, migrated, refused)
        self._counts.count(choice)
        return choice

    def admitted(self, choice: PipelineChoice | None, *, by: str) -> None:
        self._chooser.admitted(choice, by=PipelineId(by))

    def ended(self, pipeline: str, tokens: Sequence[int]) -> None:
        """A stream is over; `tokens` are all that its pipeline has computed."""
        self._chooser.ended(PipelineId(pipeline), tokens)

    def lost(self, pipeline: str) -> None:
        self._chooser.lost(PipelineId(pipeline))

    def is_gone(self, pipeline: str) -> bool:
        """Returns whether the pipeline is gone, as far as the router can tell."""
        return self._chooser.is_gone(PipelineId(pipeline))

    @property
    def num_usable(self) -> int:
        """Pipelines that take requests, by the latest answer of the router."""
        return sum(bool(each["is_usable"]) for each in self._chooser.describe())

    def page(self) -> bytes:
        """Returns the counters as Prometheus text."""
        return generate_latest(self._counts.registry)

    def _chosen(
        self, tokens: Sequence[int], migrated: Migrated | None, refused: Collection[str]
    ) -> PipelineChoice | None:
        if migrated is None:
            return self._chooser.choose(tokens, excluded=refused)
        if migrated.to is not None:
            there = self._chooser.choose(tokens, only=migrated.to)
            if there is not None:
                return there
        return self._chooser.choose(tokens, excluded={migrated.by, *refused})

    async def _poll(self) -> None:
        router: Any = None
        while True:
            try:
                if router is None:
                    router = await asyncio.to_thread(find_router, self._config.router)
                listed = await pipelines_of(router, app=self._config.app_name, ingress=self.sender)
                self._chooser.refresh(listed)
                self._is_silent = False
            except (EesdError, RayError) as error:
                router = None  # it may have been restarted under its name
                if not self._is_silent:
                    logger.warning("router silent, its last answer is used: error=%s", error)
                self._is_silent = True
            await asyncio.sleep(_POLL_S)


class _Counts:
    """Counters of the requests that came through this ingress."""

    def __init__(self, ingress: str) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str) -> Counter:
            return Counter(name, what, ["ingress"], registry=self.registry).labels(ingress)

        self.requests = counter("eesd_router_requests", "Requests sent to a pipeline.")
        self.unchosen = counter("eesd_router_unchosen", "Requests left to Serve's choice.")
        self.hits = counter("eesd_router_prefix_hits", "Requests sent to a cached prefix.")
        self.tokens = counter("eesd_router_prefix_tokens", "Prompt tokens expected in that cache.")
        self.migrations = counter(
            "eesd_router_migrations", "Streams migrated from one pipeline to another."
        )

    def count(self, choice: PipelineChoice | None) -> None:
        self.requests.inc()
        if choice is None:
            self.unchosen.inc()
        elif choice.num_cached_tokens:
            self.hits.inc()
            self.tokens.inc(choice.num_cached_tokens)
