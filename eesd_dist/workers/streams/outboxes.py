"""Outbox of each client: what a drafting actor has made and the client has still to read.

A client is an ingress. It reads all its streams with one call at a time, however many requests it
has. A call returns at once with the first tokens of a stream, and with its end. Other tokens gather
for the flush interval of their request or of the pipeline, since each stream of a batch costs the
client an event. A batch is kept until the next call confirms it, so that a reply that is lost is
sent again. Used in the actor's event loop only.

Emissions are delivered while the next round is drafted. A request that was evicted and submitted
again will generate those tokens again, so emissions of an earlier submission are not delivered.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from uuid import uuid4

from eesd_dist.errors import EesdError, RequestError, ResumedElsewhere
from eesd_dist.types import Emission, Request, RequestId
from eesd_dist.workers.messages import Delivery, StreamItem
from eesd_dist.workers.streams.kept_streams import KeptStreams

TAKE_WAIT_S = 2.0
"""Seconds after which a call of a client without anything to read returns empty."""

_FLUSH_S = 0.02
"""A display shows an image as often."""
_LONGEST_FLUSH_S = 0.1
_FLUSH_S_PER_STREAM = 0.1 / 32

_AT_ONCE = -math.inf
_Key = tuple[RequestId, int]
"""A request and its submission."""


@dataclass(slots=True)
class _Stream:
    client: str
    request: Request
    batched_s: float = -math.inf
    """Time of its last batch, on the monotonic clock."""

    @property
    def key(self) -> _Key:
        return self.request.request_id, self.request.submission

    def due_s(self) -> float | None:
        """Returns when its next token is to be sent; None: at the pipeline's interval."""
        if self.batched_s == -math.inf:
            return _AT_ONCE
        interval_s = self.request.flush_interval_s
        return None if interval_s is None else self.batched_s + interval_s


@dataclass(slots=True)
class _Unread:
    """Items that a stream has to read."""

    emissions: list[Emission] = field(default_factory=list)
    error: EesdError | None = None
    """Error that ends the stream, after the emissions."""
    due_s: float | None = None
    """Time from which it is sent; None: with all else of the client that waits for the pipeline's
    interval."""

    def items(self) -> tuple[StreamItem, ...]:
        emissions: tuple[StreamItem, ...] = (tuple(self.emissions),) if self.emissions else ()
        return emissions if self.error is None else (*emissions, self.error)


@dataclass(slots=True)
class _Outbox:
    """The unread items of one client."""

    unread: dict[_Key, _Unread] = field(default_factory=dict)
    """Items of each stream, in the order in which streams have something to read."""
    unconfirmed: Delivery | None = None
    number: int = 0
    num_readers: int = 0
    unread_s: float = 0.0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something has become due earlier, or a batch was taken."""
    gathered_s: float = -math.inf
    """Time of the last batch with what had gathered for the pipeline's interval."""
    name: str = field(default_factory=lambda: uuid4().hex[:8])

    def put(self, key: _Key, emission: Emission, *, due_s: float | None) -> None:
        self._of(key, due_s).emissions.append(emission)

    def end(self, key: _Key, error: EesdError) -> None:
        self._of(key, _AT_ONCE).error = error

    def _of(self, key: _Key, due_s: float | None) -> _Unread:
        unread = self.unread.get(key)
        if unread is None:
            unread = self.unread[key] = _Unread(due_s=due_s)
            self.arrived.set()
        elif due_s == _AT_ONCE:
            unread.due_s = due_s
            self.arrived.set()
        return unread

    def _due_times(self, interval_s: float) -> dict[_Key, float]:
        gathered_s = self.gathered_s + interval_s
        return {
            key: gathered_s if unread.due_s is None else unread.due_s
            for key, unread in self.unread.items()
        }

    async def until_due(self, interval_s: float) -> None:
        """Waits until there is something to send, or another call of the client has taken it."""
        number = self.number
        while self.number == number:
            self.arrived.clear()
            times_s = self._due_times(interval_s).values()
            wait_s = min(times_s) - time.monotonic() if times_s else None
            if wait_s is not None and wait_s <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.arrived.wait()

    def batch(self, interval_s: float) -> tuple[Delivery, list[_Key]]:
        """Takes what is due; returns it, and of which streams it is."""
        time_s = time.monotonic()
        keys = [key for key, due_s in self._due_times(interval_s).items() if due_s <= time_s]
        if self.gathered_s + interval_s <= time_s:
            self.gathered_s = time_s
        self.number += 1
        self.arrived.set()
        items = [(*key, item) for key in keys for item in self.unread.pop(key).items()]
        return Delivery(outbox=self.name, number=self.number, items=tuple(items)), keys


