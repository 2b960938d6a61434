"""`eesd bench router`: runs `measure` with the router's own actor."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eesd_dist.config import EngineConfig, ModelConfig, SpeculationConfig
from eesd_dist.types import Outcome, RequestId
from eesd_dist.workers.messages import Admission, RouterNews
from serve_app.bench.options import RouterOptions
from serve_app.bench.router import measure
from serve_app.bench.router.measure import ActorRouter
from serve_app.config import BUNDLED_MODEL, RouterConfig, ServiceConfig
from serve_app.session.environment import prepare_for_local_ray


@contextmanager
def _actor(checkpoint: Path) -> Iterator[ActorRouter]:
    import ray  # it reads the environment when it is imported

    from serve_app.router import Router

    config = RouterConfig(checkpoint=checkpoint, checkpoint_every_s=1.0)
    handle = ray.remote(Router).options(num_cpus=0).remote(config, SpeculationConfig())

    def exchange(admitted: Sequence[str], outcomes: Sequence[Outcome]) -> None:
        news = RouterNews(
            pipeline="bench",
            admitted=tuple(Admission(RequestId(name), "class") for name in admitted),
            outcomes=tuple(outcomes),
            finished=(),
        )
        ray.get(handle.advise.remote(news))

    try:
        yield ActorRouter(exchange)
    finally:
        ray.kill(handle)


def main(options: RouterOptions) -> None:
    if not options.actor:
        measure.run(options)
        return
    prepare_for_local_ray()
    from serve_app.session.local_ray import local_ray

    config = ServiceConfig(engine=EngineConfig(model=ModelConfig(path=BUNDLED_MODEL)))
    with local_ray(config, shows_logs=False):
        measure.run(options, actor=_actor)
