"""The stages of a pipeline's workers, with a recorder where one is configured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eesd_dist.config import EngineConfig
from eesd_dist.workers.stage_factory import EngineStages
from serve_app.config import ServiceConfig, SpoolConfig

if TYPE_CHECKING:
    from serve_app.pipeline.recorder import SpoolFolder


@dataclass(frozen=True, slots=True)
class OpenSpool:
    """Opens the recorder in the drafting actor's process; importing it takes torch."""

    spool: SpoolConfig

    def __call__(self, engine: EngineConfig) -> "SpoolFolder":
        from serve_app.pipeline.recorder import open_spool

        return open_spool(self.spool, engine)


def stages_of(config: ServiceConfig) -> EngineStages:
    if config.spool.folder is None:
        return EngineStages()
    return EngineStages(open_spool=OpenSpool(config.spool))
