"""Trains exit heads of SmolLM2 in minutes on a GPU: collects text, then trains a head per layer.

    python infra/smollm2/train_heads.py prepare --model FOLDER --prompts FILE --out TOKENS.npz
    python infra/smollm2/train_heads.py train --model FOLDER --tokens TOKENS.npz --out OUT

`prepare` encodes the prompts, less those held out for calibration and evaluation. `train` needs no
network, no Ray and no DeepSpeed: the target answers in large batches (`large_batches`) until
`--collect-seconds` are spent, and then every layer of `--exits` gets a process that trains a head
with `eesd_dist.distill`. The best head so far is copied to OUT every few seconds, so that a run
that is cut short leaves one.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from large_batches import LargeBatches

from eesd_dist.distill.collect import CollectOptions, CollectRequest, plan
from eesd_dist.distill.collector import Chunk, Collector, Recipe, sequence_of
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.features import FeatureManifest, ShardEntry, write_shard
from eesd_dist.distill.held_out import PromptChoice
from eesd_dist.distill.train.losses import LossOptions
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.distill.train_head import train as train_head
from eesd_dist.text.prompts import Prompt

HELD_OUT = 160
_POOL = 4
"""Chunks with prompts that are sorted by length together, so that those of one chunk are alike."""
_SHOW_S = 5.0
_GRACE_S = 30.0
"""Time of a training beyond its budget before it is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Stores of features, one for each exit layer."""

    folders: dict[int, Path]
    num_tokens: int
    num_answered: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    prepare_options = steps.add_parser("prepare")
    train_options = steps.add_parser("train")
    head_options = steps.add_parser("one", help="one head, in a process of its own")
    for options in (prepare_options, train_options, head_options):
        options.add_argument("--model", type=Path, required=True)
        options.add_argument("--out", type=Path, required=True)
    prepare_options.add_argument("--prompts", type=Path, required=True)
    prepare_options.add_argument("--short", type=int, default=160, help="tokens; longer are rarer")
    prepare_options.add_argument("--longest", type=int, default=400)
    train_options.add_argument("--tokens", type=Path, required=True)
    train_options.add_argument("--work", type=Path, default=Path("build/smollm2-work"))
    train_options.add_argument("--collect-seconds", type=float, default=80.0)
    train_options.add_argument("--max-rows", type=int, default=8_000_000)
    train_options.add_argument("--resume", action="store_true", help="collect in addition to WORK")
    train_options.add_argument("--exits", type=int, nargs="+", default=[2, 3, 4])
    train_options.add_argument("--batch", type=int, default=1024)
    train_options.add_argument("--max-tokens", type=int, default=256)
    train_options.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    head_options.add_argument("--features", type=Path, required=True)
    head_options.add_argument("--exit", type=int, required=True)
    for options in (train_options, head_options):
        options.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
        options.add_argument("--train-seconds", type=float, default=80.0)
        options.add_argument("--threads", type=int, default=4, help="CPU threads of a training")
        options.add_argument("--draft-vocab", type=int, default=4096)
        options.add_argument("--rows", type=int, default=64)
        options.add_argument("--rate", type=float, default=1e-3)
        options.add_argument("--evaluate-every", type=int, default=200)
        options.add_argument("--start", type=Path, help="a folder of exit_N: trained further")
    options = parser.parse_args()
    {"prepare": prepare, "train": train, "one": train_one}[options.step](options)


def prepare(options: argparse.Namespace) -> None:
    choice = PromptChoice(prompts=options.prompts, held_out=HELD_OUT)
    prompts = affordable(choice.read(options.model).learnt, options.short, options.longest)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        options.out,
        tokens=np.concatenate([np.asarray(prompt.tokens, dtype=np.uint16) for prompt in prompts]),
        lengths=np.asarray([len(prompt.tokens) for prompt in prompts]),
        classes=np.asarray([prompt.workload for prompt in prompts]),
    )
    say(f"{len(prompts)} prompts of {sum(len(p.tokens) for p in prompts)} tokens")


def affordable(prompts: Sequence[Prompt], short: int, longest: int) -> list[Prompt]:
    """Returns the prompts of up to `short` tokens and a quarter of those of up to `longest`: a long
    prompt costs as much as its answer and teaches less."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    return [
        prompt
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        if length <= short or (length <= longest and number % 4 == 0)
    ]


