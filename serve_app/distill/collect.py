"""`eesd distill collect`: features of the target over text it writes itself.

    eesd distill collect --model TARGET --out FEATURES --exits 1 2 4 [--prompts FILE.jsonl]

A Ray Data job: one row is a chunk of prompts, one chunk becomes one shard. Stopped or killed, the
same command goes on: shards that are there are kept. The folder must be one that every worker sees.
Which prompts are learnt from, and how much time there is, is decided here; what a shard holds is
`eesd_dist.distill.collect`'s.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from tqdm import tqdm

from eesd_dist.config import DType
from eesd_dist.distill.checks import require_positive, require_temperatures
from eesd_dist.distill.collector import (
    Chunk,
    Recipe,
    done_already,
    finish,
    plan,
    plan_sha256,
)
from eesd_dist.distill.features import (
    MANIFEST_FILE,
    FeatureManifest,
    ShardEntry,
    weights_fingerprint,
)
from eesd_dist.distill.folders import only_one, write_json
from eesd_dist.distill.held_out import NUM_HELD_OUT, SHIPPED_PROMPTS, read_prompts, read_texts
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.head_config import VerifierIdentity
from eesd_dist.model.spec import ModelSpec, read_json
from serve_app.config import BUNDLED_MODEL
from serve_app.distill.words import Say, on_stderr
from serve_app.session.environment import prepare_for_cluster, prepare_for_local_ray

_PROGRESS_FILE = "progress.json"
"""Seconds that earlier runs spent on an unfinished store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectRequest:
    """What is to be collected, and by how many."""

    model: Path
    out: Path
    """The feature store's folder; on a cluster, one that all nodes share."""
    exits: tuple[int, ...]
    prompts: Path | None = SHIPPED_PROMPTS
    """None: only `text`."""
    text: Path | None = None
    limit: int | None = None
    """Take so many of the prompts."""
    num_held_out: int = NUM_HELD_OUT
    temperatures: tuple[float, ...] = (0.0, 0.8)
    passes: int = 2
    """How often each prompt is answered, each time at the next temperature."""
    max_tokens: int = 144
    max_length: int = 1024
    top_k: int = 32
    chunk_size: int = 32
    dtype: DType = "bfloat16"
    minutes: float | None = None
    """No chunk is begun later than this; None collects all there is."""
    seed: int = 0
    workers: int | None = None
    """None: one per `threads` CPUs, or per GPU."""
    threads: int = 1
    address: str | None = None
    """A running Ray cluster; None starts Ray here and takes it down again."""

    def __post_init__(self) -> None:
        require_positive(
            limit=self.limit,
            num_held_out=self.num_held_out,
            passes=self.passes,
            max_tokens=self.max_tokens,
            max_length=self.max_length,
            top_k=self.top_k,
            chunk_size=self.chunk_size,
            minutes=self.minutes,
            workers=self.workers,
            threads=self.threads,
        )
        require_temperatures(self.temperatures)


def collect(request: CollectRequest, *, say: Say) -> FeatureManifest:
    """Makes what is missing and writes the manifest; a finished store is left as it is.

    Raises CheckpointError when the folder holds features made otherwise.
    """
    recipe = recipe_of(request)
    chunks = planned(request, recipe, say=say)
    with only_one(request.out):
        if (request.out / MANIFEST_FILE).exists():
            return _finished(request.out, plan_sha256(chunks, recipe), say=say)
        entries = done_already(request.out, chunks, recipe)
        left = [chunk for chunk in chunks if chunk.index not in entries]
        say(f"collect: {len(chunks)} shards planned, {len(entries)} there already")
        made = _make(request, recipe, left, num_done=len(entries)) if left else []
        manifest = finish(
            request.out,
            [*entries.values(), *made],
            chunks,
            recipe,
            num_held_out=None if request.prompts is None else request.num_held_out,
        )
        (request.out / _PROGRESS_FILE).unlink(missing_ok=True)
    say(f"collect: {described(manifest)}")
    return manifest


