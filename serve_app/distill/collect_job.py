"""Collects features with Ray Data: chunks in, shards out.

Rows are chunks as JSON; a pool of actors turns each into a shard on disk and returns its entry. Ray
is imported here: the environment has to be prepared before this module is imported.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from eesd_dist.distill.collector import Chunk, MadeShard, ShardJob, ShardWorker
from eesd_dist.distill.features import ShardEntry
from eesd_dist.errors import ConfigError, EesdError, EngineError, os_error_text

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ChunkWorker:
    """Holds the target in one process; Ray Data passes it a chunk at a time."""

    def __init__(self, job: ShardJob) -> None:
        self._worker = ShardWorker(job)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, list[str]]:
        return {"answer": [json.dumps(self.answer(str(text))) for text in rows["chunk"]]}

    def answer(self, chunk: str) -> dict[str, Any]:
        """Returns the shard; nothing when the time is spent; errors as text, since Ray Data keeps
        no more of an exception."""
        try:
            shard = self._worker.make(Chunk.from_json(chunk))
        except ConfigError as error:
            return {"config_error": str(error)}
        except EesdError as error:
            return {"error": str(error)}
        except OSError as error:  # a disk that is full, or may not be written to
            return {"config_error": os_error_text(error)}
        return {} if shard is None else asdict(shard)


def make_shards(job: ShardJob, chunks: Sequence[Chunk], *, num_cpus: float) -> Iterator[MadeShard]:
    """Yields shards in order of completion. Raises ConfigError or EngineError."""
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    workers = job.num_workers(len(chunks), num_gpus=num_gpus)
    _be_quiet()
    rows = ray.data.from_items(
        [{"chunk": chunk.to_json()} for chunk in chunks], override_num_blocks=len(chunks)
    )
    answers = rows.map_batches(
        ChunkWorker,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=num_cpus,
        num_gpus=1.0 if num_gpus else 0.0,
    )
    try:
        for row in answers.iter_rows():
            yield from _shards(json.loads(row["answer"]))
    except RayError as error:  # a worker that died several times
        raise EngineError(f"a collecting worker failed: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """Returns Ray's first line, and the last one, which is the exception's, without colours."""
    text = _COLOUR.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__


def _be_quiet() -> None:
    """Turns off Ray Data's output: the step has a progress bar."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _shards(answer: dict[str, Any]) -> Iterator[MadeShard]:
    if "config_error" in answer:
        raise ConfigError(answer["config_error"])
    if "error" in answer:
        raise EngineError(answer["error"])
    if answer:
        yield MadeShard(entry=ShardEntry(**answer["entry"]), spent_s=answer["spent_s"])
