"""The streams of a drafting actor's requests: submitted, admitted to the engine, and ended.

They live for one epoch: when it ends, each stream ends with the reason.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from eesd_dist.errors import (
    CapacityError,
    EesdError,
    EngineCrashed,
    EngineError,
    Migrated,
    PeerLost,
    QueueFull,
    ResumedElsewhere,
)
from eesd_dist.types import Request, RequestId
from eesd_dist.workers.epochs.loop import RoundLoop
from eesd_dist.workers.roles import DraftEpoch, StepLike
from eesd_dist.workers.router_client import RouterLink
from eesd_dist.workers.streams.admission import Admission
from eesd_dist.workers.streams.feature_calls import FeatureCalls
from eesd_dist.workers.streams.outboxes import Outboxes
from eesd_dist.workers.watch import DraftWatch

if TYPE_CHECKING:
    from eesd_dist.engine.recording.text_features import TextFeatures

_QUIET_POLL_S = 0.02
_ALONE = CapacityError("a request is tested alone: try again in a moment")
_NUM_CANCELLED = 256
"""Cancelled submissions to remember: more than can be cancelled before they arrive."""


class RequestStreams:
    """The streams of one drafting actor."""

    def __init__(
        self,
        *,
        name: Callable[[], str],
        max_waiting: int,
        compile_grammar: Callable[[str], None],
        watch: DraftWatch,
    ) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._grammar_compiler = compile_grammar
        self._watch = watch
        self.router: RouterLink | None = None
        self.running: RoundLoop | None = None
        """None between epochs."""
        self.needs_new_engine = True
        self.num_rounds = 0
        self.last_round_unix_s = 0.0
        self.mail = Outboxes()
        self._admission = Admission()
        self._texts = FeatureCalls()
        self._waiting: dict[RequestId, Request] = {}
        """Submitted requests that the engine has not got yet."""
        self._dropped: set[RequestId] = set()
        """Requests that left between epochs."""
        self._cancelled: deque[tuple[RequestId, int]] = deque(maxlen=_NUM_CANCELLED)
        """Latest submissions that were cancelled while they were not here."""

    def end_all(self, trouble: EesdError, *, is_crash: bool) -> None:
        """Ends the streams of an epoch that this trouble has broken."""
        inside = set(self._admission.inside)
        for request_id in self.mail.names():
            error: EesdError = PeerLost(peer=self._name(), operation="rounds", reason=str(trouble))
            if is_crash and request_id in inside:
                is_sole = len(inside) == 1 and not self._texts
                error = EngineCrashed(str(trouble), was_alone=is_sole)
            self._send_on(request_id, error)
        lost = PeerLost(peer=self._name(), operation="rounds", reason=str(trouble))
        self._take_out(self._texts.fail_all(lost))

    async def submit(self, request: Request, client: str) -> None:
        """Takes a request, or refuses it in its stream."""
        try:
            self._require_epoch(request)
            await self._compile_grammar(request)
        except EesdError as error:
            self.mail.refuse(request, client=client, error=error)
            return
        request_id = request.request_id
        earlier = self.mail.request_of(request_id)
        if earlier is not None and _is_next_attempt(request, after=earlier):
            self.cancel(request_id, earlier.submission)  # that is on its way
        try:
            self._refuse(request)
            if earlier is not None and earlier.resumption < request.resumption:
                self._send_on(request_id, ResumedElsewhere())
            unfinished = self.mail.open(request, client=client)
        except EesdError as error:
            self.mail.refuse(request, client=client, error=error)
            return
        if unfinished is not None:
            self._waiting[request_id] = unfinished
            self._admission.arrive(request_id, is_suspect=request.is_suspect)
        self._admit()

    async def _compile_grammar(self, request: Request) -> None:
        """Compiles the grammar of a request in a thread: the engine finds it kept then."""
        grammar = request.sampling.grammar
        if grammar is not None:
            await asyncio.to_thread(self._grammar_compiler, grammar)

    async def text_features(self, request: Request) -> "TextFeatures":
        """Generates a text as a whole, and returns it with the features of its rows."""
        await self._compile_grammar(request)
        self._refuse(request)
        if self._admission.has_suspect:
            raise _ALONE
        running = self.running
        assert running is not None, "refused otherwise"
        running.draft_epoch.add(request)
        text = self._texts.open(request.request_id)
        try:
            return await text
        finally:
            if self._texts.close(request.request_id):  # the caller has left
                self._take_out([request.request_id])

    def _refuse(self, request: Request) -> None:
        """Raises why a request cannot be taken now."""
        self._require_epoch(request)
        if request.is_suspect and self._admission.has_suspect:
            raise CapacityError("another request is tested alone: try again in a moment")
        if self._admission.num_waiting >= self._max_waiting:
            raise QueueFull(num_waiting=self._admission.num_waiting, limit=self._max_waiting)

    def _require_epoch(self, request: Request) -> None:
        if self.running is None or self.needs_new_engine:
            raise PeerLost(peer=self._name(), operation="submit", reason="it is between two epochs")
        if (request.request_id, request.submission) in self._cancelled:  # it arrived first
            raise EngineError(f"request {request.request_id} was cancelled")

    def _admit(self) -> None:
        """Passes waiting requests to the engine, as far as they may enter."""
        running = self.running
        if running is None:
            return
        if self._admission.has_suspect:
            self._take_out(self._texts.fail_all(_ALONE))
        for request_id in self._admission.to_evict():
            migrated = Migrated(by="", to=None, reason="a request is tested alone")
            self._send_on(request_id, migrated)
        if self._admission.needs_quiet and not running.is_quiet:
            asyncio.get_running_loop().call_later(_QUIET_POLL_S, self._admit)
            return
        while admitted := self._admission.admit():  # again where the engine has refused a suspect
            for request_id in admitted:
                self._enter(running, self._waiting.pop(request_id))

    def _enter(self, running: RoundLoop, request: Request) -> None:
        try:
            running.draft_epoch.add(request)
        except EesdError as error:
            self._admission.leave(request.request_id)
            self.mail.fail(request.request_id, error)
            return
        self._watch.arrived(request)
        if self.router is not None:
            self.router.admitted(request)

    def cancel(self, request_id: RequestId, submission: int) -> None:
        """Ends this submission of the request, or remembers it if it is yet to arrive."""
        if self.mail.close(request_id, submission):
            self._watch.left(request_id)
            self._drop(request_id)
            self._admit()
        else:
            self._cancelled.append((request_id, submission))

    def end_unread(self, *, after_s: float, passed_s: float) -> int:
        """Ends the streams that have not been read for so long; returns how many."""
        self.mail.kept.expire()
        unread = self.mail.unread(after_s=after_s, passed_s=passed_s)
        for request_id in unread:
            self._watch.left(request_id)
            self._drop(request_id)
        self._admit()
        return len(unread)

    def evict(self, request_ids: Collection[RequestId] | None, error: EesdError) -> int:
        """Ends these streams (None: all) with the error; returns how many."""
        moved = [r for r in self.mail.names() if request_ids is None or r in request_ids]
        for request_id in moved:
            self._send_on(request_id, error)
        self._admit()
        return len(moved)

    def _send_on(self, request_id: RequestId, error: EesdError) -> None:
        """Ends a stream that continues in another pipeline, or in this one later."""
        self.mail.fail(request_id, error)
        self._watch.sent_on(request_id)
        self._drop(request_id)

    def _drop(self, request_id: RequestId) -> None:
        """Takes a request that has left out of the queue or the engine."""
        self._waiting.pop(request_id, None)
        if not self._admission.leave(request_id):
            return
        if self.router is not None:
            self.router.observed((), (request_id,))
        self._take_out([request_id])

    def drop_from(self, epoch: DraftEpoch) -> None:
        """Takes the requests that left between epochs out of the engine of the new one."""
        while self._dropped:
            epoch.drop(self._dropped.pop())

    def _take_out(self, request_ids: Iterable[RequestId]) -> None:
        """Takes requests out of the engine."""
        for request_id in request_ids:
            if self.running is None:
                self._dropped.add(request_id)
            else:
                self.running.disturb()
                self.running.draft_epoch.drop(request_id)

    def deliver(self, result: StepLike) -> None:
        self._texts.deliver(result.features)
        stale_ids = self.mail.deliver(result.emissions)
        for emission in result.emissions:
            if emission.request_id in stale_ids:
                continue
            self._admission.delivered(emission.request_id)
            if emission.finish_reason is not None:
                self._admission.leave(emission.request_id)
        if result.rounds:
            self.num_rounds += len(result.rounds)
            self.last_round_unix_s = time.time()
        if self.router is not None:
            # The router would admit an ended request again on an outcome of it.
            read = [
                outcome
                for outcome in result.outcomes
                if outcome.request_id not in stale_ids
                and (outcome.request_id in self.mail or outcome.request_id in result.finished)
            ]
            self.router.observed(read, [name for name in result.finished if name not in stale_ids])
        self._watch.saw(result, stale_ids=stale_ids)
        if self._admission.num_waiting:
            self._admit()


def _is_next_attempt(request: Request, *, after: Request) -> bool:
    """Returns True if the same connection of the client asks again."""
    return request.resumption == after.resumption and request.submission > after.submission
