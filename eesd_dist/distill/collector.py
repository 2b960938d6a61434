"""What the target writes and thinks, made into shards of features.

A plan is a row of chunks, each a few prompts or texts; a chunk becomes exactly one shard. The
target writes after the prompts (`Writer`), then reads each whole sequence once more
(`FrozenTarget`), and what it thought at every token is kept. Every shard carries a stamp over the
recipe and its chunk: one that is there already is not made again, and one made otherwise is
refused. Knows no Ray, no engine and no text; who works on which chunk is decided above.
"""

# Shapes: T tokens of a sequence.

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from eesd_dist.distill.features import (
    FeatureManifest,
    FeatureSequence,
    ShardEntry,
    inspect_shard,
    shard_name,
    write_shard,
)
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.errors import ConfigError
from eesd_dist.model.head_config import VerifierIdentity
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId

_VIEW_TOKENS = 2048
"""The frozen pass takes sequences of about this many tokens together."""


class Written(Protocol):
    """What the target wrote for one request."""

    @property
    def tokens(self) -> Sequence[TokenId]: ...


class Writer(Protocol):
    """The target, taking requests to their ends."""

    def generate(self, requests: Sequence[Request]) -> Sequence[Written]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One sequence to be had: a prompt to be answered, or a text taken as it is."""

    tokens: tuple[int, ...]
    workload: str
    is_prompt: bool
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides a shard's content, beside its sources."""

    verifier: VerifierIdentity
    weights_sha256: str
    exits: tuple[int, ...]
    top_k: int
    max_tokens: int
    """Longest answer."""
    max_length: int
    """Longest sequence."""
    stop_token_ids: tuple[int, ...]
    dtype: str
    """In which the target is computed."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One shard's worth of work."""

    index: int
    sources: tuple[Source, ...]

    def stamp(self, recipe: Recipe) -> str:
        # The name is where the folder happens to stand; the hashes say which target it is.
        made_of = [{**asdict(recipe), "verifier": recipe.verifier.sha256}, self._plain()]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self._plain())

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        return cls(
            index=data["index"],
            sources=tuple(
                Source(**{**source, "tokens": tuple(source["tokens"])})
                for source in data["sources"]
            ),
        )

    def _plain(self) -> dict[str, Any]:
        return {"index": self.index, "sources": [asdict(source) for source in self.sources]}


def plan(
    prompts: Sequence[tuple[str, Sequence[int]]],
    texts: Sequence[Sequence[int]],
    *,
    recipe: Recipe,
    temperatures: Sequence[float],
    passes: int,
    chunk_size: int,
) -> list[Chunk]:
    """All prompts (class, tokens), answered `passes` times at temperatures that take turns, and all
    texts, cut to the longest length; shuffled by the recipe's seed, so that any first part of the
    shards is a fair sample. Raises ConfigError when nothing is left.
    """
    room = recipe.max_length - recipe.max_tokens
    sources = [
        Source(
            tokens=tuple(tokens),
            workload=workload,
            is_prompt=True,
            temperature=temperatures[(number + turn) % len(temperatures)],
            seed=recipe.seed + turn * len(prompts) + number,
        )
        for turn in range(passes)
        for number, (workload, tokens) in enumerate(prompts)
        if len(tokens) <= room
    ]
    sources += [
        Source(tokens=tuple(piece), workload="text", is_prompt=False)
        for text in texts
        for piece in _pieces(text, length=recipe.max_length)
    ]
    if not sources:
        raise ConfigError(
            f"found {len(prompts)} prompts and {len(texts)} texts, none of which fits: expected a "
            f"prompt of at most {room} tokens (max_length less max_tokens), or a text of two"
        )
    random.Random(f"plan/{recipe.seed}").shuffle(sources)
    return [
        Chunk(index=index, sources=tuple(sources[first : first + chunk_size]))
        for index, first in enumerate(range(0, len(sources), chunk_size))
    ]


def plan_sha256(chunks: Sequence[Chunk], recipe: Recipe) -> str:
    """One hash for the whole plan; a manifest carries it."""
    stamps = "\n".join(chunk.stamp(recipe) for chunk in chunks)
    return hashlib.sha256(stamps.encode()).hexdigest()


