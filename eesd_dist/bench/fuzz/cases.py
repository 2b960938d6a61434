"""One engine of the fuzz as plain values: what is built, what is asked of it, what befalls it.

A case is complete: written to a file it can be replayed on another machine, where the model folder
is there too. Random models are named by the seed that makes them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.control.cost import CostModel
from eesd_dist.errors import ConfigError
from eesd_dist.types import Request

TIMEOUT_S = 60.0
"""Deadline of every wait between ranks: long enough for a busy machine."""

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a text may depend on apart from its request."""

    model: str
    """A folder, or `random:SEED:NUMBER`."""
    head: str | None
    """A folder, relative ones below the model's; None: the model's own, or none."""
    device: Device
    dtype: DType
    draft_ranks: int
    verify_ranks: int
    page_size: int

    def label(self) -> str:
        ranks = f"{self.draft_ranks}x{self.verify_ranks} ranks"
        return f"{Path(self.model).name or self.model}, {self.dtype}, {ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How rounds reach the verify stage."""

    kind: Literal["inline", "thread"]
    """`inline`: verified while the engine waits, so that a case repeats exactly. `thread`: next to
    the engine, so that replies come when they come."""
    announced: float = 1.0
    """Of `inline`: chance that a reply is said to be here when the engine asks; below 1 the engine
    drafts ahead."""
    encoded: bool = False
    """Whether rounds and replies are written and read as they travel between processes."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What a text must not depend on."""

    num_pages: int
    prefix_caching: bool
    scheduler: SchedulerConfig
    speculation: SpeculationConfig
    cost: CostModel
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request, and when it arrives where."""

    name: str
    request: Request
    turn: int
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A request is dropped; another one may take its id at once."""

    kind: Literal["abort"] = "abort"
    turn: int
    entry: str
    successor: str | None
    """The entry that arrives now, under the dropped one's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A request leaves and is submitted again with its tokens so far."""

    kind: Literal["resume"] = "resume"
    turn: int
    entry: str
    engine: int
    renamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A part of a pipeline is lost in mid-round; a new epoch begins with its replacement."""

    kind: Literal["loss"] = "loss"
    turn: int
    engine: int
    part: Literal["send", "receive", "verify rank", "draft rank"]
    after: int
    """So many more rounds, or commands of draft ranks, go well."""
    fresh: bool
    """Whether the verify stage is loaded again, or only forgets its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """KV pages are copied to the other engine, and the requests follow them."""

    kind: Literal["migration"] = "migration"
    turn: int
    source: int
    entries: tuple[str, ...]
    """Empty: every running request's pages."""
    copy_after: int
    adopt_after: int
    """Turns that both engines go on for before the copy, and between it and the adoption."""
    chunk_bytes: int
    is_adopted: bool
    """False: the reservation is given up, and the requests are computed again."""


Trouble = Abort | Resume | Loss | Migration


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine of the fuzz, or two that requests move between."""

    seed: int
    number: int
    world: World
    engines: tuple[EngineSetup, ...]
    entries: tuple[Entry, ...]
    troubles: tuple[Trouble, ...]
    plant: str | None = None
    """An error planted on purpose: see `plants`."""


_CASE: TypeAdapter[Case] = TypeAdapter(Case)


def engine_config(world: World, setup: EngineSetup, *, folder: Path) -> EngineConfig:
    """`folder`: where the world's model lies."""
    head = None if world.head is None else folder / world.head
    return EngineConfig(
        model=ModelConfig(
            path=folder, head=head, dtype=world.dtype, numerics="invariant", device=world.device
        ),
        cache=CacheConfig(
            page_size=world.page_size,
            num_pages=setup.num_pages,
            prefix_caching=setup.prefix_caching,
        ),
        scheduler=setup.scheduler,
        speculation=setup.speculation,
        parallel=ParallelConfig(
            draft_tensor_parallel_size=world.draft_ranks,
            verify_tensor_parallel_size=world.verify_ranks,
            timeout_s=TIMEOUT_S,
        ),
    )


def save_case(case: Case, file: Path) -> None:
    file.write_bytes(_CASE.dump_json(case, indent=1) + b"\n")


def load_case(file: Path) -> Case:
    """Raises ConfigError for a file that is no case."""
    try:
        return _CASE.validate_json(file.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{file}: found no case of the fuzz: {error}") from error
