"""Executors: run the work of a step.

A step decides what remains to be done; an executor does it: `LocalExecutor` in this process,
`serve_app.distill.executors` on Ray. All inputs of an executor can be pickled.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from eesd_dist.config import EngineConfig
from eesd_dist.distill.collector import Chunk, MadeShard, ShardJob, ShardWorker
from eesd_dist.distill.sources import EngineRows, EngineWriter, RowSource, Writer
from eesd_dist.distill.train.learner import alone
from eesd_dist.distill.train.loop import train_rank
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.engine.build import build_local_engine
from eesd_dist.routing.beliefs import BeliefBook

Say = Callable[[str], None]
"""Prints one line of a step's progress."""


class Executor(Protocol):
    """Runs the parts of steps that need a model."""

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        """Yields one shard per chunk, in any order; none is started after `job.allowed_s`."""

    def train(self, request: TrainRequest) -> None:
        """Trains to the end, from the last checkpoint if there is one."""

    def rows(self, config: EngineConfig) -> RowSource:
        """Returns the target that writes and reads texts, in this process with this config."""

    def writer(self, config: EngineConfig) -> Writer | None:
        """Builds a target with a head, for timing; None where the target runs in a service, which
        drafts with another head or none."""


class LocalExecutor:
    """Runs everything in this process, sequentially."""

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        worker = ShardWorker(job)
        for chunk in chunks:
            shard = worker.make(chunk)
            if shard is None:
                return
            yield shard

    def train(self, request: TrainRequest) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(request.threads_of_worker)
        try:
            with alone(request.options):
                train_rank(request, rank=0, world_size=1)
        finally:
            torch.set_num_threads(before)

    def rows(self, config: EngineConfig) -> EngineRows:
        return EngineRows(build_local_engine(config, book=BeliefBook()))

    def writer(self, config: EngineConfig) -> EngineWriter:
        return EngineWriter(build_local_engine(config, book=BeliefBook()))
