"""The drafting actor: the round loop of one pipeline, and the streams its tokens leave by.

It keeps live requests across generations: when a verify rank is replaced, their streams pause and
go on. It does not decide who belongs to a generation (the pipeline does) and asks the router for
nothing it would wait for.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from eesd_dist.actors.contracts import (
    Address,
    ControlReport,
    DraftMember,
    DraftStats,
    Generation,
    HeadReport,
    LoopEnd,
    RouterAdvice,
    RouterNews,
    StagesFactory,
    StepLike,
    StreamItem,
    TelemetryOptions,
    Whereabouts,
)
from eesd_dist.actors.joining import Joining
from eesd_dist.actors.loop import LoopThread
from eesd_dist.actors.mailboxes import Mailboxes
from eesd_dist.actors.process import prepare_process, tracing_of, whereabouts
from eesd_dist.actors.router_link import Plans, RouterLink
from eesd_dist.actors.watch import DraftWatch
from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, PeerLost
from eesd_dist.types import Request, RequestId, RoundStats

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.25
_ABORT_WAIT_S = 5.0


class _Membership:
    """This actor's part in one generation: the loop that turns rounds, and the way to stop it."""

    def __init__(
        self, member: DraftMember, *, name: str, deliver: Callable[[StepLike], None]
    ) -> None:
        self.member = member
        self._deliver = deliver
        self._event_loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self.thread = LoopThread(self._turn, name=name)

    def _turn(self) -> None:
        while not self._stopping.is_set():
            result = self.member.step(wait_s=_IDLE_WAIT_S)
            if result.rounds or result.emissions or result.finished:
                self._event_loop.call_soon_threadsafe(self._deliver, result)

    async def stop(self) -> bool:
        """Whether the loop has really ended."""
        self._stopping.set()
        self.member.abort()
        return await self.thread.ended_within(_ABORT_WAIT_S)


