"""`eesd bench rounds`: runs `measure` over real actors.

All variants run on one Ray instance, each as an application with a separate router and without
HTTP; variants without requests cost next to nothing.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from eesd_dist.config import EngineConfig
from eesd_dist.engine.local import Generation
from eesd_dist.types import Request, RoundStats
from serve_app.bench.exact_over_actors import ActorRunner
from serve_app.bench.options import RoundsOptions
from serve_app.bench.rounds import measure
from serve_app.config import RouterConfig, ServiceConfig
from serve_app.session.environment import prepare_for_local_ray

_ANSWER_TIMEOUT_S = 10.0
_SPARE_CPUS = 2


class RoundsRunner:
    """Runs requests in one application, and reads the rounds of its pipeline."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._runner = ActorRunner(config)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return self._runner.generate(requests)

    def rounds(self) -> Sequence[RoundStats]:
        from ray import serve

        pipelines = serve.get_deployment_handle("Pipeline", self._config.app_name)
        found: tuple[RoundStats, ...] = pipelines.rounds.remote().result(
            timeout_s=_ANSWER_TIMEOUT_S
        )
        return found


@contextmanager
def services(engines: Mapping[str, EngineConfig]) -> Iterator[Mapping[str, RoundsRunner]]:
    """Runs Ray, and a router and one pipeline for each engine, within the block."""
    from ray import serve  # Ray reads the environment when it is imported

    from serve_app.app import build_app
    from serve_app.session.local_ray import local_ray

    configs = {
        name: ServiceConfig(
            engine=engine,
            app_name=f"eesd-{number}",
            router=RouterConfig(name=f"eesd-router-{number}"),
        )
        for number, (name, engine) in enumerate(engines.items())
    }
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    first = next(iter(configs.values()))
    with local_ray(first, shows_logs=False, min_cpus=_num_cpus(configs.values())):
        serve.start(proxy_location="Disabled")
        try:
            serve.run_many(
                [
                    serve.RunTarget(
                        target=build_app(config), name=config.app_name, route_prefix=None
                    )
                    for config in configs.values()
                ]
            )
            yield {name: RoundsRunner(config) for name, config in configs.items()}
        finally:
            serve.shutdown()


def _num_cpus(configs: Iterable[ServiceConfig]) -> int:
    """Logical ones: every rank of every service asks Ray for its share."""
    return _SPARE_CPUS + sum(
        1
        + config.engine.parallel.draft_tensor_parallel_size
        + config.engine.parallel.verify_tensor_parallel_size
        for config in configs
    )


def main(options: RoundsOptions) -> int:
    prepare_for_local_ray()  # once: a process keeps the first token it has read
    return measure.run(options, actors=services)