def train(options: argparse.Namespace) -> None:
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    collected = collect(options)
    processes = {
        layer: started(options, layer, folder) for layer, folder in collected.folders.items()
    }
    ends = time.monotonic() + options.train_seconds + _GRACE_S
    while any(process.poll() is None for process in processes.values()):
        if time.monotonic() > ends:
            say("the time is spent: the trainings are ended, their best heads are kept")
            for process in processes.values():
                process.kill()
        time.sleep(_SHOW_S)
        show_and_copy(options, collected, seconds=time.monotonic() - began)
    codes = {layer: process.wait() for layer, process in processes.items()}
    show_and_copy(options, collected, seconds=time.monotonic() - began)
    say(f"done after {time.monotonic() - began:.0f} s, exit codes {codes}")


def collect(options: argparse.Namespace) -> Collected:
    """Collects until the time is spent; the target answers one chunk while others are written."""
    began = time.monotonic()
    device = torch.device(options.device)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    target = LargeBatches(options.model, device=device, dtype=dtype)
    settings = CollectOptions(
        model=options.model,
        passes=2,
        max_tokens=options.max_tokens,
        temperatures=(0.0, 0.8, 0.0, 1.0),
        chunk_size=options.batch * _POOL,
        held_out=HELD_OUT,
    )
    exits = tuple(sorted(options.exits))
    request = CollectRequest(options=settings, out=options.work, exits=exits)
    recipe = request.recipe()
    folders = {layer: options.work / f"features_{layer}" for layer in exits}
    chunks = alike(plan(read_tokens(options.tokens), [], settings, recipe), size=options.batch)
    old_shards: dict[int, list[tuple[ShardEntry, str]]] = {layer: [] for layer in exits}
    for layer, folder in folders.items():
        if options.resume:
            shards = FeatureManifest.read(folder).shards
            own = replace(recipe, exits=(layer,))
            old_shards[layer] = [
                (shard, chunk.stamp(own)) for shard, chunk in zip(shards, chunks, strict=False)
            ]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
    num_old_chunks = min(map(len, old_shards.values()))
    say(
        f"collect: ready after {time.monotonic() - began:.0f} s, {len(chunks)} chunks planned, "
        f"{num_old_chunks} kept"
    )
    began = time.monotonic()
    written: list[tuple[Chunk, dict[int, Future[tuple[ShardEntry, str]]]]] = []
    num_rows = num_answered = 0
    with ThreadPoolExecutor(2 * len(exits)) as pool:
        for chunk in chunks[num_old_chunks:]:
            spent = time.monotonic() - began
            if written and (spent > options.collect_seconds or num_rows >= options.max_rows):
                break
            requests = Collector(source=target, recipe=recipe).requests(chunk)
            texts = target.rows_of(requests)
            sequences = [
                sequence_of(source, text) for source, text in zip(chunk.sources, texts, strict=True)
            ]
            shards = {}
            for layer, folder in folders.items():
                own = [replace(s, hidden={layer: s.hidden[layer]}) for s in sequences]
                shards[layer] = pool.submit(
                    write_one, folder, chunk, own, replace(recipe, exits=(layer,))
                )
            written.append((chunk, shards))
            for _, earlier in written[:-2]:  # bounds the features in memory
                for shard in earlier.values():
                    shard.result()
            num_rows += sum(text.num_rows for text in texts)
            num_answered += sum(
                text.num_rows + 1 - len(source.tokens)
                for source, text in zip(chunk.sources, texts, strict=True)
            )
            spent = time.monotonic() - began
            say(
                f"collect: {spent:.0f} s, {num_rows:,} rows, {num_answered:,} answered tokens, "
                f"{num_rows / spent:,.0f} rows/s"
            )
        for layer, folder in folders.items():
            results = old_shards[layer][:num_old_chunks]
            results += [shards[layer].result() for _, shards in written]
            manifest(replace(recipe, exits=(layer,)), results).write(folder)
    return Collected(
        folders=folders,
        num_tokens=num_rows,
        num_answered=num_answered,
        seconds=time.monotonic() - began,
    )


