"""Arguments and results of the actors' methods.

Values are frozen and travel between processes. Nothing here imports torch, which keeps pipeline
replicas small. An item of a token stream is either the emissions of one or more rounds or the error
that ended the stream: errors travel as values, because Ray wraps raised ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eesd_dist.errors import EesdError
from eesd_dist.routing.activity import NO_ACTIVITY, Activity
from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.schedule.kv_pages import KvRoom
from eesd_dist.schedule.page_leases import Backend
from eesd_dist.telemetry.logs import LogFormat
from eesd_dist.telemetry.tracing_options import TracingOptions
from eesd_dist.transport.authentication.handshake import Address as Address
from eesd_dist.types import Emission, Outcome, RecorderCounts, RequestId

StageName = Literal["draft", "verify"]
PlacementMode = Literal["dedicated", "shared"]
"""`dedicated`: the drafting actor has draft rank 0 alone; `shared`: verify rank 0 too."""

StreamItem = tuple[Emission, ...] | EesdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Membership epoch of a pipeline's ranks. Messages of an older one are ignored."""

    number: int
    store: Address
    num_verify_ranks: int
    timeout_s: float
    num_pages: int
    """KV pages of each rank: the same in every epoch of a pipeline."""
    num_draft_ranks: int = 1
    """The drafting actor included."""
    is_degraded: bool = False
    """The draft ranks run in the verify ranks' processes, without drafting. Rows go through the
    host; each stage still has its own group on the GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """The process behind an actor."""

    pid: int
    host: str
    node_id: str
    actor_id: str = ""
    """Ray's, unique to the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Progress of loading a rank's weights, and the memory used."""

    bytes_done: int
    bytes_total: int
    module: str
    """The last piece loaded: a layer, the embedding or the LM head; empty before the first."""
    seconds: float
    waited_s: float
    """Part of `seconds` in which packing waited for a piece to be read."""
    peak_memory_bytes: int
    """Peak of the process since its start, mapped files included."""

    @property
    def is_over(self) -> bool:
        return self.bytes_done == self.bytes_total

    @property
    def told(self) -> str:
        """The progress as text, like `43 % (12.0 of 28.0 GB)`."""
        share = self.bytes_done / self.bytes_total if self.bytes_total else 1.0
        done, total = self.bytes_done / 1e9, self.bytes_total / 1e9
        return f"{share:.0%} ({done:.1f} of {total:.1f} GB)".replace("%", " %", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """Report of a rank about itself once its weights are in memory."""

    weights: str
    """Digest of the target's files, taken when they were read."""
    products: str
    """Name of the products that decide the last bits; empty for `numerics: fast`."""
    room: KvRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Batch of a client's unread items."""

    outbox: str
    """A new name means that the streams of the earlier one have ended, since nothing read them."""
    number: int
    """Counts the batches of this outbox; the next call confirms it."""
    items: tuple[tuple[RequestId, int, StreamItem], ...]
    """Request, submission and what it has to read, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Identity of a worker, for a supervisor that did not start it."""

    app: str
    pipeline: str
    slot: str
    digest: str
    """Digest of the configuration that it was started with."""
    bundle: str = ""
    """Name of the slot with the bundle it runs in; empty: its own."""
    mode: PlacementMode = "dedicated"
    """Mode of its pipeline, which the cluster's GPUs may have decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """A worker's state, for a supervisor that may claim it."""

    identity: WorkerIdentity
    owner: str
    """Supervisor of the worker; empty if it never had one."""
    process_info: ProcessInfo
    epoch: int
    """The epoch that it is in; 0: none."""
    newest_epoch: int
    """The newest that it was ever to join; it joins none with a lower number."""
    is_degraded: bool
    """True if its epoch has fallbacks; only verify ranks know."""
    num_pages: int = 0
    """KV pages of its latest epoch; 0 before the first."""
    head: str = ""
    """Folder of the exit head that it drafts with; empty for none."""
    start_s: float | None = None
    """Seconds that the pipeline took to start, as in its lease."""
    lease_s: float = 0.0
    left_s: float = 0.0
    """Seconds left of its lease; the worker then exits unless it is renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A supervisor's claim on a worker, for so long as it is renewed."""

    owner: str
    seconds: float
    start_s: float | None = None
    """Seconds that the pipeline took to start, for the supervisor after this one."""
    log_level: str = "INFO"
    """The level of the worker's log lines from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's answer to a heartbeat."""

    epoch: int
    """The epoch that it has joined; 0: none."""
    progress: int
    """Grows with every token, prompt row or round of its epoch; unchanged work is no progress."""
    is_busy: bool
    """True if it has work, so that its progress must grow."""
    has_computed: bool = False
    """True if its epoch has given a token or a prompt row so far; only of a drafting actor."""
    phase: str = ""
    """A long phase that it is in, such as loading; empty: none."""
    allowed_s: float = 0.0
    """Seconds that this phase may go without progress."""
    num_live: int = 0
    """Open streams; only of a drafting actor."""
    num_moved: int = 0
    """Grows with every chunk of pages that is migrated: that is progress too."""
    load: LoadReport | None = None
    """Progress of its weights; None before loading begins."""
    activity: Activity = NO_ACTIVITY
    """Activity of its engine; only of a drafting actor."""
    slow_kernels: tuple[str, ...] = ()
    """Kernels that failed their self-check in its process, so that slower ones run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEnd:
    """Reason why an actor's data-plane loop has ended; no error when it was stopped."""

    error: EesdError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """A drafting actor's counts, for status reports."""

    num_rounds: int
    last_round_unix_s: float
    """0 before the first round."""
    num_running: int
    num_waiting: int
    free_pages: int
    num_pages: int