def done_already(folder: Path, chunks: Sequence[Chunk], recipe: Recipe) -> dict[int, ShardEntry]:
    """Chunks whose shard is there. Raises CheckpointError for a shard of another plan."""
    return {
        chunk.index: inspect_shard(folder / shard_name(chunk.index), stamp=chunk.stamp(recipe))
        for chunk in chunks
        if (folder / shard_name(chunk.index)).exists()
    }


def finish(
    folder: Path,
    entries: Sequence[ShardEntry],
    chunks: Sequence[Chunk],
    recipe: Recipe,
    *,
    num_held_out: int | None = None,
) -> FeatureManifest:
    """Writes the manifest: from now on the store is whole."""
    if not entries:
        raise ConfigError(f"{folder}: the time was spent before one shard was made: allow more")
    manifest = FeatureManifest(
        verifier=recipe.verifier,
        weights_sha256=recipe.weights_sha256,
        exits=recipe.exits,
        top_k=recipe.top_k,
        seed=recipe.seed,
        max_length=recipe.max_length,
        shards=tuple(sorted(entries, key=lambda entry: entry.name)),
        plan_sha256=plan_sha256(chunks, recipe),
        num_held_out=num_held_out,
    )
    manifest.write(folder)
    return manifest


class Collector:
    """Turns chunks into shards; one per worker, since it holds the target."""

    def __init__(self, *, writer: Writer, target: FrozenTarget, recipe: Recipe) -> None:
        self._writer = writer
        self._target = target
        self._recipe = recipe

    def collect(self, folder: Path, chunk: Chunk) -> ShardEntry:
        answers = self._answers(chunk)
        sequences = [
            [*source.tokens, *answers.get(number, ())][: self._recipe.max_length]
            for number, source in enumerate(chunk.sources)
        ]
        features: list[FeatureSequence | None] = [None] * len(sequences)
        for numbers in _alike(sequences):
            views = self._target.view(
                [sequences[number] for number in numbers], top_k=self._recipe.top_k
            )
            for number, view in zip(numbers, views, strict=True):
                source = chunk.sources[number]
                features[number] = FeatureSequence(
                    tokens_T=torch.tensor(sequences[number]),
                    num_prompt=len(source.tokens) if source.is_prompt else 0,
                    workload=source.workload,
                    temperature=source.temperature,
                    hidden={at: x_TD.bfloat16() for at, x_TD in view.hidden.items()},
                    top_ids_TK=view.top_ids_TK,
                    top_logits_TK=view.top_logits_TK,
                    lse_T=view.lse_T,
                )
        made = [sequence for sequence in features if sequence is not None]
        assert len(made) == len(sequences), "every sequence is in exactly one batch"
        return write_shard(folder, chunk.index, made, stamp=chunk.stamp(self._recipe))

    def _answers(self, chunk: Chunk) -> dict[int, Sequence[TokenId]]:
        """By the source's number in its chunk."""
        numbers = [number for number, source in enumerate(chunk.sources) if source.is_prompt]
        requests = [self._request(chunk, number) for number in numbers]
        written = self._writer.generate(requests) if requests else []
        return {number: w.tokens for number, w in zip(numbers, written, strict=True)}

    def _request(self, chunk: Chunk, number: int) -> Request:
        source = chunk.sources[number]
        return Request(
            request_id=RequestId(f"collect-{chunk.index}-{number}"),
            prompt=tuple(TokenId(token) for token in source.tokens),
            sampling=SamplingParams(
                temperature=source.temperature,
                seed=source.seed,
                max_tokens=self._recipe.max_tokens,
                stop_token_ids=self._recipe.stop_token_ids,
            ),
            speculation=SpeculationParams(mode="off"),
            workload=source.workload,
        )


def _alike(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of sequences of like length, about `_VIEW_TOKENS` padded tokens at a time."""
    batch: list[int] = []
    for number in sorted(range(len(sequences)), key=lambda n: (len(sequences[n]), n)):
        if batch and (len(batch) + 1) * len(sequences[number]) > _VIEW_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _pieces(text: Sequence[int], *, length: int) -> Iterator[Sequence[int]]:
    """A text longer than the target is shown at once is several; one token teaches nothing."""
    for first in range(0, len(text), length):
        if len(piece := text[first : first + length]) > 1:
            yield piece
