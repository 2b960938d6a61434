"""Makes one shard of features from one chunk of prompts and texts.

The target (`RowSource`) answers the prompts and reads the texts, and its features at every token
are kept. The shard has a stamp over the recipe and its chunk. `collect` decides the chunks, and an
`Executor` distributes them over processes.
"""

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter

from eesd_dist.config import DType, ModelConfig, SpeculationConfig
from eesd_dist.distill.features import FeatureSequence, ShardEntry, row_bytes, write_shard
from eesd_dist.distill.sources import PLAIN, EngineRows, RowSource, TextRows, engine_config, reading
from eesd_dist.engine.build import build_local_engine
from eesd_dist.model.heads.head_config import VerifierIdentity
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.types import FeatureSpec, Request, RequestId, SamplingParams, TokenId

_HEADER_BYTES = 2048
"""Header of a shard, and its sequences' lengths and classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source of one sequence: a prompt to answer, or a text to use unchanged."""

    tokens: tuple[int, ...]
    workload: str
    is_prompt: bool
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything besides the sources that determines a shard's content."""

    verifier: VerifierIdentity
    weights_sha256: str
    exits: tuple[int, ...]
    top_k: int
    max_tokens: int
    """Maximum length of an answer."""
    max_length: int
    """Maximum length of a sequence."""
    stop_token_ids: tuple[int, ...]
    dtype: DType
    """Type in which the target is computed."""
    seed: int

    def most_bytes(self, chunk: "Chunk") -> int:
        """Returns the maximum size of a chunk's shard."""
        size = row_bytes(self.verifier.hidden_size, num_exits=len(self.exits), top_k=self.top_k)
        return size * chunk.most_rows(self) + _HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Sources of one shard."""

    index: int
    sources: tuple[Source, ...]

    def most_rows(self, recipe: Recipe) -> int:
        """Returns the rows of its shard if every answer is as long as it may be. The last token of
        an answer has no row."""
        return sum(
            len(source.tokens) + (recipe.max_tokens - 1 if source.is_prompt else 0)
            for source in self.sources
        )

    def stamp(self, recipe: Recipe) -> str:
        # Only the hash: the verifier's name is the path of its folder.
        inputs = [{**asdict(recipe), "verifier": recipe.verifier.sha256}, self._plain()]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self._plain())

    @classmethod
    def from_json(cls, text: str) -> Self:
        return TypeAdapter(cls).validate_python(json.loads(text))

    def _plain(self) -> dict[str, Any]:
        return {"index": self.index, "sources": [asdict(source) for source in self.sources]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """Inputs with which a worker makes shards."""

    model: Path
    folder: Path
    """Folder of the store; with workers on several nodes, one that all of them share."""
    recipe: Recipe
    batch: int
    """Maximum prompts that are answered together."""
    threads: int
    """CPU threads of one worker."""
    workers: int | None
    """Number of processes; None: one per GPU of the cluster, or per `threads` CPUs."""
    allowed_s: float

    def num_workers(self, num_chunks: int, *, num_gpus: int) -> int:
        natural = num_gpus or max(1, len(os.sched_getaffinity(0)) // self.threads)
        return max(1, min(self.workers or natural, num_chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeShard:
    """A shard, and the time that its worker had spent when it was finished."""

    entry: ShardEntry
    spent_s: float


class ShardWorker:
    """Makes shards in this process until its time is spent.

    The target is loaded with the first chunk, so that `make` raises its errors; the time starts
    after that, so that a slow start does not use it up.
    """

    def __init__(self, job: ShardJob) -> None:
        self._job = job

    def make(self, chunk: Chunk) -> MadeShard | None:
        """Makes a shard; returns None if the time is spent."""
        collector, ready = self._loaded
        if time.monotonic() - ready > self._job.allowed_s:
            return None
        entry = collector.collect(self._job.folder, chunk)
        return MadeShard(entry=entry, spent_s=time.monotonic() - ready)

    @cached_property
    def _loaded(self) -> tuple["Collector", float]:
        return collector_of(self._job), time.monotonic()


def collector_of(job: ShardJob) -> "Collector":
    """Builds the target in this process."""
    torch.set_num_threads(job.threads)
    config = engine_config(
        ModelConfig(path=job.model, dtype=job.recipe.dtype, numerics="fast"),
        SpeculationConfig(max_draft_tokens=0),
        batch=job.batch,
        max_length=job.recipe.max_length,
        threads=job.threads,
    )
    source = EngineRows(build_local_engine(config, book=BeliefBook()))
    return Collector(source=source, recipe=job.recipe)


class Collector:
    """Turns chunks into shards."""

    def __init__(self, *, source: RowSource, recipe: Recipe) -> None:
        self._source = source
        self._recipe = recipe
        self._spec = FeatureSpec(exits=recipe.exits, top_k=recipe.top_k)

    def collect(self, folder: Path, chunk: Chunk) -> ShardEntry:
        texts = self._source.rows_of(self.requests(chunk))
        sequences = [
            sequence_of(source, text) for source, text in zip(chunk.sources, texts, strict=True)
        ]
        return write_shard(folder, chunk.index, sequences, stamp=chunk.stamp(self._recipe))

    def requests(self, chunk: Chunk) -> list[Request]:
        """Returns what the target is asked for, in the order of the chunk's sources."""
        return [self._request(chunk, number) for number in range(len(chunk.sources))]

    def _request(self, chunk: Chunk, number: int) -> Request:
        source = chunk.sources[number]
        name = f"collect-{chunk.index}-{number}"
        if not source.is_prompt:
            return reading(source.tokens, name=name, spec=self._spec)
        return Request(
            request_id=RequestId(name),
            prompt=tuple(TokenId(token) for token in source.tokens),
            sampling=SamplingParams(
                temperature=source.temperature,
                seed=source.seed,
                max_tokens=self._recipe.max_tokens,
                stop_token_ids=self._recipe.stop_token_ids,
            ),
            speculation=PLAIN,
            workload=source.workload,
            features=self._spec,
        )


def sequence_of(source: Source, text: TextRows) -> FeatureSequence:
    """Returns the rows of a text, with the token of each."""
    return FeatureSequence(
        tokens_T=torch.tensor(text.tokens[: text.num_rows]),
        num_prompt=len(source.tokens) if source.is_prompt else 0,
        workload=source.workload,
        temperature=source.temperature,
        hidden=text.hidden,
        top_ids_TK=text.top_ids_TK,
        top_logits_TK=text.top_logits_TK,
        lse_T=text.lse_T,
    )
