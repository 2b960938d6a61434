"""The drafting actor: the round loop of one pipeline, and the streams its tokens leave by.

It keeps live requests across epochs: when a verify rank is replaced, their streams pause and
go on. It does not decide who belongs to an epoch (the pipeline does) and asks the router for
nothing it would wait for.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, EngineError, PeerLost
from eesd_dist.schedule.page_leases import KvLayout, PageLease, PageTraffic
from eesd_dist.types import Request, RequestId, RoundStats
from eesd_dist.workers.joining import Joining
from eesd_dist.workers.loop import LoopThread
from eesd_dist.workers.mailboxes import Mailboxes
from eesd_dist.workers.messages import (
    Address,
    ControlReport,
    DraftStats,
    Epoch,
    HeadReport,
    LoadReport,
    LoopEnd,
    PageLink,
    ProcessInfo,
    Reservation,
    RouterAdvice,
    RouterNews,
    StreamItem,
    TelemetryOptions,
)
from eesd_dist.workers.process import prepare_process, process_info, tracing_of
from eesd_dist.workers.roles import DraftEpoch, EpochLeader, StageFactory, StepLike
from eesd_dist.workers.router_client import Plans, RouterLink
from eesd_dist.workers.watch import DraftWatch

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.25
_ABORT_WAIT_S = 5.0
_NUM_EMPTY = 2
"""Turns in a row without a result: one may have begun a round, two say that there is none."""
_LEASE_MARGIN_S = 5.0
_NUM_CANCELLED = 256
"""More than have a cancellation and a submission on their way at the same time."""


class _RunningEpoch:
    """This actor's part in one epoch: the loop that turns rounds, and the way to stop it."""

    def __init__(self, part: DraftEpoch, *, name: str, deliver: Callable[[StepLike], None]) -> None:
        self.part = part
        self._deliver = deliver
        self._event_loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._halting = threading.Event()
        self.thread = LoopThread(self._turn, name=name)

    def _turn(self) -> None:
        num_empty = 0
        while not self._stopping.is_set():
            result = self.part.step(wait_s=_IDLE_WAIT_S)
            if result.rounds or result.emissions or result.finished:
                self._event_loop.call_soon_threadsafe(self._deliver, result)
                num_empty = 0
            elif self._halting.is_set():
                num_empty += 1
                if num_empty == _NUM_EMPTY:
                    return

    async def halt(self) -> bool:
        """Ends the loop when no round is under way any more; whether it has."""
        self._halting.set()
        return await self.thread.ended_within(_ABORT_WAIT_S)

    async def stop(self) -> bool:
        """Whether the loop has really ended."""
        self._stopping.set()
        self.part.abort()
        return await self.thread.ended_within(_ABORT_WAIT_S)


class _Connected:
    """Connected groups, until an epoch has them."""

    def __init__(self, leader: EpochLeader) -> None:
        self._leader = leader

    def abort(self) -> None:
        self._leader.disconnect()


