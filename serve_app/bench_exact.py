"""`eesd bench exact`: the comparison of `eesd_dist.bench.exact`, given real actors to run on.

Each topology is the service itself, pipeline, router and all, on a Ray instance of its own and
without HTTP; requests go in over the same handle that the ingress uses.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eesd_dist.bench import exact
from eesd_dist.config import EngineConfig
from eesd_dist.engine.llm import Generation
from eesd_dist.types import Request
from serve_app._environment import prepare_for_local_ray
from serve_app.config import ServiceConfig


class ActorRunner:
    """Takes requests to their ends through a running pipeline, all of them at once."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return asyncio.run(self._all(requests))

    async def _all(self, requests: Sequence[Request]) -> list[Generation]:
        from ray import serve

        from eesd_dist.telemetry.tracing import make_tracing
        from serve_app._service_client import ServiceClient

        pipelines = serve.get_deployment_handle("Pipeline", self._config.app_name)
        client = ServiceClient(
            pipelines,
            recovery=self._config.recovery,
            tracing=make_tracing(process="bench", service="bench", endpoint=None, folder=None),
        )

        async def one(request: Request) -> Generation:
            generation = Generation(request_id=request.request_id)
            async for emission in client.stream(request):
                generation.take(emission)
            return generation

        return list(await asyncio.gather(*[one(request) for request in requests]))


@contextmanager
def service_without_http(engine: EngineConfig) -> Iterator[ActorRunner]:
    """Ray, router and one pipeline for as long as the block runs."""
    from ray import serve  # Ray reads the environment when it is imported

    from serve_app._local_ray import local_ray
    from serve_app.app import build_app

    config = ServiceConfig(engine=engine)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with local_ray(config, shows_logs=False):
        serve.start(proxy_location="Disabled")
        try:
            serve.run(build_app(config), name=config.app_name, route_prefix=None)
            yield ActorRunner(config)
        finally:
            serve.shutdown()


def main(argv: Sequence[str]) -> int:
    prepare_for_local_ray()  # once: a process keeps the first token it has read
    return exact.main(argv, actors=service_without_http)
