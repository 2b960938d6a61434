"""Options of `eesd bench plan`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Annotated

from eesd_dist.bench.options import Head, Json, Model, Prompts
from eesd_dist.bench.prompts import BUNDLED_MODEL, SHIPPED_PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyOptions:
    """The planner's forecast against measured rounds.

    Measures costs with one verify rank at batches 1 and 8, and sums between two processes; predicts
    other batches and two verify ranks; measures these too. The pipelines take turns, so that a
    slower machine affects all of them; one thread a rank. On a shared machine run it as `chrt -r 5
    eesd bench plan`, or other processes delay the sums. Exit status 1 if a round time or a rate is
    further off than --limit.
    """

    model: Model = BUNDLED_MODEL
    head: Head = None
    prompts: Prompts = SHIPPED_PROMPTS
    verify_tp: Annotated[int, "ranks of the verify stage that is predicted"] = 2
    measured_batches: Annotated[tuple[int, ...], "requests of the measured costs"] = (1, 8)
    measured_lengths: Annotated[tuple[int, ...], "draft lengths of these"] = (0, 1, 2, 4, 8)
    batches: Annotated[tuple[int, ...], "requests of the predicted rounds"] = (1, 4, 8, 16)
    lengths: Annotated[tuple[int, ...], "draft lengths of these"] = (0, 2, 4, 8)
    num_prompts: Annotated[int, "prompts that each batch size runs"] = 16
    max_tokens: Annotated[int, "length of each text"] = 64
    repeats: Annotated[int, "runs of every setting"] = 3
    limit: Annotated[float, "largest relative error"] = 0.15
    json: Json = False
