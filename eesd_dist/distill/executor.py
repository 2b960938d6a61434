"""Where the work of a step runs.

A step decides what is to be done and what is done already; an executor does it: `LocalExecutor` in
this process, `serve_app.distill.executor` on Ray. Everything an executor is given can be pickled.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from eesd_dist.config import EngineConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.distill.collector import Chunk, MadeShard, ShardJob, ShardWorker
from eesd_dist.distill.train.learner import alone
from eesd_dist.distill.train.loop import train_rank
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.distill.writer import EngineWriter, Writer
from eesd_dist.engine.build import build_local_engine
from eesd_dist.routing.beliefs import BeliefBook

Say = Callable[[str], None]
"""Shows one line of a step's progress."""


class Executor(Protocol):
    """Runs the parts of steps that need a model."""

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        """One shard for each chunk, in any order; none is begun after `job.allowed_s`."""

    def train(self, request: TrainRequest) -> None:
        """Trains to the end, from the last checkpoint if there is one."""

    def writer(self, config: EngineConfig, *, cost: CostModel | None = None) -> Writer:
        """A target that answers requests; without `cost`, it measures its own."""


class LocalExecutor:
    """Runs everything in this process, one thing at a time."""

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        worker = ShardWorker(job)
        for chunk in chunks:
            made = worker.make(chunk)
            if made is None:
                return
            yield made

    def train(self, request: TrainRequest) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(request.threads_of_worker)
        try:
            with alone(request.options):
                train_rank(request, rank=0, world_size=1)
        finally:
            torch.set_num_threads(before)

    def writer(self, config: EngineConfig, *, cost: CostModel | None = None) -> EngineWriter:
        return EngineWriter(build_local_engine(config, book=BeliefBook(), cost=cost))
