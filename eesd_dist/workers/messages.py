"""What the actors are told, what they answer, and what they need to be given.

Values are frozen and travel between processes; nothing here imports torch, so that a pipeline
replica, which only watches and passes on, stays thin. An item of a token stream is either the
emissions of one or more rounds or the error that ended the stream: errors are handed over as
values, because a raised one would reach the other side wrapped in Ray's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eesd_dist.errors import EesdError
from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.schedule.page_leases import PageReservation
from eesd_dist.types import Emission, Outcome, RecorderCounts, RequestId

StageName = Literal["draft", "verify"]

StreamItem = tuple[Emission, ...] | EesdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a store listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One membership of a pipeline: who may talk to whom. A rank of an older one is ignored."""

    number: int
    store: Address
    num_verify_ranks: int
    timeout_s: float
    num_draft_ranks: int = 1
    """The drafting actor included."""
    shares_gpu: bool = False
    """Both stages on one GPU: rows go through the host, since NCCL wants a GPU for each rank."""
    is_degraded: bool = False
    """The draft ranks live in the verify ranks' processes, and draft nothing: rows go through the
    host, and each stage has its own group on the GPUs all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
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
    recorder: RecorderCounts | None
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
class Reservation:
    """Room in a pipeline for another one's pages, and where the two meet."""

    pages: PageReservation
    store: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLink:
    """One rank's end of a reservation: which of its pages go to its peer rank, or come from it."""

    number: str
    epoch: int
    """The receiving pipeline's, when it made room."""
    store: Address
    rank_name: str
    ends: tuple[str, str]
    """Names of the sender and the receiver."""
    pages: tuple[int, ...]
    """This end's, in the order that both ends keep."""
    timeout_s: float
