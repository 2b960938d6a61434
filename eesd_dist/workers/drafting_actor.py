"""The drafting actor: the round loop of one pipeline, and the streams of its requests.

It gives its clients, the ingresses, what its rounds have made, and its supervisor a heartbeat: the
progress of the loop, which runs in a thread. Requests live for one epoch: when it ends, each stream
ends with the reason, and its ingress submits the request again, here or in another pipeline. The
actor never waits for the router.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eesd_dist.config import EngineConfig
from eesd_dist.errors import (
    EesdError,
    EngineError,
    PeerLost,
)
from eesd_dist.schedule.page_leases import PageLease, PageReservation
from eesd_dist.telemetry.span_records import SpanRecord
from eesd_dist.types import Request, RequestId, RoundStats
from eesd_dist.workers.epochs.loop import RoundLoop
from eesd_dist.workers.messages import (
    Address,
    ControlReport,
    Delivery,
    DraftStats,
    Epoch,
    HeadReport,
    LoadedRank,
    LoopEnd,
    Meeting,
    RouterAdvice,
    RouterNews,
    TelemetryOptions,
    Tenancy,
    WorkerStatus,
)
from eesd_dist.workers.process import prepare_process, tracing_of
from eesd_dist.workers.roles import EpochLeader, StageFactory
from eesd_dist.workers.router_client import Plans, RouterLink
from eesd_dist.workers.streams.outboxes import TAKE_WAIT_S
from eesd_dist.workers.streams.request_streams import RequestStreams
from eesd_dist.workers.tenure import Tenure
from eesd_dist.workers.watch import DraftWatch
from eesd_dist.workers.worker_actor import WorkerActor

if TYPE_CHECKING:
    from eesd_dist.engine.recording.text_features import TextFeatures

logger = logging.getLogger(__name__)

_UNREAD_S = 10.0
"""A client that reads nothing for so long has died, or has lost its streams."""
_LOOK_S = 1.0
_VOCABULARY_AFTER_S = 5.0
"""A request that needs the vocabulary earlier waits for it alone."""
_LEASE_MARGIN_S = 5.0


class _Connected:
    """The leader's connected groups, as something that `Joining` can abort."""

    def __init__(self, leader: EpochLeader) -> None:
        self._leader = leader

    def abort(self) -> None:
        self._leader.disconnect()


