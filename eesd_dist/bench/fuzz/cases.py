"""An engine of the fuzz as plain values: its configuration, requests and troubles.

A case is complete: written to a file it can be replayed on another machine that has the model
folder. Random models are named by the seed that generates them. A case with processes repeats its
requests and faults, but not the moment within a round at which a fault happens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KvCacheDType,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.control.cost import CostModel
from eesd_dist.errors import ConfigError
from eesd_dist.types import Request

TIMEOUT_S = 60.0
"""Deadline of every wait between ranks; long enough for a busy machine."""

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that a text may depend on besides its request."""

    model: str
    """A folder, or `random:SEED:NUMBER`."""
    head: str | None
    """A folder, relative to the model's folder; None: the head in the model's folder, if any."""
    device: Device
    dtype: DType
    draft_ranks: int
    verify_ranks: int
    page_size: int
    kv_cache_dtype: KvCacheDType = "auto"

    def label(self) -> str:
        ranks = f"{self.draft_ranks}x{self.verify_ranks} ranks"
        return f"{Path(self.model).name or self.model}, {self.types}, {ranks}"

    @property
    def types(self) -> str:
        """Types of the weights and, if one is set, of keys and values."""
        kv = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} KV"
        return f"{self.dtype}{kv}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Links between the engine and its verify stage, and between the ranks of a stage."""

    kind: Literal["inline", "thread", "processes"]
    """`inline`: verified while the engine waits, so that a case repeats exactly. `thread`: verified
    in a separate thread, so that replies arrive at any time. `processes`: every rank but draft rank
    0 is a process, and they talk as in a service."""
    encoded: bool = False
    """True if rounds and replies are encoded and decoded as between processes."""
    sums: Literal["memory", "messages"] = "memory"
    """Way in which the ranks of a stage sum: inside of compiled calls, or between two calls. Of
    processes, as on one host, or as on two, with sockets between them."""
    is_shared: bool = False
    """True if verify rank 0 is in the process of draft rank 0, and the others are processes."""
    late_masks: float = 0.0
    """Probability that a mask is late: its request sits the round out, or its draft is cut."""
    seed: int = 0
    timeout_s: float = TIMEOUT_S
    """Deadline of every wait between ranks; short where ranks are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Everything that a text must not depend on."""

    num_pages: int
    prefix_caching: bool
    scheduler: SchedulerConfig
    speculation: SpeculationConfig
    cost: CostModel
    link: Link


def _request(saved: object) -> Request:
    return msgspec.convert(saved, Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request with its arrival turn and its engine."""

    name: str
    request: Annotated[Request, PlainValidator(_request), PlainSerializer(msgspec.to_builtins)]
    turn: int
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A request is aborted; another one may reuse its id at once."""

    kind: Literal["abort"] = "abort"
    turn: int
    entry: str
    successor: str | None
    """The entry that arrives now with the id of the aborted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A request is withdrawn and submitted again with its tokens so far."""

    kind: Literal["resume"] = "resume"
    turn: int
    entry: str
    engine: int
    renamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A part of a pipeline is lost during a round; a new epoch starts with its replacement."""

    kind: Literal["loss"] = "loss"
    turn: int
    engine: int
    part: Literal["send", "receive", "verify rank", "draft rank"]
    after: int
    """Number of further rounds, or commands of draft ranks, before the loss."""
    fresh: bool
    """True if the verify stage is loaded again; False if it only drops its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """KV pages are copied to the other engine, and their requests move there."""

    kind: Literal["migration"] = "migration"
    turn: int
    source: int
    entries: tuple[str, ...]
    """Requests of which pages are copied; empty: all running ones."""
    copy_after: int
    adopt_after: int
    """Turns of both engines before the copy, and between the copy and the adoption."""
    chunk_bytes: int
    is_adopted: bool
    """False: the reservation is abandoned, and the requests are recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rank that is a process is killed, stopped for longer than the deadline, or has its links
    cut. A new epoch starts, as in a service."""

    kind: Literal["kill", "stop", "cut"]
    """Draft rank 0, which is in the process of the fuzz, is not stopped; instead of a kill, its
    engine is dropped and its requests are submitted again with their tokens so far."""
    turn: int
    engine: int
    stage: Literal["draft", "verify"]
    rank: int
    after: int
    """Further steps of the engine before the fault."""
    delay_s: float
    """Seconds after the beginning of the step."""
    is_replaced: bool
    """True if a stopped or cut process is killed too; a stopped one goes on otherwise."""


Trouble = Abort | Resume | Loss | Migration | Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine of the fuzz, or two between which requests move."""

    seed: int
    number: int
    world: World
    engines: tuple[EngineSetup, ...]
    entries: tuple[Entry, ...]
    troubles: tuple[Trouble, ...]


_CASE: TypeAdapter[Case] = TypeAdapter(Case)


def engine_config(world: World, setup: EngineSetup, *, folder: Path) -> EngineConfig:
    """Returns the engine's configuration; `folder`: the model's folder."""
    head = None if world.head is None else folder / world.head
    return EngineConfig(
        model=ModelConfig(
            path=folder, head=head, dtype=world.dtype, numerics="invariant", device=world.device
        ),
        cache=CacheConfig(
            page_size=world.page_size,
            kv_cache_dtype=world.kv_cache_dtype,
            num_pages=setup.num_pages,
            prefix_caching=setup.prefix_caching,
        ),
        scheduler=setup.scheduler,
        speculation=setup.speculation,
        parallel=ParallelConfig(
            draft_tensor_parallel_size=world.draft_ranks,
            verify_tensor_parallel_size=world.verify_ranks,
            timeout_s=setup.link.timeout_s,
        ),
    )


def save_case(case: Case, file: Path) -> None:
    file.write_bytes(_CASE.dump_json(case, indent=1) + b"\n")


def load_case(file: Path) -> Case:
    """Reads a case. Raises ConfigError for a file that is not a case."""
    try:
        return _CASE.validate_json(file.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{file}: found no case of the fuzz: {error}") from error
