"""The router: what all pipelines have learnt about acceptance, and which pipelines there are.

One named, detached actor of the control plane. It hears of rounds after they are over and answers
with beliefs for the rounds to come; no token passes through it, and nobody waits for it. Killed, it
is restarted by Ray and goes on from its checkpoint.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import ray

from eesd_dist.actors.contracts import RouterNews
from eesd_dist.config import SpeculationConfig
from eesd_dist.errors import EesdError
from eesd_dist.routing.beliefs import BeliefBook, DraftPlan
from eesd_dist.routing.directory import PipelineDirectory, PipelineReport
from eesd_dist.types import RequestId
from serve_app.config import RouterConfig, ServiceConfig

logger = logging.getLogger(__name__)


class Router:
    """Wrapped as an actor by `router_handle`."""

    def __init__(self, config: RouterConfig, speculation: SpeculationConfig) -> None:
        self._config = config
        self._book = BeliefBook(discount=speculation.discount)
        self._directory = PipelineDirectory(
            clock=time.monotonic, rng=Random(speculation.seed), expiry_s=config.expiry_s
        )
        self._saved_s = time.monotonic()
        self._recall()

    async def advise(self, news: RouterNews) -> dict[RequestId, DraftPlan]:
        """Learns from finished rounds; the answer is the plans of the requests heard of."""
        plans = {
            request_id: self._book.admit(request_id, workload)
            for request_id, workload in news.admitted
        }
        plans |= self._book.observe(news.outcomes)
        for request_id in news.finished:
            self._book.finish(request_id)
            plans.pop(request_id, None)
        self._save_sometimes()
        return plans

    async def heartbeat(self, report: PipelineReport) -> None:
        self._directory.heartbeat(report)

    async def describe(self) -> dict[str, object]:
        """Plain JSON, for an operator's eyes."""
        return {
            "pipelines": self._directory.describe(),
            "workloads": {name: pool.to_json() for name, pool in self._book.pools().items()},
            "num_live": self._book.num_live,
        }

    def _recall(self) -> None:
        file = self._config.checkpoint
        if file is None or not file.is_file():
            return
        try:
            self._book.load(file)
        except EesdError as error:  # beliefs are a cache: without them the service is only slower
            logger.error("beliefs not recalled, starting with none: error=%s", error)

    def _save_sometimes(self) -> None:
        file = self._config.checkpoint
        now_s = time.monotonic()
        if file is None or now_s - self._saved_s < self._config.checkpoint_every_s:
            return
        self._saved_s = now_s
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._book.save(file)
        except OSError as error:
            logger.error("beliefs not saved: file=%s error=%s", file, error)


@dataclass(frozen=True, slots=True)
class AskRouter:
    """The drafting actor's way to the router."""

    handle: Any

    async def __call__(self, news: RouterNews) -> dict[RequestId, DraftPlan]:
        plans: dict[RequestId, DraftPlan] = await self.handle.advise.remote(news)
        return plans


def router_handle(config: ServiceConfig) -> Any:
    """The one router of this name; started by whoever asks first."""
    return (
        ray.remote(Router)
        .options(
            name=config.router.name,
            namespace=config.router.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=1000,
        )
        .remote(config.router, config.engine.speculation)
    )


async def beat(handle: Any, report: PipelineReport, *, timeout_s: float = 1.0) -> None:
    """One heartbeat; a silent router is not the sender's concern."""
    try:
        await asyncio.wait_for(_settled(handle.heartbeat.remote(report)), timeout_s)
    except (TimeoutError, ray.exceptions.RayError) as error:
        logger.debug("router does not hear: error=%r", error)


async def _settled(reference: Any) -> None:
    await reference
