"""The roles that a worker process may take, and what builds them.

Every protocol here has two implementations: the model's stages (`draft_leader`, `draft_follower`,
`verify_worker`) and the toys of the tests. Nothing here imports torch.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from eesd_dist.config import EngineConfig
from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.schedule.page_leases import KvLayout, PageLease, PageReservation, PageTraffic
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.types import Emission, Outcome, RecorderCounts, Request, RequestId, RoundStats
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.messages import (
    Address,
    ControlReport,
    Epoch,
    LoadedRank,
    Meeting,
    PageLink,
    PagePart,
)

if TYPE_CHECKING:
    from eesd_dist.engine.recording.text_features import TextFeatures
    from eesd_dist.telemetry.tracing import Tracing


class PageTransfer(Protocol):
    """A rank's KV pages in a migration. Calls may take a while and disturb no round.

    Each raises EngineError while the rank has no pages yet.
    """

    @property
    def num_moved(self) -> int:
        """Chunks that were read or written so far."""
        ...

    def layout(self) -> KvLayout: ...
    def open(self, link: PageLink) -> None:
        """Connects to the peer rank. The link closes by itself when it is not used."""
        ...

    def send(self, share: PagePart) -> PageTraffic: ...
    def receive(self, share: PagePart) -> PageTraffic: ...
    def close(self, link: str) -> None: ...


class PageSource(Protocol):
    """The source pipeline's side of a KV migration."""

    def lease(self, request_ids: Collection[RequestId] | None, *, lasts_s: float) -> PageLease: ...
    def end_lease(self, number: str) -> bool:
        """Returns whether the pages held the same content during the whole lease."""
        ...


class PageTarget(Protocol):
    """The target pipeline's side of a KV migration."""

    def meet(self, *, lasts_s: float) -> Meeting:
        """Opens a store for ranks to connect."""
        ...

    def num_missing(self, lease: PageLease) -> Mapping[RequestId, int]:
        """Returns for each leased request how many of its pages are not here."""
        ...

    def reserve(self, lease: PageLease, *, limit: int, lasts_s: float) -> PageReservation: ...
    def adopt(self, number: str) -> bool:
        """Returns whether the pages can be found now; False when their reservation was voided."""
        ...

    def abandon(self, number: str) -> None:
        """Frees reserved pages; only when no rank can be writing into them any more."""
        ...


class PageSharing(PageSource, PageTarget, Protocol):
    """Both sides. Each call raises EngineError while there is no engine."""

    def expire(self) -> None:
        """Ends what has lasted longer than it may. Call once in a while."""
        ...


class StepLike(Protocol):
    """Result of one turn of the round loop."""

    @property
    def emissions(self) -> tuple[Emission, ...]: ...
    @property
    def rounds(self) -> tuple[RoundStats, ...]: ...
    @property
    def outcomes(self) -> tuple[Outcome, ...]: ...
    @property
    def finished(self) -> tuple[RequestId, ...]: ...
    @property
    def awaits_masks(self) -> bool:
        """True if nothing could run before a mask was there."""
        ...

    @property
    def features(self) -> "tuple[TextFeatures, ...]":
        """Features of ended texts that an operator has asked for."""
        ...


class LoadLike(Protocol):
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_prompt_tokens(self) -> int: ...


class EngineRequestsLike(Protocol):
    """The requests of a running engine. From any thread."""

    def add(self, request: Request) -> None: ...
    def drop(self, request_id: RequestId) -> None: ...
    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None: ...
    def load(self) -> LoadLike: ...


class DraftEpoch(EngineRequestsLike, Protocol):
    """The drafting actor's part of one epoch."""

    def step(self, *, wait_s: float) -> StepLike: ...
    def abort(self) -> None:
        """Makes a blocked `step` raise at once, from another thread."""
        ...


class RankEpoch(Protocol):
    """The part of a verify rank or a draft follower in one epoch."""

    def run(self) -> None:
        """Blocks in the loop; returns when the drafting actor has closed the channel."""
        ...

    def number(self) -> int | None:
        """Returns the round or command it is in; None while it waits for the next. From any
        thread."""
        ...

    def abort(self) -> None: ...


