"""The Ray instance that a job of distillation runs in.

Ray is imported here: the environment has to be prepared before this module is.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import ray

from eesd_dist.config import EngineConfig, ModelConfig
from serve_app.config import ServiceConfig
from serve_app.session.local_ray import joined_ray, local_ray


def ray_at(address: str | None, model: Path, *, min_cpus: int) -> AbstractContextManager[None]:
    """The cluster at `address`; without one, the Ray of this process, started for the block unless
    it runs already."""
    if ray.is_initialized():
        return nullcontext()
    if address is not None:
        return joined_ray(address, shows_logs=False)
    config = ServiceConfig(engine=EngineConfig(model=ModelConfig(path=model)))
    return local_ray(config, shows_logs=False, min_cpus=min_cpus)
