"""What the actors are told, what they answer, and what they need to be given.

Values are frozen and travel between processes; nothing here imports torch, so that a pipeline
replica, which only watches and passes on, stays thin. An item of a token stream is either the
emissions of one or more rounds or the error that ended the stream: errors are handed over as
values, because a raised one would reach the other side wrapped in Ray's own.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError
from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.schedule.lending import KvLayout, PageLanding, PageLoan, PageTraffic
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Emission, Outcome, Request, RequestId, RoundStats, SpoolCounts

StageName = Literal["draft", "verify"]

StreamItem = tuple[Emission, ...] | EesdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a store listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One membership of a pipeline: who may talk to whom. A rank of an older one is ignored."""

    number: int
    store: Address
    num_verify_ranks: int
    timeout_s: float
    num_draft_ranks: int = 1
    """The drafting actor included."""
    shares_gpu: bool = False
    """Both stages on one GPU: rows go through the host, since NCCL wants a GPU for each rank."""
    stands_in: bool = False
    """The draft ranks live in the verify ranks' processes, and draft nothing: rows go through the
    host, and each stage has its own group on the GPUs all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The process behind an actor."""

    pid: int
    host: str
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How much of its weights a rank has read, and what memory that took."""

    bytes_done: int
    bytes_total: int
    piece: str
    """Packed last: a layer, the embedding or the LM head; empty before the first."""
    seconds: float
    peak_memory_bytes: int
    """Of the process since it was started, mapped files included."""

    @property
    def is_over(self) -> bool:
        return self.bytes_done == self.bytes_total

    @property
    def told(self) -> str:
        """For people: `43 % (12.0 of 28.0 GB)`."""
        share = self.bytes_done / self.bytes_total if self.bytes_total else 1.0
        done, total = self.bytes_done / 1e9, self.bytes_total / 1e9
        return f"{share:.0%} ({done:.1f} of {total:.1f} GB)".replace("%", " %", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEnd:
    """Why an actor's data-plane loop has ended; no error when it was asked to."""

    error: EesdError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """A drafting actor's counts, for whoever watches."""

    num_rounds: int
    last_round_unix_s: float
    """0 before the first round."""
    num_running: int
    num_waiting: int
    free_pages: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterNews:
    """What the drafting actor tells the router, a few rounds at a time."""

    pipeline: str
    admitted: tuple[tuple[RequestId, str], ...]
    """Requests and their workload classes."""
    outcomes: tuple[Outcome, ...]
    finished: tuple[RequestId, ...]
    known_priors: str | None = None
    """Which pools the sender has, in the router's own words; None does not ask for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAdvice:
    """What the router answers."""

    plans: Mapping[RequestId, DraftPlan]
    priors: Priors | None = None
    """What to warm new requests with; None where the sender knows it already, or did not ask."""
    priors_id: str = ""
    """Which pools these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """The exit head that a pipeline drafts with."""

    folder: str
    sha256: str
    """Over its config, weights and calibration."""
    exit_layer: int
    kind: str
    pipeline: str = ""
    """Empty inside the pipeline itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReport:
    """What a drafting actor's controllers go by."""

    head: HeadReport | None
    """None drafts nothing."""
    calibration: Mapping[str, object] | None
    cost: Mapping[str, object] | None
    """Seconds, as measured when the actor's engine was built."""
    spool: SpoolCounts | None
    drafted_by_position: tuple[int, ...] = ()
    """Lately: drafts longer than so many tokens."""
    accepted_by_position: tuple[int, ...] = ()
    """Of those, the ones in which that token was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Who watches, and under which name."""

    model_name: str
    otlp_endpoint: str | None = None
    """OTLP over HTTP, when there is a collector."""
    trace_folder: str | None = None
    """Spans as files, when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Room in a pipeline for another one's pages, and where the two meet."""

    pages: PageLanding
    store: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLink:
    """One rank's end of a landing: which of its pages go to its like, or come from it."""

    number: str
    generation: int
    """The receiving pipeline's, when it made room."""
    store: Address
    post: str
    ends: tuple[str, str]
    """Names of the sender and the receiver."""
    pages: tuple[int, ...]
    """This end's, in the order that both ends keep."""
    timeout_s: float


