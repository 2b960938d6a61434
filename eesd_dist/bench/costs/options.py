"""Options of `eesd bench costs`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Annotated

from eesd_dist.bench.options import Head, Json, Model, Prompts
from eesd_dist.bench.prompts import BUNDLED_MODEL, SHIPPED_PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsOptions:
    """Measures the costs of stages: input of `eesd plan`.

    Runs real rounds of one pipeline in processes of this machine, one thread a rank: the drafting
    process and the verify ranks, over Gloo, without overlap. Write the
    last line to a file for `eesd plan --costs`.
    """

    model: Model = BUNDLED_MODEL
    head: Head = None
    prompts: Prompts = SHIPPED_PROMPTS
    batches: Annotated[tuple[int, ...], "requests in a round"] = (1, 8)
    lengths: Annotated[tuple[int, ...], "draft lengths"] = (0, 1, 2, 4, 8)
    verify_tp: Annotated[int, "ranks of the verify stage"] = 1
    num_prompts: Annotated[int, "prompts that each batch size runs"] = 16
    max_tokens: Annotated[int, "length of each text"] = 64
    repeats: Annotated[int, "runs of every batch and length"] = 3
    json: Json = False