class DraftActor:
    """One per pipeline. Its methods run in the actor's event loop, the rounds in a thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        stages: StageFactory,
        telemetry: TelemetryOptions,
        ask_router: Callable[[RouterNews], Awaitable[RouterAdvice]] | None = None,
    ) -> None:
        prepare_process()
        self._name = name
        tracing = tracing_of(telemetry, process=name)
        self._leader = stages.draft_leader(config, tracing)
        self._watch = DraftWatch(tracing, model_name=telemetry.model_name)
        self._mail = Mailboxes()
        self._joining = Joining(name=name)
        self._running: _RunningEpoch | None = None
        """None between epochs."""
        self._needs_new_engine = True
        self._dropped: set[RequestId] = set()
        """Requests whose reader left between epochs."""
        self._cancelled: deque[tuple[RequestId, int]] = deque(maxlen=_NUM_CANCELLED)
        """Submissions that were cancelled when they were not here: lately."""
        self._leases: set[asyncio.Task[None]] = set()
        """One for each reservation of another pipeline's pages."""
        self._num_rounds = 0
        self._last_round_unix_s = 0.0
        self._router: RouterLink | None = None
        if ask_router is not None:
            self._router = RouterLink(
                pipeline=name,
                ask=ask_router,
                apply=self._apply_plans,
                adopt=self._leader.adopt,
            )

    async def process_info(self) -> ProcessInfo:
        return process_info()

    async def forever(self) -> None:
        """Never returns: a pending call is how the pipeline learns that this process has died."""
        await asyncio.Event().wait()

    async def prepare(self, cost: Mapping[str, object] | None = None) -> None:
        """Loads its weights while there is no epoch for it; joining one then takes no load.
        With the `cost` that was measured here before, it takes no measuring either."""
        await asyncio.to_thread(lambda: self._leader.prepare(cost=cost))

    async def host_store(self) -> Address:
        return await asyncio.to_thread(self._leader.host_store)

    async def connect(self, epoch: Epoch) -> None:
        """First half of an epoch's start: while the verify ranks join and load."""

        def connect() -> _Connected:
            self._leader.connect(epoch)
            return _Connected(self._leader)

        await self._joining.enter(epoch, connect)

    async def join(self, epoch: Epoch) -> None:
        """Second half, when they are ready for rounds: starts turning them."""
        anew = self._needs_new_engine
        part = await self._joining.enter(epoch, lambda: self._leader.join(epoch, anew=anew))
        self._needs_new_engine = False
        while self._dropped:
            part.drop(self._dropped.pop())
        if self._router is not None:
            self._router.start()
        self._running = _RunningEpoch(
            part, name=f"drafting loop of {self._name}", deliver=self._deliver
        )
        logger.info("joined: pipeline=%s epoch=%d", self._name, epoch.number)

    async def ended(self) -> LoopEnd:
        """Waits for the end of the loop. Broken by a lost peer, live requests are kept; broken by
        anything else, the engine is not to be trusted: it is built anew, and they are let go."""
        running = self._running
        if running is None:
            return LoopEnd(error=None)
        end = await running.thread.end()
        if end.error is not None and not isinstance(end.error, PeerLost):
            self._needs_new_engine = True
            await self.evict(
                None, PeerLost(peer=self._name, operation="rounds", reason=str(end.error))
            )
        return end

    async def halt(self) -> bool:
        """Once its streams are let go: ends the rounds where no rank is in the middle of one. False
        when they do not end."""
        running = self._running
        return running is None or await running.halt()

    async def leave(self) -> bool:
        """Ends the part in this epoch; False when its loop, load or connecting cannot be
        stopped."""
        running = self._running
        self._running = None
        self._leader.disconnect()
        has_left = await self._joining.leave()
        return has_left and (running is None or await running.stop())

    async def submit(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        """The request's tokens as they leave, then nothing; or the error that ended them."""
        running = self._running
        if running is None or self._needs_new_engine:
            yield PeerLost(peer=self._name, operation="submit", reason="it is between two epochs")
            return
        request_id, submission = request.request_id, request.submission
        if (request_id, submission) in self._cancelled:  # its reader's last word overtook it
            yield EngineError(f"request {request_id} was cancelled")
            return
        earlier = self._mail.submission_of(request_id)
        if earlier is not None and earlier < submission:  # it has overtaken that one's last word
            await self.cancel(request_id, earlier)
        try:
            box = self._mail.open(request)
        except EesdError as error:
            yield error
            return
        is_admitted = is_over = False
        try:
            running.part.add(request)
            is_admitted = True
            self._watch.arrived(request)
            if self._router is not None:
                self._router.admitted(request_id, request.workload)
            while not is_over:
                item = await box.take()
                is_over = isinstance(item, EesdError) or item[-1].finish_reason is not None
                yield item
        except EesdError as error:
            is_over = True
            yield error
        finally:
            was_open = self._mail.close(request_id, submission)
            if request_id not in self._mail:  # else it has come again
                self._watch.left(request_id)
                if is_admitted and self._router is not None:
                    self._router.observed((), (request_id,))
            if was_open and not is_over:  # else whoever closed it has seen to that
                self._drop(request_id)

    async def cancel(self, request_id: RequestId, submission: int) -> None:
        """Frees what this submission of the request holds. Where there is none it may have ended,
        or is still to come: Ray keeps no order between calls whose arguments differ in size."""
        if self._mail.close(request_id, submission):
            self._drop(request_id)
        else:
            self._cancelled.append((request_id, submission))

    async def stats(self) -> DraftStats:
        running = self._running
        load = running.part.load() if running is not None else None
        return DraftStats(
            num_rounds=self._num_rounds,
            last_round_unix_s=self._last_round_unix_s,
            num_running=load.num_running if load else 0,
            num_waiting=load.num_waiting if load else 0,
            free_pages=load.free_pages if load else 0,
            num_pages=load.num_pages if load else 0,
        )

    async def metrics(self) -> bytes:
        """Prometheus' text, as of now."""
        running = self._running
        load = running.part.load() if running is not None else None
        return self._watch.page(load, recorder=self._leader.recorder_counts())

    async def rounds(self) -> tuple[RoundStats, ...]:
        """The latest rounds, oldest first."""
        return tuple(self._watch.rounds())

    async def loading(self) -> LoadReport | None:
        """How much of its weights it has read; None before it was told to."""
        return self._leader.loading.report()

    async def flush(self) -> None:
        """Sends spans and writes texts that still wait; before this process is taken down."""
        await asyncio.to_thread(self._watch.flush)
        await asyncio.to_thread(self._leader.flush)

    async def load_head(self, folder: str, sha256: str | None = None) -> HeadReport:
        """Another exit head drafts from the next round on; no stream is interrupted. `sha256` is
        its digest where the other draft ranks have read it.

        Raises CheckpointError or ConfigError for one that does not fit; the old one goes on.
        """
        await asyncio.to_thread(lambda: self._leader.load_head(folder, sha256=sha256))
        head = (await self.control()).head
        assert head is not None, "it has just been loaded"
        return head

    async def control(self) -> ControlReport:
        """What the controllers go by, and how the latest drafts fared."""
        report = await asyncio.to_thread(self._leader.control)
        drafted, accepted = self._watch.acceptance()
        return replace(report, drafted_by_position=drafted, accepted_by_position=accepted)

    # -- KV migration; the pipeline decides, see serve_app.pipeline.kv_migration ------------------

    async def kv_layout(self) -> KvLayout:
        """What another pipeline has to agree in before pages may go to and fro."""
        return await asyncio.to_thread(lambda: self._leader.pages.layout())

    async def lease_pages(
        self, request_ids: Collection[RequestId] | None, timeout_s: float
    ) -> PageLease:
        """Live requests' full pages (None: of all) stay as they are; their streams go on.

        A caller who is never heard of again loses the lease, not before its reservation's own
        lease.
        """
        return await asyncio.shield(self._lease(request_ids, timeout_s=timeout_s))

    async def _lease(
        self, request_ids: Collection[RequestId] | None, *, timeout_s: float
    ) -> PageLease:
        lease = await asyncio.to_thread(lambda: self._leader.sharing.lease(request_ids))
        self._keep(self._expire_lease(lease.number, after_s=4 * timeout_s + _LEASE_MARGIN_S))
        return lease

    async def return_pages(self, number: str) -> bool:
        """Whether they held the same all the while. Between two epochs nobody knows: in the
        verify ranks others may be writing, for whom these pages are free."""
        held = await asyncio.to_thread(lambda: self._leader.sharing.end_lease(number))
        return held and self._running is not None

    async def reserve_pages(self, lease: PageLease, timeout_s: float) -> Reservation:
        """Room for another pipeline's pages; a caller who is never heard of again loses it.

        A rank has `timeout_s` to join its peer rank and as long again to write. When nobody has
        adopted or abandoned the pages after that, nobody writes into them any more.
        """
        return await asyncio.shield(self._reserve(lease, timeout_s=timeout_s))

    async def _reserve(self, lease: PageLease, *, timeout_s: float) -> Reservation:
        reservation = await asyncio.to_thread(
            lambda: self._leader.sharing.reserve(lease, timeout_s=timeout_s)
        )
        self._keep(self._expire_reservation(reservation.pages.number, timeout_s=timeout_s))
        return reservation

    async def adopt_pages(self, number: str) -> bool:
        """Every rank has written its part: whoever comes now finds the pages."""
        return await asyncio.to_thread(lambda: self._leader.sharing.adopt(number))

    async def abandon_pages(self, number: str) -> None:
        """Every rank's `receive_pages` has ended, one way or the other."""
        await asyncio.to_thread(lambda: self._leader.sharing.abandon(number))

    async def send_pages(self, link: PageLink) -> PageTraffic:
        return await asyncio.to_thread(lambda: self._leader.pages.send(link))

    async def receive_pages(self, link: PageLink) -> PageTraffic:
        return await asyncio.to_thread(lambda: self._leader.pages.receive(link))

    async def evict(self, request_ids: Collection[RequestId] | None, error: EesdError) -> int:
        """Ends these streams (None: all) with word of where they go on, or why they cannot go on
        here; returns how many."""
        moved = [r for r in self._mail.names() if request_ids is None or r in request_ids]
        for request_id in moved:
            self._mail.fail(request_id, error)
            self._watch.sent_on(request_id)
            self._drop(request_id)
        return len(moved)

    def _keep(self, lease: Coroutine[Any, Any, None]) -> None:
        self._leases.add(task := asyncio.ensure_future(lease))
        task.add_done_callback(self._leases.discard)

    async def _expire_lease(self, number: str, *, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with suppress(EngineError):  # an engine that is being built has leased nothing
            await self.return_pages(number)

    async def _expire_reservation(self, number: str, *, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        await asyncio.to_thread(lambda: self._leader.sharing.close(number))
        await asyncio.sleep(2 * timeout_s + _LEASE_MARGIN_S)
        with suppress(EngineError):  # an engine that is being built has no reservations
            await self.abandon_pages(number)

    def _drop(self, request_id: RequestId) -> None:
        if self._running is None:
            self._dropped.add(request_id)
        else:
            self._running.part.drop(request_id)

    def _apply_plans(self, plans: Plans) -> None:
        if self._running is not None:
            self._running.part.apply_plans(plans)

    def _deliver(self, result: StepLike) -> None:
        late = self._mail.deliver(result.emissions)
        if result.rounds:
            self._num_rounds += len(result.rounds)
            self._last_round_unix_s = time.time()
        if self._router is not None:
            # An outcome of one that has left meanwhile would bring it back to the router.
            read = [
                outcome
                for outcome in result.outcomes
                if outcome.request_id in self._mail and outcome.request_id not in late
            ]
            self._router.observed(read, [name for name in result.finished if name not in late])
        self._watch.saw(result, late=late)
