"""Options of the fuzz; the docstring is the help text of its command. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eesd_dist.bench.options import Json
from eesd_dist.types import Device, DType

DEFAULT_TOKENS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzOptions:
    """Compares texts of random engines, requests and faults.

    Each engine is drawn from the seed and its number: controllers, trees, batch, pages,
    microbatches, ranks, links; requests with every sampling parameter; arrivals, aborts, lost
    stages, migrations. Each text, its finish reason and its log-probabilities are compared with
    those of the same request alone, with speculation off. A failing engine is written to a
    case file that --case replays. Exit status 1 if anything differs.
    """

    random: Annotated[int | None, "seed of all random choices"] = None
    model: Annotated[tuple[Path, ...], "folder of a model; may be repeated"] = ()
    head: Annotated[Path | None, "exit head of the first model (MODEL/exit_head)"] = None
    random_models: Annotated[int, "number of additional models of odd shapes"] = 0
    prompts: Annotated[Path | None, "JSON lines, for models with a tokenizer (bundled)"] = None
    device: Annotated[Device, "where to compute"] = "auto"
    dtype: Annotated[tuple[DType, ...], "only these types (all)"] = ()
    ranks: Annotated[int, "fewest verify ranks of an engine"] = 1
    tokens: Annotated[int | None, f"approximate tokens to compare ({DEFAULT_TOKENS})"] = None
    minutes: Annotated[float | None, "time limit; with --tokens, whichever comes first"] = None
    state: Annotated[Path | None, "state file; the same command continues from it"] = None
    case: Annotated[Path | None, "replay only this case file"] = None
    case_folder: Annotated[Path, "folder for failing cases"] = Path()
    max_failures: Annotated[int, "stop after this many failing engines"] = 3
    json: Json = False