class HandsPages(Protocol):
    """How an actor hands pages over; each call may take a while and none disturbs rounds.

    `layout`, `send` and `receive` are every rank's, the others the drafting actor's.
    """

    def layout(self) -> KvLayout: ...
    def lend(self, request_ids: Collection[RequestId] | None) -> PageLoan: ...
    def take_back(self, number: str) -> bool:
        """Whether what was lent held the same all the while."""
        ...

    def reserve(self, loan: PageLoan, *, timeout_s: float) -> Landing: ...
    def adopt(self, number: str) -> bool:
        """Whether the pages are findable now; False when their landing was voided."""
        ...

    def abandon(self, number: str) -> None:
        """Only when no rank can be writing into its pages any more."""
        ...

    def close(self, number: str) -> None:
        """Nobody joins a link of this landing any more."""
        ...

    def send(self, link: PageLink) -> PageTraffic: ...
    def receive(self, link: PageLink) -> PageTraffic: ...


class StepLike(Protocol):
    """One turn of the round loop, as the drafting actor reads it."""

    @property
    def emissions(self) -> tuple[Emission, ...]: ...
    @property
    def rounds(self) -> tuple[RoundStats, ...]: ...
    @property
    def outcomes(self) -> tuple[Outcome, ...]: ...
    @property
    def finished(self) -> tuple[RequestId, ...]: ...


class LoadLike(Protocol):
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def num_pages(self) -> int: ...


class DraftMember(Protocol):
    """The drafting actor's part of one generation."""

    def add(self, request: Request) -> None: ...
    def drop(self, request_id: RequestId) -> None: ...
    def step(self, *, wait_s: float) -> StepLike: ...
    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None: ...
    def load(self) -> LoadLike: ...

    def abort(self) -> None:
        """Makes a blocked `step` raise at once, from another thread."""
        ...


class RankMember(Protocol):
    """An obeying rank's part of one generation: a verify rank's, or a draft follower's."""

    def run(self) -> None:
        """The blocking loop; returns when the drafting actor has closed the channel."""
        ...

    def abort(self) -> None: ...


class Stages(Protocol):
    """What runs inside an actor: the model's stages, or a toy in their place."""

    def host_store(self) -> Address:
        """A fresh rendezvous store in this process; the one before it may go."""
        ...

    def prepare_draft(self, *, rank: int, cost: Mapping[str, object] | None = None) -> None:
        """Loads what this rank of the draft stage holds, before there is a generation to join; does
        nothing when it is there. `cost` is what the drafting actor's engine would measure, where
        that is known. Raises what a bad checkpoint raises."""
        ...

    def connect_draft(self, generation: Generation) -> None:
        """Opens the drafting actor's connection; verify rank 0 opens its end at the same time."""
        ...

    def disconnect(self) -> None:
        """Ends what is being connected, here or in a join, and what `connect_draft` has connected
        for no member yet. From any thread."""
        ...

    def join_draft(self, generation: Generation, *, anew: bool) -> DraftMember:
        """Takes the drafting part, once every verify rank is ready for rounds.

        Live requests of the generation before are kept and computed again from their tokens,
        unless everything is to be built `anew`.
        """
        ...

    def adopt(self, priors: Priors) -> None:
        """What new requests are warmed with before the router has answered for them."""
        ...

    def load_head(self, folder: str, *, sha256: str | None = None) -> None:
        """Drafts with this exit head from the next round on, and in every engine to come.

        `sha256` is its digest where the other draft ranks have read it; None: there are none.
        Raises CheckpointError or ConfigError, and goes on with the old one, when it does not fit.
        """
        ...

    def control(self) -> ControlReport:
        """May take a moment: a head's files are read once."""
        ...

    def spool_counts(self) -> SpoolCounts | None:
        """None where nothing is kept."""
        ...

    def pages(self) -> HandsPages:
        """Raises EngineError where there are none to hand over."""
        ...

    def loading(self) -> LoadReport | None:
        """Answers at any time, from another thread than the one that loads; None before."""
        ...

    def flush(self) -> None:
        """Writes what is still to be kept; before this process is taken down."""
        ...

    def load_head_part(self, folder: str) -> str:
        """Of a draft follower: reads its part of this exit head and keeps it aside, until the
        drafting actor's commands name it; returns its digest. Raises CheckpointError or
        ConfigError."""
        ...

    def join_verify(self, generation: Generation, *, rank: int) -> RankMember: ...

    def join_draft_follower(self, generation: Generation, *, rank: int) -> RankMember:
        """Rank `rank` of the draft stage; rank 0 is the drafting actor."""
        ...


StagesFactory = Callable[[EngineConfig, Tracing], Stages]
"""Called inside the actor's process; it must be importable by name."""