def alike(pools: Sequence[Chunk], *, size: int) -> list[Chunk]:
    """Returns chunks of `size` prompts of similar length, from each pool of them."""
    groups = []
    for pool in pools:
        ordered = sorted(pool.sources, key=lambda source: len(source.tokens))
        groups += [ordered[first : first + size] for first in range(0, len(ordered), size)]
    return [Chunk(index=index, sources=tuple(group)) for index, group in enumerate(groups)]


def write_one(
    folder: Path, chunk: Chunk, sequences: Sequence[object], recipe: Recipe
) -> tuple[ShardEntry, str]:
    stamp = chunk.stamp(recipe)
    return write_shard(folder, chunk.index, sequences, stamp=stamp), stamp  # type: ignore[arg-type]


def manifest(recipe: Recipe, results: Sequence[tuple[ShardEntry, str]]) -> FeatureManifest:
    stamps = "\n".join(stamp for _, stamp in results)
    return FeatureManifest(
        verifier=recipe.verifier,
        weights_sha256=recipe.weights_sha256,
        exits=recipe.exits,
        top_k=recipe.top_k,
        seed=recipe.seed,
        max_length=recipe.max_length,
        shards=tuple(entry for entry, _ in results),
        plan_sha256=hashlib.sha256(stamps.encode()).hexdigest(),
        num_held_out=HELD_OUT,
    )


def read_tokens(file: Path) -> list[tuple[str, list[int]]]:
    with np.load(file) as arrays:
        tokens, lengths, classes = (arrays[name] for name in ("tokens", "lengths", "classes"))
    prompts = np.split(tokens.astype(np.int64), np.cumsum(lengths)[:-1])
    return [(str(name), prompt.tolist()) for name, prompt in zip(classes, prompts, strict=True)]


def started(options: argparse.Namespace, layer: int, features: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, __file__, "one", "--model", str(options.model)]
    command += ["--out", str(options.work / f"exit_{layer}"), "--features", str(features)]
    command += ["--exit", str(layer), "--device", options.device, "--rate", str(options.rate)]
    command += ["--train-seconds", str(options.train_seconds), "--rows", str(options.rows)]
    command += ["--draft-vocab", str(options.draft_vocab)]
    command += ["--threads", str(options.threads)]
    command += ["--evaluate-every", str(options.evaluate_every)]
    if options.start is not None:
        command += ["--start", str(options.start / f"exit_{layer}")]
    with (options.out / f"exit_{layer}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def train_one(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    request = TrainRequest(
        model=options.model,
        features=options.features,
        out=options.out,
        exit_layer=options.exit,
        head="truncated",
        draft_vocab=options.draft_vocab,
        minutes=options.train_seconds / 60,
        threads=options.threads,
        start=options.start,
        options=TrainOptions(
            rows=options.rows,
            length=384,
            learning_rate=options.rate,
            warmup_steps=100,
            loss=LossOptions(soft=0.7),
            prompt_weight=0.2,
            held_out_share=0.02,
            held_out_sequences=256,
            evaluate_every=options.evaluate_every,
            log_every=50,
            checkpoint_every_s=600.0,
            window_mib=1 << 16,
            device=options.device,
        ),
    )
    train_head(request, executor=LocalExecutor())


def show_and_copy(options: argparse.Namespace, collected: Collected, *, seconds: float) -> None:
    """Prints the last row of every log, and copies the best heads and the figures to OUT."""
    figures: dict[str, object] = {
        "num_rows": collected.num_tokens,
        "num_answered_tokens": collected.num_answered,
        "collect_seconds": round(collected.seconds, 1),
        "seconds": round(seconds, 1),
        "command": sys.argv,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }
    for layer in collected.folders:
        run = options.work / f"exit_{layer}.run"
        rows = complete_rows(run / "log.jsonl")
        say(f"exit {layer}: {rows[-1] if rows else 'reads its features'}")
        figures[f"exit_{layer}"] = [row for row in rows if "held_out" in row]
        if (run / "best" / "model.safetensors").exists():
            partial = options.out / f".exit_{layer}"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(run / "best", partial)
            final = options.out / f"exit_{layer}"
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


def complete_rows(log: Path) -> list[dict[str, object]]:
    if not log.exists():
        return []
    lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
    return [json.loads(line) for line in lines]


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