def interval_by_load_s(num_streams: int) -> float:
    """Returns the flush interval in seconds of a drafting actor with so many streams. Every stream
    of a batch costs its client an event, and clients may share a machine."""
    return min(max(_FLUSH_S_PER_STREAM * num_streams, _FLUSH_S), _LONGEST_FLUSH_S)


class Outboxes:
    """The open streams of one actor, and an outbox for each client."""

    def __init__(self, *, interval_s: Callable[[int], float] | None = None) -> None:
        """`interval_s`: number of open streams -> flush interval of requests without one; None: by
        load, `interval_by_load_s`."""
        self.kept = KeptStreams()
        self._interval_s = interval_s or interval_by_load_s
        self._clients: dict[str, _Outbox] = {}
        self._open: dict[RequestId, _Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._open

    def names(self) -> tuple[RequestId, ...]:
        """Returns the requests with an open stream."""
        return tuple(self._open)

    def request_of(self, request_id: RequestId) -> Request | None:
        """Returns the request with an open stream for this id, or None."""
        stream = self._open.get(request_id)
        return None if stream is None else stream.request

    def open(self, request: Request, *, client: str) -> Request | None:
        """Opens a stream. If it resumes one that is kept, what is kept is to be read first.

        Returns the request as it continues then, or None if nothing is left to make. Raises
        RequestError while the id has a stream.
        """
        self._check_is_free(request)
        outbox = self._clients.setdefault(client, _Outbox())
        stream = self._open[request.request_id] = _Stream(client, request)
        replayed = self.kept.begin(request)
        for emission in replayed:
            outbox.put(stream.key, emission, due_s=_AT_ONCE)
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

    def _close(self, request_id: RequestId) -> _Stream:
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
        stream = self._open.get(request_id)
        if stream is None or submission not in (None, stream.request.submission):
            return False
        self._close(request_id)
        self._clients[stream.client].unread.pop(stream.key, None)
        return True

    def deliver(self, emissions: Iterable[Emission]) -> frozenset[RequestId]:
        """Puts emissions into their outboxes; drops those without an open stream. Returns requests
        with late emissions, which belong to an earlier submission than the open one."""
        stale_ids: set[RequestId] = set()
        for emission in emissions:
            request_id = emission.request_id
            stream = self._open.get(request_id)
            if stream is None:
                continue
            if stream.request.submission != emission.submission:
                stale_ids.add(request_id)
                continue
            self.kept.add(emission)
            is_last = emission.finish_reason is not None
            due_s = _AT_ONCE if is_last else stream.due_s()
            self._clients[stream.client].put(stream.key, emission, due_s=due_s)
            if is_last:
                self._close(request_id)
        return frozenset(stale_ids)

    def fail(self, request_id: RequestId, error: EesdError) -> None:
        """Ends a stream with an error, after what it has not read yet, and frees the id."""
        stream = self._close(request_id)
        self._clients[stream.client].end(stream.key, error)

    async def take(self, client: str, *, last: tuple[str, int], wait_s: float) -> Delivery:
        """Returns the next batch for a client; an empty one after `wait_s`.

        `last` are outbox and number of the last batch that the client has: a later one is sent
        again.
        """
        interval_s = self._interval_s(len(self._open))
        outbox = self._clients.setdefault(client, _Outbox())
        confirmed = last[1] if last[0] == outbox.name else 0
        outbox.num_readers += 1
        try:
            delivery = _unconfirmed(outbox, confirmed)
            if delivery is not None:
                return delivery
            try:
                async with asyncio.timeout(wait_s):
                    await outbox.until_due(interval_s)
            except TimeoutError:
                return Delivery(outbox=outbox.name, number=confirmed, items=())
            delivery = _unconfirmed(outbox, confirmed)  # another call of this client has taken it
            if delivery is None:
                delivery, keys = outbox.batch(interval_s)
                outbox.unconfirmed = delivery
                for key in keys:
                    stream = self._open.get(key[0])
                    if stream is not None and stream.key == key:
                        stream.batched_s = time.monotonic()
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
        left = [request_id for request_id, stream in self._open.items() if stream.client in gone]
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
