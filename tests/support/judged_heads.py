"""Heads of known quality, and prompts for calibration and evaluation."""

import random
from pathlib import Path

from eesd_dist.distill.answers import Machine
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import TokenId
from tests.support.drafters import Agreement, save_head


def machine_of(target: Path, folder: Path, agreement: Agreement) -> Machine:
    head = save_head(target, folder / agreement, agreement)
    return Machine(model=target, head=head, dtype="float32")


def prompts_of(count: int) -> tuple[Prompt, ...]:
    rng = random.Random(1)
    return tuple(
        Prompt(
            workload="even" if n % 2 else "odd",
            tokens=tuple(TokenId(rng.randrange(3, 96)) for _ in range(6)),
        )
        for n in range(count)
    )
