"""A sweep over a tiny target that takes seconds: few steps, few prompts, short texts."""

import random
from pathlib import Path

from eesd_dist.distill.answers import Machine
from eesd_dist.distill.sweep import Combination, SweepOptions, SweepRequest
from eesd_dist.distill.train.request import TrainOptions
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import TokenId

VOCAB = 96


def prompts(count: int, *, seed: int) -> tuple[Prompt, ...]:
    rng = random.Random(seed)
    return tuple(
        Prompt(workload="test", tokens=tuple(TokenId(rng.randrange(3, VOCAB)) for _ in range(8)))
        for _ in range(count)
    )


def sweep_request(target: Path, features: Path, out: Path, *tried: Combination) -> SweepRequest:
    return SweepRequest(
        machine=Machine(model=target, head=out, dtype="float32"),
        features=features,
        out=out,
        combinations=tried,
        calibrated=prompts(6, seed=1),
        judged=prompts(4, seed=2),
        options=SweepOptions(
            draft_vocab=48, minutes_each=None, steps_each=4, timed_prompts=2, timed_tokens=12
        ),
        max_tokens=12,
        training=TrainOptions(rows=8, length=32),
    )