class DraftControl(Protocol):
    """Calls to draft rank 0 that are allowed while rounds go on."""

    def adopt(self, priors: Priors) -> None:
        """Sets the priors of new requests until the router has answered for them."""
        ...

    def load_head(self, folder: str, *, sha256: str | None = None) -> None:
        """Drafts with this exit head from the next round on, and in every later engine.

        `sha256` is its digest as the other draft ranks have read it; None where there are none.
        Raises CheckpointError or ConfigError, and keeps the old head, when it does not fit.
        """
        ...

    def control(self) -> ControlReport:
        """Returns what the controllers work with. Slow the first time: reads the head's files."""
        ...

    def recorder_counts(self) -> RecorderCounts | None:
        """Returns the recorder's counts; None where nothing is recorded."""
        ...

    def flush(self) -> None:
        """Writes pending recordings; call before ending the process."""
        ...


class EpochLeader(Protocol):
    """Draft rank 0 between epochs."""

    def compile_grammar(self, grammar: str) -> None:
        """Compiles a grammar that requests with it need, unless it is kept. From any thread.

        Raises RequestError for one that cannot be used.
        """
        ...

    def load_vocabulary(self) -> None:
        """Reads the tokenizer, for which the first grammar would wait. From any thread."""
        ...

    def host_store(self) -> Address:
        """Opens a new rendezvous store in this process and closes the one before."""
        ...

    def prepare(self, *, cost: Mapping[str, object] | None = None) -> LoadedRank:
        """Loads the weights before there is an epoch to join, unless they are loaded.

        `cost` is the cost model that the engine would measure, where it is known. Raises
        CheckpointError or ConfigError.
        """
        ...

    def connect(self, epoch: Epoch) -> None:
        """Opens the connections; verify rank 0 opens its end at the same time."""
        ...

    def join(self, epoch: Epoch, *, new_engine: bool) -> DraftEpoch:
        """Starts the engine on the connected groups, once every verify rank is ready for rounds.

        Live requests are kept and recomputed from their tokens, unless a new engine is asked for
        (`new_engine`).
        """
        ...

    def disconnect(self) -> None:
        """Ends connections that are being opened or that no epoch uses. From any thread."""
        ...


class DraftLeader(EpochLeader, DraftControl, Protocol):
    """Draft rank 0: the engine, its pages, its exit head."""

    @property
    def head_folder(self) -> str: ...
    @property
    def pages(self) -> PageTransfer: ...
    @property
    def sharing(self) -> PageSharing: ...
    @property
    def refusals(self) -> RefusedConnections: ...
    @property
    def loading(self) -> LoadWatch: ...


class RankWorker(Protocol):
    """A rank that follows: a verify rank, or a draft rank other than 0."""

    @property
    def pages(self) -> PageTransfer: ...
    @property
    def loading(self) -> LoadWatch: ...
    def prepare(self) -> LoadedRank:
        """Loads the weights before there is an epoch to join, unless they are loaded.

        Raises CheckpointError or ConfigError.
        """
        ...

    def join(self, epoch: Epoch) -> RankEpoch: ...
    def disconnect(self) -> None:
        """Ends a join that waits for its peers. From any thread."""
        ...


class DraftFollower(RankWorker, Protocol):
    """A draft rank other than 0."""

    def load_head(self, folder: str) -> str:
        """Reads this rank's part of an exit head, and keeps it until the drafting actor's commands
        name it; returns its digest. Raises CheckpointError or ConfigError."""
        ...


class StageFactory(Protocol):
    """Builds the role of a process inside that process. Sent there by pickle."""

    def draft_leader(
        self, config: EngineConfig, tracing: "Tracing", *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        """`holds_verify_rank`: this process also has verify rank 0."""
        ...

    def draft_follower(
        self, config: EngineConfig, tracing: "Tracing", *, rank: int
    ) -> DraftFollower: ...
    def verify_worker(
        self, config: EngineConfig, tracing: "Tracing", *, rank: int
    ) -> RankWorker: ...