def recipe_of(request: CollectRequest) -> Recipe:
    """Reads the target's config files, and a little of its weights."""
    spec = ModelSpec.from_folder(request.model)
    for exit_layer in request.exits:
        if not 0 < exit_layer < spec.num_layers:
            raise ConfigError(
                f"exit layer {exit_layer}: expected 1 to {spec.num_layers - 1}, since the target "
                f"has {spec.num_layers} layers"
            )
    max_length = min(request.max_length, spec.max_position_embeddings)
    if not 0 < request.max_tokens < max_length:
        raise ConfigError(
            f"{request.max_tokens} tokens are to be written and {max_length} to be kept with the "
            "prompt: raise max_length or lower max_tokens"
        )
    return Recipe(
        verifier=VerifierIdentity.of(request.model, spec),
        weights_sha256=weights_fingerprint(request.model),
        exits=tuple(sorted(set(request.exits))),
        top_k=min(request.top_k, spec.vocab_size),
        max_tokens=request.max_tokens,
        max_length=max_length,
        stop_token_ids=spec.eos_token_ids,
        dtype=request.dtype,
        seed=request.seed,
    )


def described(manifest: FeatureManifest) -> str:
    """Its size, for people."""
    per_million = manifest.bytes_per_million_tokens / 1e6
    return (
        f"{manifest.num_tokens:,} tokens of {manifest.num_sequences:,} sequences in "
        f"{len(manifest.shards)} shards, {manifest.num_bytes / 1e6:,.1f} MB "
        f"({per_million:,.0f} MB per million tokens)"
    )


def planned(request: CollectRequest, recipe: Recipe, *, say: Say = on_stderr) -> list[Chunk]:
    """All chunks of a finished store, if time allows; reads the prompts."""
    prompts: list[tuple[str, Sequence[int]]] = []
    num_skipped = 0
    if request.prompts is not None:
        parts = read_prompts(
            request.model, request.prompts, num_held_out=request.num_held_out, seed=request.seed
        )
        prompts = [(prompt.workload, prompt.tokens) for prompt in parts.learnt[: request.limit]]
        room = recipe.max_length - recipe.max_tokens
        num_skipped = parts.num_skipped + sum(len(tokens) > room for _, tokens in prompts)
    texts = [] if request.text is None else read_texts(request.model, request.text)
    try:
        chunks = plan(
            prompts,
            texts,
            recipe=recipe,
            temperatures=request.temperatures,
            passes=request.passes,
            chunk_size=request.chunk_size,
        )
    except ConfigError as error:
        files = " and ".join(str(file) for file in (request.prompts, request.text) if file)
        raise ConfigError(f"{files or 'neither prompts nor text'}: {error}") from error
    if num_skipped:
        say(f"collect: {num_skipped} prompts of {request.prompts} are too long and skipped")
    return chunks


def _finished(folder: Path, wanted_sha256: str, *, say: Say) -> FeatureManifest:
    manifest = FeatureManifest.read(folder)
    if manifest.plan_sha256 != wanted_sha256:
        raise CheckpointError(
            file=folder / MANIFEST_FILE,
            found="features collected from another target, or other prompts or options",
            expected="those of this command",
            advice="name another folder, or remove this one",
        )
    say(f"collect: done before, {described(manifest)}")
    return manifest


def _make(
    request: CollectRequest, recipe: Recipe, chunks: Sequence[Chunk], *, num_done: int
) -> list[ShardEntry]:
    """Runs the job, keeping account of the time so that a restart does not get it anew."""
    before_s = _spent_s(request.out)
    allowed_s = math.inf if request.minutes is None else request.minutes * 60 - before_s
    if request.address is None:
        prepare_for_local_ray()
    else:
        prepare_for_cluster()
    # Its core reports as an error how Ray Data makes its own actors.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    # Ray reads the environment when it is imported.
    from serve_app.distill.collect_job import Job, run_job

    workers, gpus = _crew_of(request, num_chunks=len(chunks))
    job = Job(
        model=request.model.resolve(),
        folder=request.out.resolve(),
        recipe=recipe,
        dtype=request.dtype,
        batch=request.chunk_size,
        threads=request.threads,
    )
    entries: list[ShardEntry] = []
    with tqdm(
        total=num_done + len(chunks), initial=num_done, unit="shard", file=sys.stderr, disable=None
    ) as bar:
        for made in run_job(
            job, chunks, workers=workers, gpus=gpus, address=request.address, allowed_s=allowed_s
        ):
            entries.append(made.entry)
            bar.update()
            bar.set_postfix(tokens=sum(entry.num_tokens for entry in entries))
            write_json(request.out / _PROGRESS_FILE, {"spent_s": before_s + made.spent_s})
    return entries


