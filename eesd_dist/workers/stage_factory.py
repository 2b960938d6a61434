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
    address: str | None = None
    """Address at which other ranks reach the process; None: its node's."""
    compiles_kernels: bool = True
    """Compiles missing kernels in a process of its own, while ranks start."""

    def draft_leader(
        self, config: EngineConfig, tracing: "Tracing", *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        self._prepare(config)
        from eesd_dist.workers.draft_leader import EngineLeader

        opened = None if self.open_recorder is None else partial(self.open_recorder, config)
        return EngineLeader(
            config,
            tracing,
            open_recorder=opened,
            address=self.address,
            holds_verify_rank=holds_verify_rank,
        )

    def draft_follower(
        self, config: EngineConfig, tracing: "Tracing", *, rank: int
    ) -> DraftFollower:
        self._prepare(config)
        from eesd_dist.workers.draft_follower import ShardFollower

        del tracing  # a follower's time is part of the drafting actor's spans
        return ShardFollower(config, rank=rank, address=self.address)

    def verify_worker(self, config: EngineConfig, tracing: "Tracing", *, rank: int) -> RankWorker:
        self._prepare(config)
        from eesd_dist.workers.verify_worker import StageVerifier

        return StageVerifier(config, tracing, rank=rank, address=self.address)

    def _prepare(self, config: EngineConfig) -> None:
        if self.compiles_kernels:
            start_compiling(config)
