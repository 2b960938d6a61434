"""The words of every command that runs a head over the prompts kept aside from it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from eesd_dist.config import DType
from eesd_dist.distill.held_out import (
    NUM_HELD_OUT,
    SHIPPED_PROMPTS,
    PromptParts,
    read_prompts,
    require_unseen,
)
from eesd_dist.distill.rounds import Machine
from serve_app.config import BUNDLED_MODEL


def add_flags(
    parser: argparse.ArgumentParser, *, temperatures: Sequence[float], max_tokens: int
) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED_MODEL, help="folder of the target (the bundled one)")
    add("--head", type=Path, required=True, help="folder of the exit head")
    add("--prompts", type=Path, default=SHIPPED_PROMPTS, help="the file that was collected from")
    add("--held-out", type=int, default=NUM_HELD_OUT, help="prompts kept aside then")
    add("--temperatures", type=float, nargs="+", default=list(temperatures))
    add("--max-tokens", type=int, default=max_tokens)
    add("--dtype", choices=get_args(DType), default="bfloat16")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0, help="as when collecting: it says which are kept aside")


def machine_and_prompts(options: argparse.Namespace) -> tuple[Machine, PromptParts]:
    """Raises ConfigError where the head has learnt from what would be judged with."""
    require_unseen(options.head, num_held_out=options.held_out, seed=options.seed)
    parts = read_prompts(
        options.model, options.prompts, num_held_out=options.held_out, seed=options.seed
    )
    machine = Machine(
        model=options.model, head=options.head, dtype=options.dtype, threads=options.threads
    )
    return machine, parts
