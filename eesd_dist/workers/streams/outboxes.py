"""Outbox of each client: what a drafting actor has made and the client has still to read.

A client is an ingress. It reads all its streams with one call at a time, which returns as soon as
there is something: a round costs one message for each client, however many requests it has. A batch
is kept until the next call confirms it, so that a reply that is lost is sent again. Used in the
actor's event loop only.

Emissions are delivered while the next round is drafted. A request that was evicted and submitted
again will generate those tokens again, so emissions of an earlier submission are not delivered.
"""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from uuid import uuid4

from eesd_dist.errors import EesdError, RequestError, ResumedElsewhere
from eesd_dist.types import Emission, Request, RequestId
from eesd_dist.workers.messages import Delivery, StreamItem
from eesd_dist.workers.streams.kept_streams import KeptStreams

TAKE_WAIT_S = 2.0
"""Seconds after which a call of a client without anything to read returns empty."""

_Key = tuple[RequestId, int]
"""A request and its submission."""


@dataclass(slots=True)
class _Outbox:
    """The unread items of one client."""

    emissions: dict[_Key, list[Emission]] = field(default_factory=dict)
    """Emissions in the order in which streams have something to read."""
    ends: dict[_Key, EesdError] = field(default_factory=dict)
    unconfirmed: Delivery | None = None
    number: int = 0
    num_readers: int = 0
    unread_s: float = 0.0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    name: str = field(default_factory=lambda: uuid4().hex[:8])

    def put(self, key: _Key, emission: Emission) -> None:
        self.emissions.setdefault(key, []).append(emission)
        self.arrived.set()

    def end(self, key: _Key, error: EesdError) -> None:
        self.ends[key] = error
        self.arrived.set()

    def batch(self) -> Delivery:
        items: list[tuple[RequestId, int, StreamItem]] = []
        for (request_id, submission), emissions in self.emissions.items():
            items.append((request_id, submission, tuple(emissions)))
        for (request_id, submission), error in self.ends.items():
            items.append((request_id, submission, error))
        self.emissions.clear()
        self.ends.clear()
        self.arrived.clear()
        self.number += 1
        return Delivery(outbox=self.name, number=self.number, items=tuple(items))


class Outboxes:
    """The open streams of one actor, and an outbox for each client."""

    def __init__(self) -> None:
        self.kept = KeptStreams()
        self._clients: dict[str, _Outbox] = {}
        self._open: dict[RequestId, tuple[str, Request]] = {}
        """Client and request of each open stream."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._open

    def names(self) -> tuple[RequestId, ...]:
        """Returns the requests with an open stream."""
        return tuple(self._open)

    def request_of(self, request_id: RequestId) -> Request | None:
        """Returns the request with an open stream for this id, or None."""
        entry = self._open.get(request_id)
        return None if entry is None else entry[1]

    def open(self, request: Request, *, client: str) -> Request | None:
        """Opens a stream. If it resumes one that is kept, what is kept is to be read first.

        Returns the request as it continues then, or None if nothing is left to make. Raises
        RequestError while the id has a stream.
        """
        self._check_is_free(request)
        outbox = self._clients.setdefault(client, _Outbox())
        self._open[request.request_id] = (client, request)
        replayed = self.kept.begin(request)
        for emission in replayed:
            outbox.put((request.request_id, request.submission), emission)
        if replayed and replayed[-1].finish_reason is not None:
            self._close(request.request_id)
            return None
        generated = tuple(token for emission in replayed for token in emission.tokens)
        return replace(request, generated=generated) if replayed else request

    def _check_is_free(self, request: Request) -> None:
        earlier = self.request_of(request.request_id)
        if earlier is None:
            return
        if request.resumption < earlier.resumption:
            raise ResumedElsewhere
        raise RequestError(
            f"request id {request.request_id} is already being served: choose another",
            param="request_id",
        )

    def _close(self, request_id: RequestId) -> tuple[str, Request]:
        self.kept.end(request_id)
        return self._open.pop(request_id)

    def refuse(self, request: Request, *, client: str, error: EesdError) -> None:
        """Tells the client that this submission has no stream, and why."""
        outbox = self._clients.setdefault(client, _Outbox())
        outbox.end((request.request_id, request.submission), error)

    def close(self, request_id: RequestId, submission: int | None = None) -> bool:
        """Closes a stream that is read no longer, and drops what it has not read.

        With a `submission` only that one's. Returns False when there is none: a later submission
        may have replaced it.
        """
        entry = self._open.get(request_id)
        if entry is None or submission not in (None, entry[1].submission):
            return False
        client, opened = self._close(request_id)
        outbox = self._clients[client]
        outbox.emissions.pop((request_id, opened.submission), None)
        outbox.ends.pop((request_id, opened.submission), None)
        return True

    def deliver(self, emissions: Iterable[Emission]) -> frozenset[RequestId]:
        """Puts emissions into their outboxes; drops those without an open stream. Returns requests
        with late emissions, which belong to an earlier submission than the open one."""
        stale_ids: set[RequestId] = set()
        for emission in emissions:
            request_id = emission.request_id
            entry = self._open.get(request_id)
            if entry is None:
                continue
            client, opened = entry
            if opened.submission != emission.submission:
                stale_ids.add(request_id)
                continue
            self.kept.add(emission)
            self._clients[client].put((request_id, opened.submission), emission)
            if emission.finish_reason is not None:
                self._close(request_id)
        return frozenset(stale_ids)

    def fail(self, request_id: RequestId, error: EesdError) -> None:
        """Ends a stream with an error, after what it has not read yet, and frees the id."""
        client, opened = self._close(request_id)
        self._clients[client].end((request_id, opened.submission), error)

    async def take(self, client: str, *, last: tuple[str, int], wait_s: float) -> Delivery:
        """Returns the next batch for a client; an empty one after `wait_s`.

        `last` are outbox and number of the last batch that the client has: a later one is sent
        again.
        """
        outbox = self._clients.setdefault(client, _Outbox())
        confirmed = last[1] if last[0] == outbox.name else 0
        outbox.num_readers += 1
        try:
            delivery = _unconfirmed(outbox, confirmed)
            if delivery is not None:
                return delivery
            try:
                async with asyncio.timeout(wait_s):
                    await outbox.arrived.wait()
            except TimeoutError:
                return Delivery(outbox=outbox.name, number=confirmed, items=())
            delivery = _unconfirmed(outbox, confirmed)  # another call of this client has taken it
            if delivery is None:
                delivery = outbox.unconfirmed = outbox.batch()
            return delivery
        finally:
            outbox.num_readers -= 1
            outbox.unread_s = 0.0

    def unread(self, *, after_s: float, passed_s: float) -> Collection[RequestId]:
        """Forgets clients that have not read for `after_s`, and returns the streams they had open.

        `passed_s` is the time since the last call in which this process has run: silence is counted
        only while a client could have been heard.
        """
        for outbox in self._clients.values():
            outbox.unread_s = 0.0 if outbox.num_readers else outbox.unread_s + passed_s
        gone = {name for name, outbox in self._clients.items() if outbox.unread_s > after_s}
        left = [request_id for request_id, (client, _) in self._open.items() if client in gone]
        for request_id in left:
            self._close(request_id)
        for name in gone:
            del self._clients[name]
        return left


def _unconfirmed(outbox: _Outbox, confirmed: int) -> Delivery | None:
    """Returns the batch of which the reply was lost, if there is one."""
    delivery = outbox.unconfirmed
    if delivery is not None and confirmed < delivery.number:
        return delivery
    outbox.unconfirmed = None
    return None
