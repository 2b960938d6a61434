"""Runs the work of distillation steps on Ray, on this machine or on a cluster.

Ray reads the environment when it is imported, so that it is imported here only when it is needed,
after the environment was prepared.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from eesd_dist.config import EngineConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.distill.collector import Chunk, MadeShard, ShardJob
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.distill.writer import Writer
from serve_app.session.environment import prepare_for_cluster, prepare_for_local_ray


@dataclass(frozen=True, slots=True, kw_only=True)
class RayExecutor:
    """Collects with Ray Data and trains with Ray Train; one training process needs no Ray."""

    address: Annotated[str | None, "a running Ray cluster; without it, Ray is started here"] = None

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        self._prepare()
        # Ray's core reports as an error how Ray Data makes its own actors.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        from serve_app.distill.collect_job import make_shards

        return make_shards(job, chunks, address=self.address)

    def train(self, request: TrainRequest) -> None:
        if request.workers == 1:
            LocalExecutor().train(request)
            return
        self._prepare()
        from serve_app.distill.train_job import train

        train(request, address=self.address)

    def writer(self, config: EngineConfig, *, cost: CostModel | None = None) -> Writer:
        return LocalExecutor().writer(config, cost=cost)

    def _prepare(self) -> None:
        if self.address is None:
            prepare_for_local_ray()
        else:
            prepare_for_cluster()