class DraftActor(WorkerActor):
    """Draft rank 0 of a pipeline, and verify rank 0 where stages share a process.

    Its methods run in the actor's event loop, rounds in a thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        stages: StageFactory,
        telemetry: TelemetryOptions,
        ask_router: Callable[[RouterNews], Awaitable[RouterAdvice]] | None = None,
        tenure: Callable[[], Tenure] | None = None,
        holds_verify_rank: bool = False,
    ) -> None:
        """`tenure` makes its lease; a fallback has none, and ends with its host.
        `holds_verify_rank`: verify rank 0 is in this process too."""
        prepare_process(telemetry.log_format)
        tracing = tracing_of(telemetry, process=name)
        self._leader = stages.draft_leader(config, tracing, holds_verify_rank=holds_verify_rank)
        lease = None if tenure is None else tenure()
        self._is_fallback = lease is None
        super().__init__(name=name, role=self._leader, tenure=lease)
        self._watch = DraftWatch(tracing, model_name=telemetry.model_name)
        self._streams = RequestStreams(
            name=lambda: self._name,
            max_waiting=config.scheduler.max_waiting,
            compile_grammar=self._leader.compile_grammar,
            watch=self._watch,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        """The expiry of page leases and reservations, and the look after clients."""
        self._is_looking = False
        self._has_vocabulary = False
        if ask_router is not None:
            self._streams.router = RouterLink(
                pipeline=name,
                ask=ask_router,
                apply=self._apply_plans,
                adopt=self._leader.adopt,
            )

    async def tenancy(self) -> Tenancy:
        """Returns what another supervisor needs to know to claim this worker."""
        return self._leased().tenancy(
            epoch=0 if self._streams.running is None else self._streams.running.epoch,
            newest_epoch=self._joining.newest,
            num_pages=self._joining.num_pages,
            is_degraded=False,
            head=self._leader.head_folder,
        )

    def _in_epoch(self) -> WorkerStatus | None:
        running = self._streams.running
        if running is None:
            return None
        load = running.draft_epoch.load()
        return WorkerStatus(
            epoch=running.epoch,
            progress=running.progress_of(has_work=load.num_running + load.num_waiting > 0),
            has_computed=running.has_computed,
            is_busy=True,
            num_live=len(self._streams.mail),
            activity=self._watch.activity(load),
        )

    async def prepare(self, cost: Mapping[str, object] | None = None) -> LoadedRank:
        """Loads the weights before there is an epoch to join, so that joining is fast, and returns
        what the ranks of a pipeline have to agree on. With a `cost` model measured before, joining
        measures none."""
        loaded = await asyncio.to_thread(lambda: self._leader.prepare(cost=cost))
        # A fallback lives in the process of a verify rank, which has to go on.
        if not (self._is_fallback or self._has_vocabulary):
            self._has_vocabulary = True
            self._keep(self._load_vocabulary())
        return loaded

    async def _load_vocabulary(self) -> None:
        """Reads what grammars need before the first request has one. It imports libraries for
        seconds, which no recovery should wait for."""
        await asyncio.sleep(_VOCABULARY_AFTER_S)
        await asyncio.to_thread(self._leader.load_vocabulary)

    async def host_store(self) -> Address:
        return await asyncio.to_thread(self._leader.host_store)

    async def connect(self, epoch: Epoch) -> None:
        """Opens the epoch's connections while the verify ranks join and load."""

        def connect() -> _Connected:
            self._leader.connect(epoch)
            return _Connected(self._leader)

        await self._joining.enter(epoch, connect)

    async def join(self, epoch: Epoch) -> None:
        """Starts the round loop, once the verify ranks are ready for rounds."""
        new_engine = self._streams.needs_new_engine
        draft_epoch = await self._joining.enter(
            epoch, lambda: self._leader.join(epoch, new_engine=new_engine)
        )
        self._streams.needs_new_engine = False
        self._streams.drop_from(draft_epoch)
        if self._streams.router is not None:
            self._streams.router.start()
        if not self._is_looking:
            self._is_looking = True
            self._keep(self._look_after_clients())
            self._keep(self._expire_pages())
        self._streams.running = RoundLoop(
            draft_epoch,
            epoch=epoch.number,
            name=f"drafting loop of {self._name}",
            deliver=self._streams.deliver,
        )
        logger.info("joined: pipeline=%s epoch=%d", self._name, epoch.number)

    async def ended(self) -> LoopEnd:
        """Waits for the end of the loop. After any error but a lost peer the next epoch gets a new
        engine."""
        running = self._streams.running
        if running is None:
            return LoopEnd(error=None)
        end = await running.thread.end()
        if end.error is not None and not isinstance(end.error, PeerLost):
            self._streams.needs_new_engine = True
        return end

    async def halt(self) -> bool:
        """Ends the loop between two rounds; call when all streams are evicted. Returns False when
        the loop does not end."""
        running = self._streams.running
        return running is None or await running.halt()

    async def leave(self, trouble: EesdError | None = None, is_crash: bool = False) -> bool:
        """Leaves the epoch; its streams end with the `trouble` that broke it. With `is_crash` it
        counts against the requests that were in the engine.

        Returns False when the loop, a load or connecting does not stop.
        """
        running = self._streams.running
        self._streams.running = None
        self._leader.disconnect()
        self._streams.end_all(trouble or EngineError("its epoch is over"), is_crash=is_crash)
        has_left = await self._joining.leave()
        return has_left and (running is None or await running.stop())

    async def submit(self, request: Request, client: str) -> None:
        """Takes a request; `take` of this client returns its emissions, and the error that ends it
        if it is refused."""
        await self._streams.submit(request, client)

    async def text_features(self, request: Request) -> "TextFeatures":
        """Generates a text as a whole, and returns it with the features of its rows.

        For operators: no ingress calls it. Raises RequestError for features that cannot be, and
        CapacityError or PeerLost where the text cannot be generated now: ask again.
        """
        return await self._streams.text_features(request)

    async def num_kept(self, request_id: RequestId) -> int | None:
        """Returns how many tokens of a stream are kept for a client that resumes it; None: it is
        not known here."""
        return self._streams.mail.kept.num_tokens(request_id)

    async def take(self, client: str, last: tuple[str, int]) -> Delivery:
        """Returns what the client's streams have to read, as soon as something is due.

        `last` are outbox and number of the last batch that the client has: a later one is sent
        again. The batch is empty after two seconds without news. Streams of a client that does not
        read are ended.
        """
        return await self._streams.mail.take(client, last=last, wait_s=TAKE_WAIT_S)

    async def cancel(self, request_id: RequestId, submission: int) -> None:
        """Ends this submission of the request and frees its resources. If it is not here, it has
        ended or is yet to arrive: Ray may reorder calls with arguments of different size."""
        self._streams.cancel(request_id, submission)

    async def _look_after_clients(self) -> None:
        """Ends the streams of clients that have died: nothing else tells this process."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if num_unread := self._streams.end_unread(after_s=_UNREAD_S, passed_s=_LOOK_S):
                logger.warning(
                    "unread streams ended: pipeline=%s streams=%d", self._name, num_unread
                )

    async def _expire_pages(self) -> None:
        """Ends page leases and reservations of KV migrations that do not go on."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with suppress(EngineError):  # while an engine is being built nothing is held
                await asyncio.to_thread(self._leader.sharing.expire)

    async def live(self) -> tuple[RequestId, ...]:
        """Returns the requests with an open stream."""
        return self._streams.mail.names()

    async def stats(self) -> DraftStats:
        running = self._streams.running
        load = running.draft_epoch.load() if running is not None else None
        return DraftStats(
            num_rounds=self._streams.num_rounds,
            last_round_unix_s=self._streams.last_round_unix_s,
            num_running=load.num_running if load else 0,
            num_waiting=load.num_waiting if load else 0,
            free_pages=load.free_pages if load else 0,
            num_pages=load.num_pages if load else 0,
        )

    async def metrics(self) -> bytes:
        """Returns the present metrics in Prometheus' text format."""
        running = self._streams.running
        load = running.draft_epoch.load() if running is not None else None
        return self._watch.page(
            load,
            recorder=self._leader.recorder_counts(),
            num_refusals=self._leader.refusals.num_refused,
        )

    async def rounds(self) -> tuple[RoundStats, ...]:
        """Returns statistics of the latest rounds, oldest first."""
        return tuple(self._watch.rounds())

    async def spans(self, trace_ids: Collection[str]) -> tuple[SpanRecord, ...]:
        """Returns the spans of these traces that are kept here."""
        return self._watch.kept_spans(trace_ids)

    async def flush(self) -> None:
        """Sends pending spans and writes pending recordings; call before ending the process."""
        await asyncio.to_thread(self._watch.flush)
        await asyncio.to_thread(self._leader.flush)

    async def load_head(self, folder: str, sha256: str | None = None) -> HeadReport:
        """Drafts with another exit head from the next round on; no stream is interrupted. `sha256`
        is its digest where the other draft ranks have read it.

        Raises CheckpointError or ConfigError for one that does not fit, and keeps the old one.
        """
        await asyncio.to_thread(lambda: self._leader.load_head(folder, sha256=sha256))
        head = (await self.control()).head
        assert head is not None, "it has just been loaded"
        return head

    async def control(self) -> ControlReport:
        """Returns what the controllers work with, and the acceptance of the latest drafts."""
        report = await asyncio.to_thread(self._leader.control)
        drafted, accepted = self._watch.acceptance()
        return replace(report, drafted_by_position=drafted, accepted_by_position=accepted)

    async def lease_pages(
        self, request_ids: Collection[RequestId] | None, timeout_s: float
    ) -> PageLease:
        """Leases the full pages of live requests (None: of all); their streams go on.

        A lease that is not returned expires, later than the reservation it serves.
        """
        lasts_s = 3 * timeout_s + _LEASE_MARGIN_S
        return await asyncio.to_thread(
            lambda: self._leader.sharing.lease(request_ids, lasts_s=lasts_s)
        )

    async def return_pages(self, number: str) -> bool:
        """Returns whether the pages held the same content during the whole lease. False between
        epochs: verify ranks may have overwritten the pages."""
        held = await asyncio.to_thread(lambda: self._leader.sharing.end_lease(number))
        return held and self._streams.running is not None

    async def meet(self, timeout_s: float) -> Meeting:
        """Opens a store at which ranks of two pipelines can connect for so long."""
        return await asyncio.to_thread(lambda: self._leader.sharing.meet(lasts_s=timeout_s))

    async def missing_pages(self, lease: PageLease) -> Mapping[RequestId, int]:
        """Returns for each leased request how many of its pages are not here."""
        return await asyncio.to_thread(lambda: self._leader.sharing.num_missing(lease))

    async def reserve_pages(
        self, lease: PageLease, limit: int, timeout_s: float
    ) -> PageReservation:
        """Reserves room for so many of another pipeline's pages.

        A rank begins to write within `timeout_s`, or has closed its link, and ends within
        `timeout_s`. A reservation that is neither adopted nor abandoned expires after that.
        """
        lasts_s = 2 * timeout_s + _LEASE_MARGIN_S
        return await asyncio.to_thread(
            lambda: self._leader.sharing.reserve(lease, limit=limit, lasts_s=lasts_s)
        )

    async def adopt_pages(self, number: str) -> bool:
        """Makes reserved pages findable; call when every rank has written its part."""
        return await asyncio.to_thread(lambda: self._leader.sharing.adopt(number))

    async def abandon_pages(self, number: str) -> None:
        """Frees reserved pages; call when every rank's `receive_pages` has ended."""
        await asyncio.to_thread(lambda: self._leader.sharing.abandon(number))

    async def evict(self, request_ids: Collection[RequestId] | None, error: EesdError) -> int:
        """Ends these streams (None: all) with `error`, which says where they continue or why they
        cannot continue here; returns how many."""
        return self._streams.evict(request_ids, error)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    def _apply_plans(self, plans: Plans) -> None:
        if self._streams.running is not None:
            self._streams.running.draft_epoch.apply_plans(plans)
