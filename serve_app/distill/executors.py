"""Runs the work of distillation steps: on Ray, on this machine or a cluster, or in a service.

Ray reads the environment when it is imported: it is imported in functions, after the environment
was prepared.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eesd_dist.config import EngineConfig, ModelConfig
from eesd_dist.distill.collector import Chunk, Collector, MadeShard, ShardJob
from eesd_dist.distill.executor import Executor, LocalExecutor
from eesd_dist.distill.sources import RowSource, Writer
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.errors import ConfigError
from serve_app.config import RouterConfig, ServiceConfig
from serve_app.service.connection_file import prepare_to_connect
from serve_app.service.environment import prepare_for_cluster, prepare_for_local_ray


@dataclass(frozen=True, slots=True, kw_only=True)
class RayExecutor:
    """Collects with Ray Data and trains with Ray Train; one training process needs no Ray."""

    address: Annotated[str | None, "a running Ray cluster; without it, Ray is started here"] = None

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        # Ray's core reports as an error how Ray Data makes its own actors.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        with self._ray(job.model, min_cpus=job.num_workers(len(chunks), num_gpus=0)):
            from serve_app.distill.jobs import make_shards

            yield from make_shards(job, chunks, num_cpus=self._cpus_of_worker(job.threads))

    def train(self, request: TrainRequest) -> None:
        if request.workers == 1:
            LocalExecutor().train(request)
            return
        with self._ray(request.model, min_cpus=request.workers):
            from serve_app.distill.jobs import train

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

        from serve_app.service.local_ray import connected_ray, local_ray, without_core_messages

        with ExitStack() as stack:
            if not ray.is_initialized():
                config = ServiceConfig(engine=EngineConfig(model=ModelConfig(path=model)))
                with without_core_messages():
                    stack.enter_context(
                        local_ray(config, shows_logs=False, min_cpus=min_cpus)
                        if self.address is None
                        else connected_ray(self.address, shows_logs=False)
                    )
            yield


_CHUNKS_AT_A_TIME = 2
"""While the last texts of one shard are written, those of the next one fill the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceChoice:
    """The service that holds the target, if one does."""

    service: Annotated[
        bool, "use the target of a running service: nothing of it is loaded here"
    ] = False
    port: Annotated[int | None, "of the service that `eesd serve` started, of several"] = None
    app: Annotated[str, "its name in Ray Serve"] = "eesd"
    router: Annotated[str, "its router's name"] = RouterConfig().name
    namespace: Annotated[str, "and the Ray namespace of that"] = RouterConfig().namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedExecutor:
    """Implements `Executor` with a service for everything that needs the target.

    Shards are written, and heads are trained, judged and calibrated, by this process and those it
    starts: none of them loads the target.
    """

    source: RowSource
    training: RayExecutor

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        collector, began_s = Collector(source=self.source, recipe=job.recipe), time.monotonic()
        left = iter(chunks)
        with ThreadPoolExecutor(_CHUNKS_AT_A_TIME, thread_name_prefix="collect") as pool:
            pending: set[Future[MadeShard]] = set()
            while True:
                while len(pending) < _CHUNKS_AT_A_TIME and _spent_s(began_s) <= job.allowed_s:
                    chunk = next(left, None)
                    if chunk is None:
                        break
                    pending.add(pool.submit(_shard, collector, job.folder, chunk, began_s))
                if not pending:
                    return
                ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in ended:
                    yield future.result()

    def train(self, request: TrainRequest) -> None:
        if request.options.source == "live":
            raise ConfigError(
                "--source live runs the target in every training process, and --service says that "
                "no process here can hold it: leave --source at features"
            )
        self.training.train(request)

    def rows(self, config: EngineConfig) -> RowSource:
        del config  # the service has its own
        return self.source

    def writer(self, config: EngineConfig) -> Writer | None:
        del config
        return None


@contextmanager
def executor_for(choice: ServiceChoice, local: RayExecutor, *, model: Path) -> Iterator[Executor]:
    """Returns what runs the steps. Raises ConfigError for a service of another target, EngineError
    where it does not answer."""
    if not choice.service:
        yield local
        return
    address = prepare_to_connect(local.address, port=choice.port)
    # Ray reads the environment when it is imported.
    from serve_app.distill.jobs import ServedRows
    from serve_app.service.connect import service_connection

    router = RouterConfig(name=choice.router, namespace=choice.namespace)
    with service_connection(address, router=router, app_name=choice.app) as service:
        source = ServedRows(service)
        source.require_target(model)
        yield ServedExecutor(source=source, training=local)


def _shard(collector: Collector, folder: Path, chunk: Chunk, began_s: float) -> MadeShard:
    entry = collector.collect(folder, chunk)
    return MadeShard(entry=entry, spent_s=_spent_s(began_s))


def _spent_s(began_s: float) -> float:
    return time.monotonic() - began_s