class Admission(NamedTuple):
    """A new request, as the router gets to know it."""

    request_id: RequestId
    workload: str
    caller: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterNews:
    """A drafting actor's message to the router, covering a few rounds."""

    pipeline: str
    admitted: tuple[Admission, ...]
    outcomes: tuple[Outcome, ...]
    finished: tuple[RequestId, ...]
    priors_id: str | None = None
    """The id of the pools the sender has, as the router gave it; None asks for no pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAdvice:
    """The router's reply."""

    plans: Mapping[RequestId, DraftPlan]
    priors: Priors | None = None
    """Priors for new requests; None where the sender has them already, or did not ask."""
    priors_id: str = ""
    """Identifies these pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """The exit head that a pipeline drafts with."""

    folder: str
    sha256: str
    """Digest of its config, weights and calibration."""
    exit_layer: int
    kind: str
    pipeline: str = ""
    """Empty inside the pipeline itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReport:
    """Report of what a drafting actor's controllers work with."""

    head: HeadReport | None
    """None when nothing is drafted."""
    calibration: Mapping[str, object] | None
    cost: Mapping[str, object] | None
    """Seconds, as measured when the actor's engine was built."""
    recorder: RecorderCounts | None
    drafted_by_position: tuple[int, ...] = ()
    """Entry i: number of recent drafts with more than i tokens."""
    accepted_by_position: tuple[int, ...] = ()
    """Entry i: number of those in which token i was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Destinations of metrics and spans, the model's name in them, and the form of log lines."""

    model_name: str
    tracing: TracingOptions = field(default_factory=TracingOptions)
    log_format: LogFormat = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The store at which the ranks of two pipelines connect, in the receiving one."""

    number: str
    epoch: int
    store: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLink:
    """A connection from a rank to its peer rank, for all pages of one KV migration."""

    meeting: Meeting
    rank_name: str
    ends: tuple[str, str]
    """Names of the sender and the receiver."""
    end: Literal[0, 1]
    """This rank is the sender or the receiver."""
    backend: Backend
    timeout_s: float
    """Deadline of connecting; without a part for so long, the link is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A rank's end of a reservation: the pages that it sends over a link or receives."""

    link: str
    number: str
    """Number of the reservation."""
    epoch: int
    """The receiving pipeline's epoch when the reservation was made."""
    pages: tuple[int, ...]
    """Pages at this end, in the same order as at the other."""
    timeout_s: float
