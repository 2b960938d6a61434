"""An ingress's links to drafting actors: requests go out, tokens come back.

A link belongs to one drafting actor and lasts as long as its process. One call at a time reads all
streams of the link, so a round costs one message at most, however many requests it has. No replica
takes part: while the supervisor of a pipeline is being replaced, its streams go on.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextvars import Context
from typing import Any, TypeVar
from uuid import uuid4

from ray.exceptions import ActorUnavailableError, RayError

from eesd_dist.errors import PROCESS_DIED, EesdError, PeerLost
from eesd_dist.types import Request
from eesd_dist.workers.messages import Delivery, StreamItem
from eesd_dist.workers.process import PROCESS_LOST
from eesd_dist.workers.streams.mailboxes import Mailboxes

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.2


class Link:
    """The link to one drafting actor; built inside a running event loop."""

    def __init__(self, pipeline: str, address: Any, *, silence_s: float) -> None:
        """A call without an answer for `silence_s` ends the link's streams as lost."""
        self.pipeline = pipeline
        self._address = address
        self._silence_s = silence_s
        self._client = uuid4().hex
        self._mail = Mailboxes()
        self._last = ("", 0)
        """Outbox and number of the last batch."""
        self._unconfirmed: set[int] = set()
        """Submissions that the process has not confirmed."""
        self._lost: PeerLost | None = None
        self._reading: asyncio.Task[None] | None = None
        """None before the first stream."""

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    @property
    def num_live(self) -> int:
        return len(self._mail)

    async def stream(self, request: Request) -> AsyncGenerator[StreamItem, None]:
        """Submits the request and yields what is made of it; the last item may be an error."""
        self._unconfirmed.add(request.submission)
        if self._lost is not None:
            yield self._lost
            return
        box = self._mail.open(request)
        if self._reading is None:
            self._reading = _detached(self._read())  # it serves many requests
        submitting = _detached(self._submit(request))
        is_over = False
        try:
            while not is_over:
                item = await box.take()
                is_over = isinstance(item, EesdError) or item[-1].finish_reason is not None
                yield item
        finally:
            self._mail.close(request.request_id, request.submission)
            submitting.cancel()  # its result matters to the stream alone
            if not is_over and self._lost is None:
                cancel = self._address.cancel.remote
                Context().run(cancel, request.request_id, request.submission)

    def has_admitted(self, submission: int) -> bool:
        """Returns whether the process has confirmed a submission; asked once, after its stream."""
        if submission not in self._unconfirmed:
            return True
        self._unconfirmed.remove(submission)
        return False

    async def _submit(self, request: Request) -> None:
        """Submits the request. Where that fails its stream ends, since it may never have begun."""
        try:
            await self._address.submit.remote(request, self._client)
            self._unconfirmed.discard(request.submission)
        except RayError as error:
            if self._mail.submission_of(request.request_id) == request.submission:
                self._mail.fail(request.request_id, self._loss(f"not submitted: {error!r}"))

    def _loss(self, reason: str) -> PeerLost:
        return PeerLost(peer=self.pipeline, operation="stream", reason=reason)

    def fail(self, reason: str) -> None:
        """Ends the link: its process is gone, or another has its place."""
        if self._lost is None:
            self._lost = self._loss(reason)
            self._mail.fail_all(self._lost)

    async def close(self) -> None:
        self.fail("the link was closed")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        """Reads until the link is lost. A failed call is repeated: its batch is sent again."""
        loop = asyncio.get_running_loop()
        last_answer_s = loop.time()
        while self._lost is None:
            try:
                async with asyncio.timeout(self._silence_s):
                    delivery: Delivery = await self._address.take.remote(self._client, self._last)
            except (TimeoutError, ActorUnavailableError) as error:
                if loop.time() - last_answer_s > self._silence_s:
                    self.fail(f"no answer within {self._silence_s:g} s: {error!r}")
                await asyncio.sleep(_RETRY_S)
            except PROCESS_LOST as error:
                logger.info("link lost: pipeline=%s error=%r", self.pipeline, error)
                self.fail(PROCESS_DIED)
            except Exception as error:  # a bug here or there: streams must not wait for it
                logger.exception("link broke: pipeline=%s", self.pipeline)
                self.fail(repr(error))
            else:
                last_answer_s = loop.time()
                self._take(delivery)

    def _take(self, delivery: Delivery) -> None:
        if self._last[0] not in ("", delivery.outbox):
            # This process was not heard for so long that its streams were ended there.
            self._mail.fail_all(self._loss("it was read too late"))
        self._last = (delivery.outbox, delivery.number)
        for request_id, submission, item in delivery.items:
            is_read = self._mail.submission_of(request_id) == submission
            if isinstance(item, EesdError):
                if is_read:
                    self._mail.fail(request_id, item)
            elif is_read:
                self._mail.deliver(item)
            elif item[-1].finish_reason is None:  # its cancellation was lost, or is on its way
                self._address.cancel.remote(request_id, submission)


class Links:
    """The links of one ingress, by drafting actor."""

    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._by_leader: dict[str, Link] = {}

    def to(self, *, pipeline: str, leader: str, address: Any) -> Link:
        """Returns the link to a drafting actor, by its unique name `leader`."""
        link = self._by_leader.get(leader)
        if link is None or link.is_lost:
            link = Link(pipeline, address, silence_s=self._silence_s)
            self._by_leader[leader] = link
        return link

    def keep(self, leaders: dict[str, str]) -> None:
        """Drops links to replaced actors. `leaders`: the present one of each listed pipeline."""
        present = set(leaders.values())
        for leader, link in tuple(self._by_leader.items()):
            if leader in present:
                continue
            if link.pipeline in leaders:
                link.fail("another process has its place")
            if link.num_live == 0:
                del self._by_leader[leader]
                asyncio.ensure_future(link.close())  # noqa: RUF006  # nothing depends on its end


def _detached(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begins work outside of any request: Ray cancels the calls of a request when its client
    leaves, and a cancelled submission would look like one to a lost process."""
    return asyncio.get_running_loop().create_task(work, context=Context())
