"""An ingress's client over toy pipelines and a real router, all in this event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import EngineConfig
from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request
from eesd_dist.workers.roles import StageFactory
from serve_app.config import ServiceConfig, service_config
from serve_app.ingress import load_balancing
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.pipeline_client import ServiceClient
from serve_app.router.actor import Router
from tests.support.in_process import ToyHandle, epoch, joined_actor

_BEAT_S = 0.05


def config_of(**sections: Any) -> ServiceConfig:
    tree: dict[str, Any] = {
        "engine": {"model": {"path": str(BUNDLED_MODEL)}, **sections.pop("engine", {})},
        "router": {"heartbeat_s": 0.5, "expiry_s": 1.5},
        "recovery": {"stream_pause_s": 20.0},
    }
    return service_config({**tree, **sections})


class ToyPipeline:
    """A drafting actor of toys, and what its supervisor tells the router."""

    def __init__(
        self, name: str, handle: ToyHandle, *, app: str, has_submitted: asyncio.Event
    ) -> None:
        self.name = name
        self.handle = handle
        self.is_ready = True
        self.draining = False
        self.served: list[Request] = []
        """Submissions, in order."""
        self._app = app
        self._has_submitted = has_submitted
        self._submit = handle.actor.submit
        handle.actor.submit = self._record

    async def _record(self, request: Request, client: str) -> None:
        self.served.append(request)
        self._has_submitted.set()
        await self._submit(request, client)

    async def lose(self) -> None:
        """Ends its process, as a kill does."""
        self.is_ready = False
        self.handle.die()

    async def recover_forever(self) -> None:
        """Starts another epoch after each crash, as a supervisor does."""
        number = 1
        while True:
            end = await self.handle.actor.ended()
            assert end.error is not None
            is_crash = not isinstance(end.error, PeerLost)
            await self.handle.actor.leave(end.error, is_crash)
            number += 1
            await self.handle.actor.join(epoch(number))

    async def report(self) -> PipelineReport:
        return PipelineReport(
            pipeline_id=PipelineId(self.name),
            leader=f"leader of {self.name}",
            address=self.handle,
            app=self._app,
            is_ready=self.is_ready,
            draining=self.draining,
        )


class _Replicas:
    """Serve's handle of the pipelines, for calls to all of them."""

    def __init__(self, pipelines: dict[str, ToyPipeline]) -> None:
        self._pipelines = pipelines
        self.num_asked = 0
        """Broadcasts so far."""

    def broadcast(self, method: str) -> "_Replicas":
        assert method == "report"
        self.num_asked += 1
        return self

    async def _fetch_replica_results_async(self) -> list["_Result"]:
        return [_Result(pipeline) for pipeline in self._pipelines.values()]


class _Result:
    def __init__(self, pipeline: ToyPipeline) -> None:
        self._pipeline = pipeline

    async def get_async(self) -> PipelineReport:
        return await self._pipeline.report()


class ToyService:
    def __init__(
        self,
        config: ServiceConfig,
        pipelines: dict[str, ToyPipeline],
        *,
        has_submitted: asyncio.Event,
    ) -> None:
        self.pipelines = pipelines
        self.has_submitted = has_submitted
        """Set by the first submission to a pipeline."""
        self.replicas = _Replicas(pipelines)
        self.router = ToyHandle(Router(config.router, config.engine.speculation))
        self.has_router = True
        self._config = config
        self.load_balancer = LoadBalancer(config, pipelines=self.replicas)
        self.client = self._client(self.load_balancer)

    def another_ingress(self) -> ServiceClient:
        return self._client(LoadBalancer(self._config, pipelines=self.replicas))

    def _client(self, load_balancer: LoadBalancer) -> ServiceClient:
        return ServiceClient(
            self.replicas, config=self._config, tracing=Tracing(), load_balancer=load_balancer
        )

    def find_router(self, _: object) -> ToyHandle:
        if not self.has_router:
            raise EngineError("no router")
        return self.router

    async def report_forever(self) -> None:
        while True:
            if self.has_router:
                for pipeline in self.pipelines.values():
                    await self.router.actor.heartbeat(await pipeline.report())
            await asyncio.sleep(_BEAT_S)

    async def tokens(self, request: Request) -> list[int]:
        return [t async for batch in self.client.stream(request) for e in batch for t in e.tokens]


@asynccontextmanager
async def toy_service(
    config: ServiceConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    names: str = "ab",
    engines: dict[str, EngineConfig] | None = None,
    stages: StageFactory | None = None,
) -> AsyncIterator[ToyService]:
    """`names` are of pipelines, one letter each; `engines` their configurations, where they differ
    from the service's."""
    pipelines, has_submitted = {}, asyncio.Event()
    for name in names:
        engine = (engines or {}).get(name, config.engine)
        handle = ToyHandle(await joined_actor(engine, name=name, stages=stages))
        pipelines[name] = ToyPipeline(
            name, handle, app=config.app_name, has_submitted=has_submitted
        )
    service = ToyService(config, pipelines, has_submitted=has_submitted)
    monkeypatch.setattr(load_balancing, "find_router", service.find_router)
    reporting = asyncio.ensure_future(service.report_forever())
    try:
        async with asyncio.timeout(60.0):
            yield service
    finally:
        reporting.cancel()
        for pipeline in pipelines.values():
            await pipeline.handle.actor.leave()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
