"""Builds the model's stages inside the process that runs them.

Imports are inside the methods: the factory passes through a pipeline replica, which never imports
torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from eesd_dist.config import EngineConfig
from eesd_dist.workers.compiling import start_compiling
from eesd_dist.workers.roles import DraftFollower, DraftLeader, RankWorker

if TYPE_CHECKING:
    from eesd_dist.telemetry.tracing import Tracing
    from eesd_dist.workers.draft_leader import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStages:
    """Implements `roles.StageFactory`."""

    open_recorder: "Callable[[EngineConfig], Recorder] | None" = None
    """Opens the recorder of the drafting actor; None records nothing."""

    def draft_leader(self, config: EngineConfig, tracing: "Tracing") -> DraftLeader:
        start_compiling(config)
        from eesd_dist.workers.draft_leader import EngineLeader

        opened = None if self.open_recorder is None else partial(self.open_recorder, config)
        return EngineLeader(config, tracing, open_recorder=opened)

    def draft_follower(
        self, config: EngineConfig, tracing: "Tracing", *, rank: int
    ) -> DraftFollower:
        start_compiling(config)
        from eesd_dist.workers.draft_follower import ShardFollower

        del tracing  # a follower's time is part of the drafting actor's spans
        return ShardFollower(config, rank=rank)

    def verify_worker(self, config: EngineConfig, tracing: "Tracing", *, rank: int) -> RankWorker:
        start_compiling(config)
        from eesd_dist.workers.verify_worker import StageVerifier

        return StageVerifier(config, tracing, rank=rank)
