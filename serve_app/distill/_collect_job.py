"""The Ray Data job behind `eesd distill collect`: chunks in, shards out.

Rows are chunks as JSON; an actor pool turns each into a shard on disk and gives back its entry. Ray
is imported here: the environment has to be prepared before this module is.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.distill.collect import Chunk, Collector, Recipe
from eesd_dist.distill.features import ShardEntry
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.engine.llm import LLM
from eesd_dist.errors import EesdError, EngineError
from eesd_dist.model.spec import ModelSpec
from serve_app._local_ray import joined_ray, local_ray
from serve_app.config import ServiceConfig

_PAGE_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker has to know."""

    model: Path
    folder: Path
    recipe: Recipe
    dtype: DType
    batch: int
    """Prompts of one chunk, generated together."""
    threads: int


class ChunkWorker:
    """One process with the target in it; Ray Data hands it a chunk at a time."""

    def __init__(self, job: Job, until_unix_s: float | None) -> None:
        torch.set_num_threads(job.threads)
        self._job = job
        self._until_unix_s = until_unix_s
        self._collector = collector_of(job)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, list[str]]:
        return {"entry": [self._entry(str(text)) for text in rows["chunk"]]}

    def _entry(self, chunk: str) -> str:
        """The shard's entry as JSON; empty when the time is spent."""
        if self._until_unix_s is not None and time.time() > self._until_unix_s:
            return ""
        entry = self._collector.collect(self._job.folder, Chunk.from_json(chunk))
        return json.dumps(asdict(entry))


def collector_of(job: Job) -> Collector:
    """The engine that writes and the frozen target that reads, in this process."""
    spec = ModelSpec.from_folder(job.model)
    pages_each = -(-job.recipe.max_length // _PAGE_SIZE) + 1
    config = EngineConfig(
        model=ModelConfig(path=job.model, dtype=job.dtype, numerics="fast"),
        cache=CacheConfig(
            page_size=_PAGE_SIZE, num_pages=job.batch * pages_each, prefix_caching=False
        ),
        scheduler=SchedulerConfig(max_running=job.batch, max_waiting=max(job.batch, 1)),
        speculation=SpeculationConfig(max_draft_tokens=0),
        parallel=ParallelConfig(num_threads=job.threads),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = FrozenTarget(job.model, spec, job.recipe.exits, dtype=job.dtype, device=device)
    return Collector(writer=LLM(config), target=target, recipe=job.recipe)


def run_job(
    job: Job,
    chunks: Sequence[Chunk],
    *,
    workers: int,
    gpus: float,
    address: str | None,
    allowed_s: float | None,
) -> Iterator[ShardEntry]:
    """Entries as their shards get done, in any order; no chunk is begun after `allowed_s`."""
    with _ray_at(address, job, workers=workers):
        until_unix_s = None if allowed_s is None else time.time() + allowed_s
        _be_quiet()
        rows = ray.data.from_items(
            [{"chunk": chunk.to_json()} for chunk in chunks], override_num_blocks=len(chunks)
        )
        entries = rows.map_batches(
            ChunkWorker,
            fn_constructor_args=(job, until_unix_s),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            # Here CPUs are logical and few; in a cluster they decide who stands where.
            num_cpus=job.threads if address is not None else 0.5,
            num_gpus=gpus,
        )
        try:
            for row in entries.iter_rows():
                if row["entry"]:
                    yield ShardEntry(**json.loads(row["entry"]))
        except RayError as error:
            raise _ours(error) from error


def _ray_at(address: str | None, job: Job, *, workers: int) -> AbstractContextManager[Any]:
    if address is not None:
        return joined_ray(address, shows_logs=False)
    config = ServiceConfig(engine=EngineConfig(model=ModelConfig(path=job.model)))
    return local_ray(config, shows_logs=False, min_cpus=workers)


def _be_quiet() -> None:
    """We have a progress bar of our own."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _ours(error: RayError) -> EesdError:
    """What a worker raised, as it was before Ray wrapped it."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, EesdError):
            return at
        at = getattr(at, "cause", None) or at.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return EngineError(f"a collecting worker broke: {lines[-1]}")
