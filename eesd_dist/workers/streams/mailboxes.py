"""Mailbox of each live request, at the end where its token stream is read.

Used in one event loop only. No writer waits for a slow reader: pending emissions are taken
together. A mailbox ends with the last token, an error or its reader.

Emissions are delivered while the next round is drafted. A request that was evicted and submitted
again will generate those tokens again, so emissions of an earlier submission are not delivered.
"""

import asyncio
from collections.abc import Iterable

from eesd_dist.errors import EesdError, EngineError, RequestError, ResumedElsewhere
from eesd_dist.types import Emission, Request, RequestId
from eesd_dist.workers.messages import StreamItem


class Mailbox:
    def __init__(self, *, submission: int, resumption: int) -> None:
        self.submission = submission
        self.resumption = resumption
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
        """Waits for and returns all pending emissions, or, when there are none, the error that
        ended the stream."""
        while True:
            if self._emissions:
                emissions = tuple(self._emissions)
                self._emissions.clear()
                return emissions
            if self._error is not None:
                return self._error
            self._arrived.clear()
            await self._arrived.wait()


class Mailboxes:
    def __init__(self) -> None:
        self._boxes: dict[RequestId, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._boxes)

    def open(self, request: Request) -> Mailbox:
        """Raises RequestError while the id has a box, unless its stream is being resumed."""
        request_id = request.request_id
        earlier = self._boxes.get(request_id)
        if earlier is not None and earlier.resumption < request.resumption:
            earlier.fail(ResumedElsewhere())
        elif earlier is not None:
            raise RequestError(
                f"request id {request_id} is already being served: choose another",
                param="request_id",
            )
        box = self._boxes[request_id] = Mailbox(
            submission=request.submission, resumption=request.resumption
        )
        return box

    def submission_of(self, request_id: RequestId) -> int | None:
        """Returns the submission with an open box for this id, or None."""
        box = self._boxes.get(request_id)
        return None if box is None else box.submission

    def close(self, request_id: RequestId, submission: int | None = None) -> bool:
        """Closes the request's box; a reader of it gets the error that the request was cancelled.

        With a `submission` only that submission's box is closed. Returns False when there is none:
        a later submission may have replaced it.
        """
        box = self._boxes.get(request_id)
        if box is None or submission not in (None, box.submission):
            return False
        del self._boxes[request_id]
        box.fail(EngineError(f"request {request_id} was cancelled"))
        return True

    def deliver(self, emissions: Iterable[Emission]) -> frozenset[RequestId]:
        """Puts emissions into their boxes; drops those without one. Returns requests with late
        emissions, which belong to an earlier submission than the open box."""
        stale_ids: set[RequestId] = set()
        for emission in emissions:
            box = self._boxes.get(emission.request_id)
            if box is None:
                continue
            if box.submission == emission.submission:
                box.put(emission)
            else:
                stale_ids.add(emission.request_id)
        return frozenset(stale_ids)

    def fail(self, request_id: RequestId, error: EesdError) -> None:
        """Ends the stream with an error, after all pending emissions, and frees the id."""
        self._boxes.pop(request_id).fail(error)

    def fail_all(self, error: EesdError) -> None:
        for box in self._boxes.values():
            box.fail(error)
