"""`eesd distill collect`: collects the target's features over text that it generates.

A plan is a sequence of chunks of a few prompts or texts; each chunk becomes exactly one shard, made
by one worker. After an interruption the same command continues: existing shards are kept, and
shards of other options are refused. All workers must have access to the folder.
"""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from eesd_dist.checks import require_positive, require_temperatures
from eesd_dist.config import DType
from eesd_dist.distill.collector import Chunk, Recipe, ShardJob, Source
from eesd_dist.distill.executor import Executor, Say
from eesd_dist.distill.features import (
    MANIFEST_FILE,
    FeatureManifest,
    ShardEntry,
    inspect_shard,
    shard_name,
    weights_fingerprint,
)
from eesd_dist.distill.folders import only_one, write_json
from eesd_dist.distill.held_out import NUM_HELD_OUT, SHIPPED_PROMPTS, PromptChoice, read_texts
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.heads.head_config import VerifierIdentity
from eesd_dist.model.spec import ModelSpec
from eesd_dist.progress import progress_bar

_PROGRESS_FILE = "progress.json"
"""File with the seconds that earlier runs spent on an unfinished store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """Options for the collected text and its features."""

    model: Annotated[Path, "folder of the target (the bundled one)"]
    prompts: Annotated[Path, "JSON lines: messages or prompt"] = SHIPPED_PROMPTS
    text: Annotated[Path | None, "JSON lines of {text}, collected unchanged with prompts"] = None
    text_only: Annotated[bool, "no prompts, only --text"] = False
    limit: Annotated[int | None, "maximum number of prompts"] = None
    held_out: Annotated[int, "prompts held out for evaluation"] = NUM_HELD_OUT
    temperatures: Annotated[tuple[float, ...], "alternate over each prompt's answers"] = (
        0.0,
        0.8,
    )
    passes: Annotated[int, "answers to each prompt"] = 2
    max_tokens: Annotated[int, "maximum length of an answer"] = 144
    max_length: Annotated[int, "maximum length of a sequence"] = 1024
    top_k: Annotated[int, "logits kept per token"] = 32
    chunk_size: Annotated[int, "sequences in a shard"] = 32
    dtype: Annotated[DType, "type in which the target is computed"] = "bfloat16"
    max_gb: Annotated[
        float | None, "maximum size of the features in GB; a fair sample of the texts is collected"
    ] = None
    seed: int = 0
    workers: Annotated[int | None, "processes (one per GPU, or per CPU)"] = None
    threads: Annotated[int, "CPU threads per process"] = 1

    def __post_init__(self) -> None:
        require_positive(self, "limit", "held_out", "passes", "max_tokens", "max_length", "top_k")
        require_positive(self, "chunk_size", "workers", "threads", "max_gb")
        require_temperatures(self.temperatures)

    def prompt_choice(self) -> PromptChoice:
        if self.text_only:
            raise ConfigError(
                "found no prompts: a head is calibrated and evaluated on held-out prompts"
            )
        return PromptChoice(prompts=self.prompts, held_out=self.held_out, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectRequest:
    """Options of a collection and its output folder."""

    options: CollectOptions
    out: Annotated[Path, "folder of the features; on a cluster, one shared by all nodes"]
    exits: Annotated[tuple[int, ...], "layers after which hidden states are kept"] = (1,)
    minutes: Annotated[float | None, "start no shard after this time"] = None
    part: Annotated[
        int, "with --max-gb: which part of the texts, each of at most this size; the first is 0"
    ] = 0

    def __post_init__(self) -> None:
        require_positive(self, "minutes")
        if self.part < 0:
            raise ConfigError(f"part is {self.part}: expected 0 or more")

    def recipe(self) -> Recipe:
        """Builds the recipe; reads the target's config files and samples of its weights."""
        options = self.options
        spec = ModelSpec.from_folder(options.model)
        for exit_layer in self.exits:
            if not 0 < exit_layer < spec.num_layers:
                raise ConfigError(
                    f"exit layer {exit_layer}: expected 1 to {spec.num_layers - 1}, since the "
                    f"target has {spec.num_layers} layers"
                )
        # One position is left for the token after a text, which every request generates.
        max_length = min(options.max_length, spec.max_position_embeddings - 1)
        if not 0 < options.max_tokens < max_length:
            raise ConfigError(
                f"{options.max_tokens} tokens of an answer (max_tokens) leave no room for a prompt "
                f"in {max_length} (max_length): raise max_length or lower max_tokens"
            )
        return Recipe(
            verifier=VerifierIdentity.of(options.model, spec),
            weights_sha256=weights_fingerprint(options.model),
            exits=tuple(sorted(set(self.exits))),
            top_k=min(options.top_k, spec.vocab_size),
            max_tokens=options.max_tokens,
            max_length=max_length,
            stop_token_ids=spec.eos_token_ids,
            dtype=options.dtype,
            seed=options.seed,
        )


