"""Runs the steps of distillation over a running service, which holds the target.

The service's pipelines write and read the texts. Shards are written, and heads are trained, judged
and calibrated, by this process and those it starts: none of them loads the target.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eesd_dist.config import EngineConfig
from eesd_dist.distill.collector import Chunk, Collector, MadeShard, ShardJob
from eesd_dist.distill.executor import Executor
from eesd_dist.distill.sources.rows import RowSource
from eesd_dist.distill.sources.writer import Writer
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.errors import ConfigError
from serve_app.config import RouterConfig
from serve_app.distill.executor import RayExecutor
from serve_app.service.connection_file import prepare_to_connect

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
    """Implements `Executor` with a service for everything that needs the target."""

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
    from serve_app.distill.served_rows import ServedRows
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