class DraftActor:
    """One per pipeline. Its methods run in the actor's event loop, the rounds in a thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        stages: StagesFactory,
        telemetry: TelemetryOptions,
        ask_router: Callable[[RouterNews], Awaitable[RouterAdvice]] | None = None,
    ) -> None:
        prepare_process()
        self._name = name
        tracing = tracing_of(telemetry, process=name)
        self._stages = stages(config, tracing)
        self._watch = DraftWatch(tracing, model_name=telemetry.model_name)
        self._mail = Mailboxes()
        self._joining = Joining(name=name)
        self._membership: _Membership | None = None
        """None between generations."""
        self._needs_new_engine = True
        self._dropped: set[RequestId] = set()
        """Requests whose reader left between generations."""
        self._num_rounds = 0
        self._last_round_unix_s = 0.0
        self._router: RouterLink | None = None
        if ask_router is not None:
            self._router = RouterLink(
                pipeline=name,
                ask=ask_router,
                apply=self._apply_plans,
                adopt=self._stages.adopt,
            )

    async def whereabouts(self) -> Whereabouts:
        return whereabouts()

    async def forever(self) -> None:
        """Never returns: a pending call is how the pipeline learns that this process has died."""
        await asyncio.Event().wait()

    async def host_store(self) -> Address:
        return await asyncio.to_thread(self._stages.host_store)

    async def connect(self, generation: Generation) -> None:
        """First half of a generation's start: while the verify ranks join and load."""
        await asyncio.to_thread(self._stages.connect_draft, generation)

    async def join(self, generation: Generation) -> None:
        """Second half, when they are ready for rounds: starts turning them."""
        anew = self._needs_new_engine
        member = await self._joining.enter(
            generation, lambda: self._stages.join_draft(generation, anew=anew)
        )
        self._needs_new_engine = False
        while self._dropped:
            member.drop(self._dropped.pop())
        if self._router is not None:
            self._router.start()
        self._membership = _Membership(
            member, name=f"drafting loop of {self._name}", deliver=self._deliver
        )
        logger.info("joined: pipeline=%s generation=%d", self._name, generation.number)

    async def ended(self) -> LoopEnd:
        """Waits for the end of the loop. Broken by a lost peer, live requests are kept; broken by
        anything else, they are failed, since one of them may be what broke it."""
        membership = self._membership
        if membership is None:
            return LoopEnd(error=None)
        end = await membership.thread.end()
        if end.error is not None and not isinstance(end.error, PeerLost):
            self._needs_new_engine = True
            self._mail.fail_all(end.error)
        return end

    async def leave(self) -> bool:
        """Ends the part in this generation; False when its loop or load cannot be stopped."""
        membership = self._membership
        self._membership = None
        has_left = await self._joining.leave()
        return has_left and (membership is None or await membership.stop())

    async def fail_all(self, error: EesdError) -> None:
        """Ends every live stream with one clear error and starts anew at the next join."""
        self._needs_new_engine = True
        self._mail.fail_all(error)

    async def submit(self, request: Request) -> AsyncIterator[StreamItem]:
        """The request's tokens as they leave, then nothing; or the error that ended them."""
        membership = self._membership
        if membership is None or self._needs_new_engine:
            yield PeerLost(
                peer=self._name, operation="submit", reason="it is between two generations"
            )
            return
        request_id = request.request_id
        try:
            box = self._mail.open(request_id)
        except EesdError as error:
            yield error
            return
        is_admitted = is_over = False
        try:
            membership.member.add(request)
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
            self._mail.close(request_id)
            self._watch.left(request_id)
            if is_admitted and self._router is not None:
                self._router.observed((), (request_id,))
            if not is_over:
                self._drop(request_id)

    async def cancel(self, request_id: RequestId) -> None:
        """Frees what the request holds; unknown ids are ignored."""
        self._mail.close(request_id)
        self._drop(request_id)

    async def stats(self) -> DraftStats:
        membership = self._membership
        load = membership.member.load() if membership is not None else None
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
        membership = self._membership
        load = membership.member.load() if membership is not None else None
        return self._watch.page(load, spool=self._stages.spool_counts())

    async def rounds(self) -> tuple[RoundStats, ...]:
        """The latest rounds, oldest first."""
        return tuple(self._watch.rounds())

    async def flush(self) -> None:
        """Sends spans and writes texts that still wait; before this process is taken down."""
        await asyncio.to_thread(self._watch.flush)
        await asyncio.to_thread(self._stages.flush)

    async def load_head(self, folder: str) -> HeadReport:
        """Another exit head drafts from the next round on; no stream is interrupted.

        Raises CheckpointError or ConfigError for one that does not fit; the old one goes on.
        """
        await asyncio.to_thread(self._stages.load_head, folder)
        head = (await self.control()).head
        assert head is not None, "it has just been loaded"
        return head

    async def control(self) -> ControlReport:
        """What the controllers go by, and how the latest drafts fared."""
        report = await asyncio.to_thread(self._stages.control)
        drafted, accepted = self._watch.acceptance()
        return replace(report, drafted_by_position=drafted, accepted_by_position=accepted)

    def _drop(self, request_id: RequestId) -> None:
        if self._membership is None:
            self._dropped.add(request_id)
        else:
            self._membership.member.drop(request_id)

    def _apply_plans(self, plans: Plans) -> None:
        if self._membership is not None:
            self._membership.member.apply_plans(plans)

    def _deliver(self, result: StepLike) -> None:
        self._mail.deliver(result.emissions)
        if result.rounds:
            self._num_rounds += len(result.rounds)
            self._last_round_unix_s = time.time()
        if self._router is not None:
            # An outcome of one that has left meanwhile would bring it back to the router.
            read = [outcome for outcome in result.outcomes if outcome.request_id in self._mail]
            self._router.observed(read, result.finished)
        self._watch.saw(result)
