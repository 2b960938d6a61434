"""Runs the work of distillation steps on Ray, on this machine or on a cluster.

Ray reads the environment when it is imported: it is imported in functions, after the environment
was prepared.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eesd_dist.config import EngineConfig, ModelConfig
from eesd_dist.distill.collector import Chunk, MadeShard, ShardJob
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.sources.rows import RowSource
from eesd_dist.distill.sources.writer import Writer
from eesd_dist.distill.train.request import TrainRequest
from serve_app.config import ServiceConfig
from serve_app.service.environment import prepare_for_cluster, prepare_for_local_ray


@dataclass(frozen=True, slots=True, kw_only=True)
class RayExecutor:
    """Collects with Ray Data and trains with Ray Train; one training process needs no Ray."""

    address: Annotated[str | None, "a running Ray cluster; without it, Ray is started here"] = None

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        # Ray's core reports as an error how Ray Data makes its own actors.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        with self._ray(job.model, min_cpus=job.num_workers(len(chunks), num_gpus=0)):
            from serve_app.distill.collect_job import make_shards

            yield from make_shards(job, chunks, num_cpus=self._cpus_of_worker(job.threads))

    def train(self, request: TrainRequest) -> None:
        if request.workers == 1:
            LocalExecutor().train(request)
            return
        with self._ray(request.model, min_cpus=request.workers):
            from serve_app.distill.train_job import train

            train(request, num_cpus=self._cpus_of_worker(request.threads_of_worker))

    def rows(self, config: EngineConfig) -> RowSource:
        return LocalExecutor().rows(config)

    def writer(self, config: EngineConfig) -> Writer:
        return LocalExecutor().writer(config)

    def _cpus_of_worker(self, threads: int) -> float:
        """Returns logical CPUs, few on a local Ray; in a cluster they decide a worker's node."""
        return 0.5 if self.address is None else threads

    @contextmanager
    def _ray(self, model: Path, *, min_cpus: int) -> Iterator[None]:
        """Runs Ray within the block; a Ray that this process already uses stays in use."""
        if self.address is None:
            prepare_for_local_ray()
        else:
            prepare_for_cluster()
        import ray

        from serve_app.service.local_ray import connected_ray, local_ray

        with ExitStack() as stack:
            if not ray.is_initialized():
                config = ServiceConfig(engine=EngineConfig(model=ModelConfig(path=model)))
                with _without_chatter():
                    stack.enter_context(
                        local_ray(config, shows_logs=False, min_cpus=min_cpus)
                        if self.address is None
                        else connected_ray(self.address, shows_logs=False)
                    )
            yield


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Silences Ray's core, which writes past Python to the terminal; errors are raised anyway."""
    sys.stderr.flush()
    ours = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(nowhere)
