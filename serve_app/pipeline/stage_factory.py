"""What runs inside a pipeline's actors: the engine's stages, with a spool where one is wished.

Handed through the pipeline replica to its actors, so it imports torch only when it is called.
"""

from dataclasses import dataclass

from eesd_dist.config import EngineConfig
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.workers.messages import Stages, StagesFactory
from eesd_dist.workers.process import engine_stages
from serve_app.config import ServiceConfig, SpoolConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolingStages:
    """The real stages; the process that drafts keeps what verification computed."""

    spool: SpoolConfig

    def __call__(self, engine: EngineConfig, tracing: Tracing) -> Stages:
        from eesd_dist.workers.stages import EngineStages
        from serve_app.pipeline.recorder import open_spool

        return EngineStages(engine, tracing, open_spool=lambda: open_spool(self.spool, engine))


def stages_of(config: ServiceConfig) -> StagesFactory:
    if config.spool.folder is None:
        return engine_stages
    return SpoolingStages(spool=config.spool)