def collect(request: CollectRequest, *, executor: Executor, say: Say) -> FeatureManifest:
    """Makes missing shards and writes the manifest; a finished store is not changed.

    Raises CheckpointError when the folder has features of other options.
    """
    recipe = request.recipe()
    chunks = planned(request.options, recipe, portion=request.part, say=say)
    with only_one(request.out):
        if (request.out / MANIFEST_FILE).exists():
            return _finished(request.out, plan_sha256(chunks, recipe), say=say)
        entries = done_already(request.out, chunks, recipe)
        left = [chunk for chunk in chunks if chunk.index not in entries]
        say(f"collect: {len(chunks)} shards planned, {len(entries)} there already")
        new_entries = _make(request, recipe, left, executor, num_done=len(entries)) if left else []
        manifest = finish(
            request.out,
            [*entries.values(), *new_entries],
            chunks,
            recipe,
            num_held_out=None if request.options.text_only else request.options.held_out,
        )
        (request.out / _PROGRESS_FILE).unlink(missing_ok=True)
    say(f"collect: {described(manifest)}")
    return manifest


def planned(options: CollectOptions, recipe: Recipe, *, portion: int = 0, say: Say) -> list[Chunk]:
    """Reads the prompts and returns the chunks of one part. Raises ConfigError if there is no such
    part."""
    portions = planned_parts(options, recipe, say=say)
    if portion >= len(portions):
        raise ConfigError(
            f"part {portion}: the texts have {len(portions)} part(s), counted from 0; lower part "
            "or max_gb, or collect more text"
        )
    return portions[portion]


def planned_parts(options: CollectOptions, recipe: Recipe, *, say: Say) -> list[list[Chunk]]:
    """Reads the prompts and returns all chunks of the plan, in parts of at most `max_gb`."""
    prompts: list[tuple[str, Sequence[int]]] = []
    num_skipped = 0
    if not options.text_only:
        split = options.prompt_choice().read(options.model)
        prompts = [(prompt.workload, prompt.tokens) for prompt in split.learnt[: options.limit]]
        room = recipe.max_length - recipe.max_tokens
        num_skipped = split.num_skipped + sum(len(tokens) > room for _, tokens in prompts)
    texts = [] if options.text is None else read_texts(options.model, options.text)
    chunks = plan(prompts, texts, options, recipe)
    if num_skipped:
        say(f"collect: {num_skipped} prompts of {options.prompts} are too long and skipped")
    if options.max_gb is None:
        return [chunks]
    return parts_within(chunks, recipe, max_bytes=options.max_gb * 1e9)


def plan(
    prompts: Sequence[tuple[str, Sequence[int]]],
    texts: Sequence[Sequence[int]],
    options: CollectOptions,
    recipe: Recipe,
) -> list[Chunk]:
    """Returns chunks of all prompts (class, tokens), answered `passes` times at alternating
    temperatures, and of all texts, cut to the maximum length. They are shuffled by the recipe's
    seed, so that any first part of the shards is a fair sample. Raises ConfigError if none is left.
    """
    room = recipe.max_length - recipe.max_tokens
    temperatures, size = options.temperatures, options.chunk_size
    sources = [
        Source(
            tokens=tuple(tokens),
            workload=workload,
            is_prompt=True,
            temperature=temperatures[(number + turn) % len(temperatures)],
            seed=recipe.seed + turn * len(prompts) + number,
        )
        for turn in range(options.passes)
        for number, (workload, tokens) in enumerate(prompts)
        if len(tokens) <= room
    ]
    sources += [
        Source(tokens=tuple(segment), workload="text", is_prompt=False)
        for text in texts
        for segment in _segments(text, length=recipe.max_length)
    ]
    if not sources:
        prompts_file = None if options.text_only else options.prompts
        files = " and ".join(str(file) for file in (prompts_file, options.text) if file)
        raise ConfigError(
            f"{files or 'neither prompts nor text'}: found {len(prompts)} prompts and {len(texts)} "
            f"texts, none of which fits: expected a prompt of at most {room} tokens (max_length "
            "minus max_tokens), or a text of at least two"
        )
    random.Random(f"plan/{recipe.seed}").shuffle(sources)
    return [
        Chunk(index=index, sources=tuple(sources[first : first + size]))
        for index, first in enumerate(range(0, len(sources), size))
    ]


