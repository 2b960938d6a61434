"""The stages of a pipeline's workers, with a recorder where one is configured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eesd_dist.config import EngineConfig
from eesd_dist.workers.stage_factory import EngineStages
from serve_app.config import RecorderConfig, ServiceConfig

if TYPE_CHECKING:
    from serve_app.pipeline.recorder import RecorderFolder


@dataclass(frozen=True, slots=True)
class OpenRecorder:
    """Opens the recorder in the drafting actor's process; importing it takes torch."""

    recorder: RecorderConfig

    def __call__(self, engine: EngineConfig) -> "RecorderFolder":
        from serve_app.pipeline.recorder import open_recorder

        return open_recorder(self.recorder, engine)


def stages_of(config: ServiceConfig) -> EngineStages:
    if config.recorder.folder is None:
        return EngineStages()
    return EngineStages(open_recorder=OpenRecorder(config.recorder))