def _spent_s(folder: Path) -> float:
    file = folder / _PROGRESS_FILE
    spent_s = read_json(file).get("spent_s") if file.exists() else 0.0
    return float(spent_s) if isinstance(spent_s, int | float) else 0.0


def _crew_of(request: CollectRequest, *, num_chunks: int) -> tuple[int, float]:
    """How many workers, and GPUs for each."""
    import torch  # takes seconds to import

    num_gpus = torch.cuda.device_count()
    natural = num_gpus or max(1, len(os.sched_getaffinity(0)) // request.threads)
    return max(1, min(request.workers or natural, num_chunks)), 1.0 if num_gpus else 0.0


# -- words ----------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `collect` and `run` have in common; the defaults are the request's."""
    default = CollectRequest(model=BUNDLED_MODEL, out=Path(), exits=())
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED_MODEL, help="folder of the target (the bundled one)")
    add("--prompts", type=Path, default=SHIPPED_PROMPTS, help="JSON lines: messages or prompt")
    add("--text", type=Path, help="JSON lines of {text}: read as it is, beside the prompts")
    add("--limit", type=int, help="take so many prompts")
    add("--held-out", type=int, default=NUM_HELD_OUT, help="prompts kept aside for judging")
    add("--temperatures", type=float, nargs="+", default=list(default.temperatures))
    add("--passes", type=int, default=default.passes, help="answers to each prompt")
    add("--max-tokens", type=int, default=default.max_tokens, help="longest answer")
    add("--max-length", type=int, default=default.max_length, help="longest sequence")
    add("--top-k", type=int, default=default.top_k, help="logits kept per token")
    add("--chunk-size", type=int, default=default.chunk_size, help="sequences in a shard")
    add("--dtype", choices=get_args(DType), default=default.dtype)
    add("--seed", type=int, default=default.seed)
    add("--workers", type=int, help="processes (as many as there are GPUs, or CPUs)")
    add("--threads", type=int, default=default.threads, help="CPU threads of each")
    add("--address", help="a running Ray cluster; without it, Ray is started here")


def request_of(options: argparse.Namespace, *, out: Path, exits: Sequence[int]) -> CollectRequest:
    """The words of `add_flags` as a request."""
    return CollectRequest(
        model=options.model,
        out=out,
        exits=tuple(exits),
        prompts=options.prompts,
        text=options.text,
        limit=options.limit,
        num_held_out=options.held_out,
        temperatures=tuple(options.temperatures),
        passes=options.passes,
        max_tokens=options.max_tokens,
        max_length=options.max_length,
        top_k=options.top_k,
        chunk_size=options.chunk_size,
        dtype=options.dtype,
        seed=options.seed,
        workers=options.workers,
        threads=options.threads,
        address=options.address,
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="eesd distill collect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the features")
    parser.add_argument("--exits", type=int, nargs="+", default=[1], help="layers to keep")
    parser.add_argument("--minutes", type=float, help="begin no shard later than this")
    parser.add_argument("--text-only", action="store_true", help="no prompts, only --text")
    options = parser.parse_args(argv)
    request = request_of(options, out=options.out, exits=options.exits)
    if options.text_only:
        request = replace(request, prompts=None)
    collect(replace(request, minutes=options.minutes), say=on_stderr)
    return 0