def within(chunks: Sequence[Chunk], recipe: Recipe, *, max_bytes: float) -> list[Chunk]:
    """Returns the first chunks, of which the shards surely fit. Raises ConfigError if none does."""
    sizes = accumulate(recipe.most_bytes(chunk) for chunk in chunks)
    fitting = [chunk for chunk, size in zip(chunks, sizes, strict=True) if size <= max_bytes]
    if not fitting:
        raise ConfigError(
            f"max_gb of {max_bytes / 1e9:g}: expected at least "
            f"{recipe.most_bytes(chunks[0]) / 1e9:.3g}, the size of one shard; raise it, or lower "
            "chunk_size"
        )
    return fitting


def parts_within(chunks: Sequence[Chunk], recipe: Recipe, *, max_bytes: float) -> list[list[Chunk]]:
    """Returns all chunks in order, in parts that surely fit. Raises ConfigError if one does not."""
    portions: list[list[Chunk]] = []
    left = list(chunks)
    while left:
        portions.append(within(left, recipe, max_bytes=max_bytes))
        left = left[len(portions[-1]) :]
    return portions


def plan_sha256(chunks: Sequence[Chunk], recipe: Recipe) -> str:
    """Returns the hash of the whole plan, which is stored in the manifest."""
    stamps = "\n".join(chunk.stamp(recipe) for chunk in chunks)
    return hashlib.sha256(stamps.encode()).hexdigest()


def done_already(folder: Path, chunks: Sequence[Chunk], recipe: Recipe) -> dict[int, ShardEntry]:
    """Returns existing shards by chunk. Raises CheckpointError for a shard of another plan."""
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
    """Writes the manifest, which makes the store complete."""
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


def described(manifest: FeatureManifest) -> str:
    """Returns the size of a store as one line of text."""
    per_million = manifest.bytes_per_million_tokens / 1e6
    return (
        f"{manifest.num_tokens:,} tokens of {manifest.num_sequences:,} sequences in "
        f"{len(manifest.shards)} shards, {manifest.num_bytes / 1e6:,.1f} MB "
        f"({per_million:,.0f} MB per million tokens)"
    )


def _finished(folder: Path, expected_sha256: str, *, say: Say) -> FeatureManifest:
    manifest = FeatureManifest.read(folder)
    if manifest.plan_sha256 != expected_sha256:
        raise CheckpointError(
            file=folder / MANIFEST_FILE,
            found="features collected from another target, or other prompts or options",
            expected="those of this command",
            advice="use another folder, or remove this one",
        )
    say(f"collect: done before, {described(manifest)}")
    return manifest


def _make(
    request: CollectRequest,
    recipe: Recipe,
    chunks: Sequence[Chunk],
    executor: Executor,
    *,
    num_done: int,
) -> list[ShardEntry]:
    """Makes the shards, and records the time spent, which a restart deducts from its limit."""
    options = request.options
    before_s = _spent_s(request.out)
    job = ShardJob(
        model=options.model.resolve(),
        folder=request.out.resolve(),
        recipe=recipe,
        batch=options.chunk_size,
        threads=options.threads,
        workers=options.workers,
        allowed_s=math.inf if request.minutes is None else request.minutes * 60 - before_s,
    )
    entries: list[ShardEntry] = []
    with progress_bar(
        title="collect", total=num_done + len(chunks), initial=num_done, unit="shard"
    ) as bar:
        for shard in executor.make_shards(job, chunks):
            entries.append(shard.entry)
            bar.update()
            bar.set_postfix(tokens=sum(entry.num_tokens for entry in entries))
            write_json(request.out / _PROGRESS_FILE, {"spent_s": before_s + shard.spent_s})
    return entries


def _spent_s(folder: Path) -> float:
    file = folder / _PROGRESS_FILE
    spent_s = read_json(file).get("spent_s") if file.exists() else 0.0
    return float(spent_s) if isinstance(spent_s, int | float) else 0.0


def _segments(text: Sequence[int], *, length: int) -> Iterator[Sequence[int]]:
    """Yields pieces of at most `length` tokens of a text, without pieces of a single token."""
    for first in range(0, len(text), length):
        if len(segment := text[first : first + length]) > 1:
            yield segment
