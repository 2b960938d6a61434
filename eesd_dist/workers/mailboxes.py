"""One mailbox per live request, between the loop that makes tokens and the streams they leave by.

Lives in an actor's event loop. A slow reader is never waited for: emissions that pile up leave
together. A mailbox outlives an epoch; what ends it is the last token, an error or its reader.

Tokens are on their way here while the next round is drafted. A request that was let go meanwhile
and submitted again will make them anew: what an earlier submission made is not put into its box.
"""

import asyncio
from collections.abc import Iterable

from eesd_dist.errors import EesdError, EngineError, RequestError
from eesd_dist.types import Emission, Request, RequestId
from eesd_dist.workers.messages import StreamItem


class Mailbox:
    def __init__(self, *, submission: int) -> None:
        self.submission = submission
        self._emissions: list[Emission] = []
        self._error: EesdError | None = None
        self._arrived = asyncio.Event()

    def put(self, emission: Emission) -> None:
        self._emissions.append(emission)
        self._arrived.set()

    def fail(self, error: EesdError) -> None:
        self._error = error
        self._arrived.set()

    async def take(self) -> StreamItem:
        """Everything that has arrived; tokens before the error that followed them."""
        while True:
            if self._emissions:
                taken = tuple(self._emissions)
                self._emissions.clear()
                return taken
            if self._error is not None:
                return self._error
            self._arrived.clear()
            await self._arrived.wait()


class Mailboxes:
    def __init__(self) -> None:
        self._boxes: dict[RequestId, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._boxes)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._boxes

    def open(self, request: Request) -> Mailbox:
        request_id = request.request_id
        if request_id in self._boxes:
            raise RequestError(
                f"request id {request_id} is already being served: choose another",
                param="request_id",
            )
        box = self._boxes[request_id] = Mailbox(submission=request.submission)
        return box

    def submission_of(self, request_id: RequestId) -> int | None:
        """Whose box stands under this id; None: there is none."""
        box = self._boxes.get(request_id)
        return None if box is None else box.submission

    def close(self, request_id: RequestId, submission: int | None = None) -> bool:
        """Whoever still reads from it is told that the request was cancelled.

        With a `submission` only that one's, and False where it is not there any more: that of a
        later one may stand in its place.
        """
        found = self._boxes.get(request_id)
        if found is None or submission not in (None, found.submission):
            return False
        del self._boxes[request_id]
        found.fail(EngineError(f"request {request_id} was cancelled"))
        return True

    def deliver(self, emissions: Iterable[Emission]) -> frozenset[RequestId]:
        """Emissions of submissions whose reader has left are dropped. Returns whose came late: a
        later submission's box is open."""
        late: set[RequestId] = set()
        for emission in emissions:
            box = self._boxes.get(emission.request_id)
            if box is None:
                continue
            if box.submission == emission.submission:
                box.put(emission)
            else:
                late.add(emission.request_id)
        return frozenset(late)

    def names(self) -> tuple[RequestId, ...]:
        """Whose streams are open."""
        return tuple(self._boxes)

    def fail(self, request_id: RequestId, error: EesdError) -> None:
        """Its reader gets the error after all that has arrived; the id is free again."""
        self._boxes.pop(request_id).fail(error)

    def fail_all(self, error: EesdError) -> None:
        for box in self._boxes.values():
            box.fail(error)
