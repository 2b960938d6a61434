"""`eesd distill train`: an exit head from collected features, by DeepSpeed.

    eesd distill train --features FEATURES --exit 1 --out HEAD --minutes 10
    eesd distill train --features FEATURES --exit 4 --out HEAD --workers 8 --zero-stage 2 --bfloat16

One worker trains in this process; more are started by Ray Train, here or on a running cluster, and
talk through Gloo on CPUs and NCCL on GPUs. Stopped or killed, the same command goes on. Decides how
many processes there are and what each may use; what they do is `eesd_dist.distill.train`'s.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from eesd_dist.config import DType
from eesd_dist.distill.folders import only_one
from eesd_dist.distill.train.learner import (
    TrainOptions,
    TrainRequest,
    alone,
    require_fit,
    train_rank,
)
from eesd_dist.distill.train.losses import Divergence, LossOptions
from eesd_dist.errors import ConfigError
from eesd_dist.model.head_config import HeadKind
from serve_app.config import BUNDLED_MODEL
from serve_app.session.environment import prepare_for_cluster, prepare_for_local_ray

__all__ = ["TrainOptions", "TrainRequest", "main", "train"]


def train(request: TrainRequest, *, address: str | None = None) -> Path:
    """Trains to the end and returns the head's folder; what was done before is not done again.

    `address`: a running Ray cluster for several workers; without it Ray is started here, unless
    this process has one already.
    """
    require_fit(request)
    if request.out.is_dir() and any(request.out.iterdir()):
        return request.out
    with only_one(request.checkpoints):
        if request.workers == 1:
            _train_here(request)
        else:
            _train_with_ray(request, address)
    return request.out


def num_threads(request: TrainRequest) -> int:
    """CPU threads of one worker."""
    if request.options.threads is not None:
        return request.options.threads
    return max(1, len(os.sched_getaffinity(0)) // request.workers)


def _train_here(request: TrainRequest) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads(request))
    try:
        with alone(request.options):
            train_rank(request, rank=0, world_size=1)
    finally:
        torch.set_num_threads(before)


def _train_with_ray(request: TrainRequest, address: str | None) -> None:
    if address is None:
        prepare_for_local_ray()
    else:
        prepare_for_cluster()
    # Ray reads the environment when it is imported.
    from serve_app.distill.train_job import run_job

    run_job(_from_anywhere(request), address=address, threads=num_threads(request))


def _from_anywhere(request: TrainRequest) -> TrainRequest:
    """The same with paths that do not depend on where a process stands."""
    return replace(
        request,
        model=request.model.resolve(),
        features=request.features.resolve(),
        out=request.out.resolve(),
        checkpoints=request.checkpoints.resolve(),
        start=None if request.start is None else request.start.resolve(),
    )


# -- words ----------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How a head is trained; the defaults are the request's."""
    default = TrainOptions()
    add = parser.add_argument
    add("--head", choices=get_args(HeadKind), default="truncated", help="whose LM head")
    add("--draft-vocab", type=int, default=2048, help="tokens of a truncated head")
    add("--reads-embedding", action="store_true", help="the head also sees each token's embedding")
    add("--workers", type=int, default=1, help="processes")
    add("--zero-stage", type=int, default=0, help="0 to 3: what DeepSpeed partitions")
    add("--offload-optimizer", action="store_true", help="its state in host memory")
    add("--bfloat16", action="store_true", help="on machines that compute in it")
    add("--source", choices=("features", "live"), default=default.source)
    add("--rows", type=int, default=default.rows, help="of one step, over all workers")
    add("--length", type=int, default=default.length, help="tokens of a row, at most")
    add("--accumulation", type=int, default=default.accumulation, help="micro-batches of a step")
    add("--rate", type=float, default=default.learning_rate, help="highest learning rate")
    add("--warmup-steps", type=int, default=default.warmup_steps)
    add("--weight-decay", type=float, default=default.weight_decay)
    add("--clip", type=float, default=default.clip, help="largest norm of a gradient")
    add("--divergence", choices=get_args(Divergence), default=default.loss.divergence)
    add("--soft", type=float, default=default.loss.soft, help="share of the divergence in the loss")
    add("--loss-temperature", type=float, default=default.loss.temperature)
    add("--prompt-weight", type=float, default=default.prompt_weight)
    add("--held-out-share", type=float, default=default.held_out_share)
    add("--evaluate-every", type=int, default=default.evaluate_every, help="steps")
    add("--log-every", type=int, default=default.log_every, help="steps")
    add("--checkpoint-every", type=float, default=default.checkpoint_every_s, help="seconds")
    add("--keep", choices=("best", "last"), default=default.keep, help="which head to save")
    add("--save-dtype", choices=get_args(DType), default=default.save_dtype)
    add("--threads", type=int, help="CPU threads of one worker")
    add("--device", choices=("auto", "cpu", "cuda"), default=default.device)


def options_of(words: argparse.Namespace) -> TrainOptions:
    """The words of `add_flags` as options."""
    return TrainOptions(
        rows=words.rows,
        length=words.length,
        accumulation=words.accumulation,
        learning_rate=words.rate,
        warmup_steps=words.warmup_steps,
        weight_decay=words.weight_decay,
        clip=words.clip,
        loss=LossOptions(
            soft=words.soft, temperature=words.loss_temperature, divergence=words.divergence
        ),
        prompt_weight=words.prompt_weight,
        source=words.source,
        held_out_share=words.held_out_share,
        evaluate_every=words.evaluate_every,
        log_every=words.log_every,
        checkpoint_every_s=words.checkpoint_every,
        keep=words.keep,
        offload_optimizer=words.offload_optimizer,
        bfloat16=words.bfloat16,
        save_dtype=words.save_dtype,
        threads=words.threads,
        device=words.device,
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="eesd distill train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED_MODEL, help="folder of the target (the bundled one)")
    add("--features", type=Path, required=True, help="what `eesd distill collect` wrote")
    add("--exit", type=int, default=1, help="the head reads the state after so many layers")
    add("--out", type=Path, required=True, help="folder of the head")
    add("--checkpoints", type=Path, help="folder of the run (OUT with .run behind it)")
    add("--minutes", type=float, help="of training")
    add("--max-steps", type=int, help="end after so many steps")
    add("--start", type=Path, help="a head to train on")
    add("--seed", type=int, default=0)
    add("--address", help="a running Ray cluster, for several workers; without it one is started")
    add_flags(parser)
    words = parser.parse_args(argv)
    if words.minutes is None and words.max_steps is None:
        raise ConfigError("neither --minutes nor --max-steps: say when training is to end")
    request = TrainRequest(
        model=words.model,
        features=words.features,
        out=words.out,
        checkpoints=words.checkpoints or words.out.with_name(f"{words.out.name}.run"),
        exit_layer=words.exit,
        head=words.head,
        draft_vocab=words.draft_vocab,
        reads_embedding=words.reads_embedding,
        minutes=words.minutes,
        max_steps=words.max_steps,
        workers=words.workers,
        zero_stage=words.zero_stage,
        start=words.start,
        seed=words.seed,
        options=options_of(words),
    )
    head = train(request, address=words.address)
    sys.stderr.write(f"train: the head is in {head}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
