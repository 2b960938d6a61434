"""`eesd bench exact`: the comparison of `eesd_dist.bench.exact`, given real actors to run on.

Each topology is the whole service (pipeline and router) without HTTP: on a separate Ray instance,
or under a separate name on an existing cluster. Requests go in as from an ingress.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from eesd_dist.bench import exact
from eesd_dist.config import EngineConfig
from eesd_dist.engine.local import Generation
from eesd_dist.types import Request
from serve_app.bench.options import ExactOverActorsOptions
from serve_app.config import RouterConfig, ServiceConfig
from serve_app.placement_config import PlacementConfig
from serve_app.service.environment import prepare_for_cluster, prepare_for_local_ray

if TYPE_CHECKING:  # imports Ray, which reads the environment then
    from serve_app.pipeline.reports import PipelineState

_NAME = "eesd-exact"
"""Name of the application: a service that runs on the same cluster has another name."""
_ANSWER_TIMEOUT_S = 30.0


class ActorRunner:
    """Runs requests to their ends in a running pipeline, all of them at once."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return asyncio.run(self._all(requests))

    def hosts(self) -> Sequence[str]:
        from ray import serve

        pipeline = serve.get_deployment_handle("Pipeline", self._config.app_name)
        state: PipelineState = pipeline.state.remote().result(timeout_s=_ANSWER_TIMEOUT_S)
        return [worker.host for worker in state.workers]

    async def _all(self, requests: Sequence[Request]) -> list[Generation]:
        from ray import serve

        from eesd_dist.telemetry.tracing import Tracing
        from serve_app.ingress.load_balancing import LoadBalancer
        from serve_app.ingress.pipeline_client import ServiceClient

        pipelines = serve.get_deployment_handle("Pipeline", self._config.app_name)
        client = ServiceClient(
            pipelines,
            config=self._config,
            tracing=Tracing(),
            load_balancer=LoadBalancer(self._config, pipelines=pipelines),
        )

        async def one(request: Request) -> Generation:
            generation = Generation(request_id=request.request_id)
            async for emissions in client.stream(request):
                for emission in emissions:
                    generation.take(emission)
            return generation

        return list(await asyncio.gather(*[one(request) for request in requests]))


@contextmanager
def service_without_http(engine: EngineConfig) -> Iterator[ActorRunner]:
    """Runs Ray, a router and one pipeline within the block."""
    from ray import serve  # Ray reads the environment when it is imported

    from serve_app.app import build_app
    from serve_app.service.local_ray import local_ray

    config = ServiceConfig(engine=engine)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with local_ray(config, shows_logs=False):
        serve.start(proxy_location="Disabled")
        try:
            serve.run(build_app(config), name=config.app_name, route_prefix=None)
            yield ActorRunner(config)
        finally:
            serve.shutdown()


@contextmanager
def service_on_cluster(engine: EngineConfig, *, address: str) -> Iterator[ActorRunner]:
    """Runs the same on an existing cluster; ranks are spread over its nodes."""
    from ray import serve

    from serve_app.app import build_app
    from serve_app.service.local_ray import connected_ray
    from serve_app.service.serve_instance import deploy, remove_application

    config = ServiceConfig(
        engine=engine,
        app_name=_NAME,
        router=RouterConfig(name=f"{_NAME}-router"),
        placement=PlacementConfig(strategy="SPREAD"),
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with connected_ray(address, shows_logs=False):
        serve.start(proxy_location="Disabled")  # where Serve runs already it stays as it is
        try:
            deploy(build_app(config), name=_NAME, route_prefix=None, wait=_patiently)
            yield ActorRunner(config)
        finally:
            remove_application(_NAME, config.router)


def _patiently(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def main(options: ExactOverActorsOptions) -> int:
    if options.address is None:
        prepare_for_local_ray()  # once: a process keeps the first token it has read
        return exact.run(options.exact, actors=service_without_http, is_cluster=False)
    prepare_for_cluster()
    actors = partial(service_on_cluster, address=options.address)
    return exact.run(options.exact, actors=actors, is_cluster=True)
