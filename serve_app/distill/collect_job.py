"""The Ray Data job behind `eesd distill collect`: chunks in, shards out.

Rows are chunks as JSON; an actor pool turns each into a shard on disk and gives back its entry. Ray
is imported here: the environment has to be prepared before this module is.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
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
from eesd_dist.distill.collector import Chunk, Collector, Recipe
from eesd_dist.distill.features import ShardEntry
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.engine.llm import LLM
from eesd_dist.errors import ConfigError, EesdError, EngineError, os_error_text
from eesd_dist.model.spec import ModelSpec
from serve_app.config import ServiceConfig
from serve_app.session.local_ray import joined_ray, local_ray

_PAGE_SIZE = 32
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A shard, and how long its worker had been working then."""

    entry: ShardEntry
    spent_s: float


class ChunkWorker:
    """One process with the target in it; Ray Data hands it a chunk at a time.

    The target is loaded for the first chunk: what goes wrong there is then told as it was. Time
    counts from after that, so that a slow start does not eat up a short time.
    """

    def __init__(self, job: Job, allowed_s: float) -> None:
        torch.set_num_threads(job.threads)
        self._job = job
        self._allowed_s = allowed_s

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, list[str]]:
        return {"said": [json.dumps(self._said(str(text))) for text in rows["chunk"]]}

    def _said(self, chunk: str) -> dict[str, Any]:
        """The shard's entry; nothing when the time is spent; an error of ours as a word, since
        Ray Data keeps no more of an exception than its text."""
        try:
            return self._made(chunk)
        except ConfigError as error:
            return {"config_error": str(error)}
        except EesdError as error:
            return {"error": str(error)}
        except OSError as error:  # a disk that is full, or may not be written to
            return {"config_error": os_error_text(error)}

    def _made(self, chunk: str) -> dict[str, Any]:
        collector, ready = self._loaded
        if time.monotonic() - ready > self._allowed_s:
            return {}
        entry = collector.collect(self._job.folder, Chunk.from_json(chunk))
        return {"entry": asdict(entry), "spent_s": time.monotonic() - ready}

    @cached_property
    def _loaded(self) -> tuple[Collector, float]:
        return collector_of(self._job), time.monotonic()


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
    allowed_s: float,
) -> Iterator[Made]:
    """Shards as they get done, in any order; no worker begins one after `allowed_s`."""
    with ExitStack() as stack:
        with _without_chatter():
            stack.enter_context(_ray_at(address, job, workers=workers))
        _be_quiet()
        rows = ray.data.from_items(
            [{"chunk": chunk.to_json()} for chunk in chunks], override_num_blocks=len(chunks)
        )
        entries = rows.map_batches(
            ChunkWorker,
            fn_constructor_args=(job, allowed_s),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            # Here CPUs are logical and few; in a cluster they decide who stands where.
            num_cpus=job.threads if address is not None else 0.5,
            num_gpus=gpus,
        )
        try:
            for row in entries.iter_rows():
                yield from _heard(json.loads(row["said"]))
        except RayError as error:  # a worker that is gone, time and again
            raise EngineError(f"a collecting worker broke: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """Ray's first words, and the last ones, which are the exception's own; without its colours."""
    text = _COLOUR.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__


def _ray_at(address: str | None, job: Job, *, workers: int) -> AbstractContextManager[Any]:
    if address is not None:
        return joined_ray(address, shows_logs=False)
    config = ServiceConfig(engine=EngineConfig(model=ModelConfig(path=job.model)))
    return local_ray(config, shows_logs=False, min_cpus=workers)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Ray's core writes past Python to the terminal while it starts; errors come as exceptions."""
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


def _be_quiet() -> None:
    """We have a progress bar of our own."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _heard(said: dict[str, Any]) -> Iterator[Made]:
    if "config_error" in said:
        raise ConfigError(said["config_error"])
    if "error" in said:
        raise EngineError(said["error"])
    if said:
        yield Made(entry=ShardEntry(**said["entry"]), spent_s=said["spent_s"])
