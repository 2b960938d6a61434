"""What rounds have made reaches each client once and in order, though replies are lost."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eesd_dist.errors import EesdError, Migrated, RequestError
from eesd_dist.types import Emission, FinishReason, Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.messages import Delivery
from eesd_dist.workers.streams.outboxes import Outboxes, interval_by_load_s

NEW = ("", 0)
MOVED = Migrated(by="p", to=None, reason="test")
ResultT = TypeVar("ResultT")


def _request(name: str, *, submission: int = 1, flush_interval_s: float | None = None) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=(TokenId(1),),
        sampling=SamplingParams(),
        submission=submission,
        flush_interval_s=flush_interval_s,
    )


def _emission(name: str, token: int, *, submission: int = 1, is_last: bool = False) -> Emission:
    return Emission(
        request_id=RequestId(name),
        tokens=(TokenId(token),),
        num_accepted=0,
        finish_reason=FinishReason.STOP if is_last else None,
        submission=submission,
    )


def _submission(mail: Outboxes, name: RequestId) -> int:
    request = mail.request_of(name)
    assert request is not None
    return request.submission


def _read(delivery: Delivery) -> list[tuple[str, int, object]]:
    """Returns name, submission, and the tokens or the name of the error."""
    return [
        (
            request_id,
            submission,
            type(item).__name__
            if isinstance(item, EesdError)
            else [token for emission in item for token in emission.tokens],
        )
        for request_id, submission, item in delivery.items
    ]


async def _taken(mail: Outboxes, client: str, last: tuple[str, int] = NEW) -> Delivery:
    return await mail.take(client, last=last, wait_s=0.0)


def test_what_piles_up_leaves_in_one_batch_and_in_order_with_errors_after_tokens() -> None:
    async def run() -> None:
        mail = Outboxes()
        for name in "ab":
            mail.open(_request(name), client="c")
        mail.open(_request("x"), client="d")
        mail.deliver([_emission("a", 1), _emission("b", 5), _emission("a closed stream's", 9)])
        mail.fail(RequestId("b"), MOVED)
        mail.deliver([_emission("a", 2), _emission("x", 7), _emission("b", 6)])
        batch = await _taken(mail, "c")
        assert _read(batch) == [("a", 1, [1, 2]), ("b", 1, [5]), ("b", 1, "Migrated")]
        assert _read(await _taken(mail, "d")) == [("x", 1, [7])]

    asyncio.run(run())


def test_a_client_waits_until_one_of_its_own_streams_has_something() -> None:
    async def run() -> None:
        mail = Outboxes()
        mail.open(_request("a"), client="c")
        mail.open(_request("x"), client="d")
        taking = asyncio.ensure_future(mail.take("c", last=NEW, wait_s=60.0))
        await asyncio.sleep(0)
        mail.deliver([_emission("x", 1)])
        await asyncio.sleep(0.01)
        assert not taking.done()
        mail.deliver([_emission("a", 1)])
        assert _read(await taking) == [("a", 1, [1])]

    asyncio.run(run())


class _Reader:
    """Takes the batches of client "c"."""

    def __init__(self) -> None:
        self.mail = Outboxes(interval_s=lambda num_streams: self._interval_s)
        self._interval_s = 0.0
        self._last = NEW

    async def take(self, interval_s: float) -> tuple[list[tuple[str, int, object]], float]:
        """Returns the items of the next batch, and the seconds until it came."""
        started_s = time.monotonic()
        self._interval_s = interval_s
        batch = await self.mail.take("c", last=self._last, wait_s=60.0)
        self._last = (batch.outbox, batch.number)
        return _read(batch), time.monotonic() - started_s


def test_tokens_of_more_streams_gather_for_longer() -> None:
    assert [interval_by_load_s(count) for count in (0, 1, 6, 16, 32, 50)] == [
        0.02,
        0.02,
        0.02,
        0.05,
        0.1,
        0.1,
    ]


def test_the_streams_of_all_clients_count() -> None:
    async def run() -> None:
        counts: list[int] = []
        mail = Outboxes(interval_s=lambda num_streams: counts.append(num_streams) or 0.0)
        for name, client in (("a", "c"), ("b", "other"), ("x", "other")):
            mail.open(_request(name), client=client)
        mail.deliver([_emission("a", 1)])
        assert _read(await mail.take("c", last=NEW, wait_s=60.0)) == [("a", 1, [1])]
        mail.close(RequestId("x"))
        await mail.take("c", last=NEW, wait_s=0.0)
        assert counts == [3, 2]

    asyncio.run(run())


def test_tokens_gather_for_the_interval_of_the_pipeline() -> None:
    async def run() -> None:
        reader = _Reader()
        mail = reader.mail
        for name in "ab":
            mail.open(_request(name), client="c")
            mail.deliver([_emission(name, 1)])
        assert (await reader.take(1.0))[0] == [("a", 1, [1]), ("b", 1, [1])]
        batched_s = time.monotonic()
        mail.deliver([_emission("a", 2)])
        taking = asyncio.ensure_future(reader.take(1.0))
        await asyncio.sleep(0.05)
        mail.deliver([_emission("a", 3), _emission("b", 2)])
        assert (await taking)[0] == [("a", 1, [2, 3]), ("b", 1, [2])]
        assert time.monotonic() - batched_s > 0.5
        for token in (4, 5):
            mail.deliver([_emission("a", token)])
            assert (await reader.take(0.0))[0] == [("a", 1, [token])]

    asyncio.run(run())


def test_first_tokens_and_ends_leave_at_once_and_alone() -> None:
    async def run() -> None:
        reader = _Reader()
        mail = reader.mail
        for name in "abc":
            mail.open(_request(name), client="c")
        mail.deliver([_emission("a", 1), _emission("c", 1)])
        await reader.take(60.0)
        mail.deliver([_emission("a", 2), _emission("c", 2)])
        taking = asyncio.ensure_future(reader.take(60.0))
        await asyncio.sleep(0.02)
        assert not taking.done()
        mail.deliver([_emission("b", 5)])
        assert (await taking)[0] == [("b", 1, [5])]
        mail.deliver([_emission("b", 6)])
        mail.deliver([_emission("b", 7, is_last=True)])
        assert (await reader.take(60.0))[0] == [("b", 1, [6, 7])]
        mail.fail(RequestId("a"), MOVED)
        assert (await reader.take(60.0))[0] == [("a", 1, [2]), ("a", 1, "Migrated")]
        assert (await reader.take(0.0))[0] == [("c", 1, [2])]

    asyncio.run(run())


def test_a_request_has_its_own_interval() -> None:
    async def run() -> None:
        reader = _Reader()
        mail = reader.mail
        for name, interval_s in (("fast", 0.0), ("slow", 1.0), ("default", None)):
            mail.open(_request(name, flush_interval_s=interval_s), client="c")
            mail.deliver([_emission(name, 1)])
        await reader.take(60.0)
        mail.deliver([_emission(name, 2) for name in ("default", "slow", "fast")])
        assert (await reader.take(60.0))[0] == [("fast", 1, [2])]
        items, waited_s = await reader.take(60.0)
        assert items == [("slow", 1, [2])]
        assert waited_s < 30.0
        mail.deliver([_emission("slow", 3)])
        assert (await reader.take(0.0))[0] == [("default", 1, [2])]
        assert (await reader.take(0.0))[0] == [("slow", 1, [3])]

    asyncio.run(run())


def test_a_batch_is_sent_again_until_it_is_confirmed_and_then_never() -> None:
    async def run() -> None:
        mail = Outboxes(interval_s=lambda num_streams: 0.0)
        mail.open(_request("a"), client="c")
        mail.deliver([_emission("a", 1)])
        first = await _taken(mail, "c")
        mail.deliver([_emission("a", 2)])
        assert await _taken(mail, "c") == first, "what came later waits"
        second = await _taken(mail, "c", (first.outbox, first.number))
        assert _read(second) == [("a", 1, [2])]
        last = (second.outbox, second.number)
        for _ in range(2):
            assert await _taken(mail, "c", last) == Delivery(
                outbox=second.outbox, number=second.number, items=()
            )

    asyncio.run(run())


def test_two_calls_of_a_client_one_of_them_lost_get_the_same_batch() -> None:
    async def run() -> None:
        mail = Outboxes()
        mail.open(_request("a"), client="c")
        calls = [asyncio.ensure_future(mail.take("c", last=NEW, wait_s=60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        mail.deliver([_emission("a", 1)])
        first, second = await asyncio.gather(*calls)
        assert first == second
        assert _read(first) == [("a", 1, [1])]

    asyncio.run(run())


def test_an_id_is_in_use_until_its_stream_ends_and_a_refusal_reaches_its_client() -> None:
    async def run() -> None:
        mail = Outboxes()
        request_id = RequestId("a")
        mail.open(_request("a"), client="c")
        with pytest.raises(RequestError, match="already being served"):
            mail.open(_request("a", submission=2), client="c")
        mail.refuse(_request("a", submission=2), client="c", error=MOVED)
        assert _submission(mail, request_id) == 1
        mail.deliver([_emission("a", 1, is_last=True)])
        assert (len(mail), request_id in mail, mail.names()) == (0, False, ())
        mail.open(_request("a", submission=3), client="c")
        assert (len(mail), request_id in mail, mail.names()) == (1, True, (request_id,))
        assert _read(await _taken(mail, "c")) == [("a", 2, "Migrated"), ("a", 1, [1])]

    asyncio.run(run())


def test_what_an_earlier_submission_made_is_late_for_a_later_one() -> None:
    async def run() -> None:
        mail = Outboxes()
        request_id = RequestId("a")
        mail.open(_request("a"), client="c")
        assert not mail.close(request_id, 2)
        mail.deliver([_emission("a", 6)])
        assert mail.close(request_id, 1), "and what it has not read is dropped"
        mail.open(_request("a", submission=2), client="c")
        assert not mail.close(request_id, 1)
        stale_ids = mail.deliver([_emission("a", 7), _emission("a", 8, submission=2)])
        assert stale_ids == {request_id}
        assert _read(await _taken(mail, "c")) == [("a", 2, [8])]
        assert mail.close(request_id)

    asyncio.run(run())


def test_a_client_that_was_silent_for_long_gets_another_outbox_and_its_streams_end() -> None:
    async def run() -> None:
        mail = Outboxes()
        for name, client in (("a", "silent"), ("b", "reading"), ("c", "silent")):
            mail.open(_request(name), client=client)
        mail.deliver([_emission("a", 1), _emission("b", 2)])
        old = await _taken(mail, "silent")
        reading = await _taken(mail, "reading")
        assert mail.unread(after_s=10.0, passed_s=6.0) == []
        await _taken(mail, "reading", (reading.outbox, reading.number))
        assert mail.unread(after_s=10.0, passed_s=6.0) == ["a", "c"]
        assert mail.names() == ("b",)
        mail.deliver([_emission("a", 3)])
        new = await _taken(mail, "silent", (old.outbox, old.number))
        assert new.outbox != old.outbox
        assert (new.number, new.items) == (0, ())
        mail.open(_request("a", submission=2), client="silent")
        mail.deliver([_emission("a", 4, submission=2)])
        for last in ((old.outbox, old.number), (new.outbox, 0)):  # the first reply may be lost too
            assert _read(await _taken(mail, "silent", last)) == [("a", 2, [4])]

    asyncio.run(run())


def test_a_client_that_waits_for_tokens_is_not_silent() -> None:
    async def run() -> None:
        mail = Outboxes()
        mail.open(_request("a"), client="c")
        taking = asyncio.ensure_future(mail.take("c", last=NEW, wait_s=60.0))
        await asyncio.sleep(0)
        for _ in range(5):
            assert mail.unread(after_s=10.0, passed_s=60.0) == []
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert mail.unread(after_s=10.0, passed_s=6.0) == [], "silent since the call has ended"
        assert mail.unread(after_s=10.0, passed_s=6.0) == ["a"]

    asyncio.run(run())


_Key = tuple[str, int]


@dataclass
class _Stream:
    """One submission, as it should reach its client."""

    client: str
    generated: list[int] = field(default_factory=list)
    state: Literal["open", "finished", "failed", "closed", "lost"] = "open"
    """Closed: by its client; lost: the client was silent for too long."""


@dataclass
class _Client:
    """The reader of an outbox: one call at a time, and calls that lose their replies."""

    last: tuple[str, int] = NEW
    call: asyncio.Task[Delivery] | None = None
    lost_calls: list[asyncio.Task[Delivery]] = field(default_factory=list)
    read: dict[_Key, list[int]] = field(default_factory=dict)
    errors: set[_Key] = field(default_factory=set)
    was_forgotten: bool = False
    """Since the call that is under way, or the last one, began."""


class _Deliveries(RuleBasedStateMachine):
    """Rounds, ingresses and a network that loses replies, against lists of tokens."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.mail = Outboxes(interval_s=lambda num_streams: 0.0)
        self.clients = {name: _Client() for name in "xy"}
        self.streams: dict[_Key, _Stream] = {}
        self.num_tokens = 0

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self.loop.run_until_complete(work)

    def _settle(self) -> None:
        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self._run(turns())

    def _opened(self, name: str) -> _Key | None:
        keys = [k for k, s in self.streams.items() if k[0] == name and s.state == "open"]
        assert len(keys) <= 1
        return keys[0] if keys else None

    def _new_key(self, name: str) -> _Key:
        return (name, 1 + max([0, *[k[1] for k in self.streams if k[0] == name]]))

    @rule(name=st.sampled_from("abc"), client=st.sampled_from("xy"))
    def submit(self, name: str, client: str) -> None:
        key = self._new_key(name)
        request = _request(name, submission=key[1])
        if self._opened(name) is None:
            self.mail.open(request, client=client)
            self.streams[key] = _Stream(client)
        else:
            self.mail.refuse(request, client=client, error=MOVED)
            self.streams[key] = _Stream(client, state="failed")
        self._settle()

    @rule(names=st.sets(st.sampled_from("abc"), min_size=1), is_last=st.booleans())
    def run_round(self, names: set[str], is_last: bool) -> None:
        emissions = []
        for name in sorted(names):
            key = self._opened(name)
            if key is not None:
                self.num_tokens += 1
                self.streams[key].generated.append(self.num_tokens)
                self.streams[key].state = "finished" if is_last else "open"
                emission = _emission(name, self.num_tokens, submission=key[1], is_last=is_last)
                emissions.append(emission)
        assert self.mail.deliver(emissions) == frozenset()
        self._settle()

    @rule(name=st.sampled_from("abc"))
    def finish_a_round_that_began_before_an_eviction(self, name: str) -> None:
        stale_ids = self.mail.deliver([_emission(name, -1, submission=0)])
        assert stale_ids == (frozenset() if self._opened(name) is None else {name})

    @rule(name=st.sampled_from("abc"))
    def evict(self, name: str) -> None:
        key = self._opened(name)
        if key is not None:
            self.mail.fail(RequestId(name), MOVED)
            self.streams[key].state = "failed"
            self._settle()

    @rule(name=st.sampled_from("abc"))
    def cancel(self, name: str) -> None:
        key = self._opened(name)
        if key is not None:
            assert self.mail.close(RequestId(name), key[1])
            self.streams[key].state = "closed"

    @rule(name=st.sampled_from("xy"), wait_s=st.sampled_from([0.0, 600.0]))
    def call(self, name: str, wait_s: float) -> None:
        client = self.clients[name]
        if client.call is None:
            taking = self.mail.take(name, last=client.last, wait_s=wait_s)
            client.call, client.was_forgotten = self.loop.create_task(taking), False
            self._settle()

    @rule(name=st.sampled_from("xy"))
    def lose_the_reply(self, name: str) -> None:
        """The call itself goes on at the other end."""
        client = self.clients[name]
        if client.call is not None:
            client.lost_calls.append(client.call)
            client.call = None

    @rule(name=st.sampled_from("xy"))
    def reply(self, name: str) -> None:
        client = self.clients[name]
        if client.call is not None and client.call.done():
            self._hear(client, client.call.result())
            client.call = None

    def _hear(self, client: _Client, delivery: Delivery) -> None:
        outbox, number = client.last
        if delivery.outbox == outbox or outbox == "":
            # A batch of streams that were all cancelled is empty.
            assert delivery.number - number in ((1,) if delivery.items else (0, 1))
        client.last = (delivery.outbox, delivery.number)
        kinds = [(r, s, isinstance(item, EesdError)) for r, s, item in delivery.items]
        assert len(kinds) == len(set(kinds)), "a stream's emissions are merged"
        for request_id, submission, item in delivery.items:
            key = (str(request_id), submission)
            assert key not in client.errors
            if isinstance(item, EesdError):
                client.errors.add(key)
            else:
                tokens = [token for emission in item for token in emission.tokens]
                client.read.setdefault(key, []).extend(tokens)

    @precondition(lambda self: any(c.last != NEW for c in self.clients.values()))
    @rule()
    def be_silent(self) -> None:
        """Every client without a call at the actor is forgotten."""
        waiting = {
            name
            for name, client in self.clients.items()
            if any(not call.done() for call in (client.call, *client.lost_calls) if call)
        }
        gone = self.clients.keys() - waiting
        ended = {k for k, s in self.streams.items() if s.state == "open" and s.client in gone}
        assert set(self.mail.unread(after_s=10.0, passed_s=11.0)) == {k[0] for k in ended}
        for key, stream in self.streams.items():
            if stream.client in gone and (key in ended or not self._is_read(key)):
                stream.state = "lost"
        for name in gone:
            self.clients[name].was_forgotten = True

    def _is_read(self, key: _Key) -> bool:
        stream = self.streams[key]
        client = self.clients[stream.client]
        has_error = key in client.errors
        return client.read.get(key, []) == stream.generated and has_error == (
            stream.state == "failed"
        )

    @invariant()
    def each_client_has_the_first_tokens_of_its_streams(self) -> None:
        for name, client in self.clients.items():
            for key, tokens in client.read.items():
                assert self.streams[key].client == name
                assert tokens == self.streams[key].generated[: len(tokens)]
            for key in client.errors:
                assert client.read.get(key, []) == self.streams[key].generated

    @invariant()
    def open_streams_are_named(self) -> None:
        opened = {k for k, s in self.streams.items() if s.state == "open"}
        assert {(name, _submission(self.mail, name)) for name in self.mail.names()} == opened
        assert len(self.mail) == len(opened)

    def teardown(self) -> None:
        try:
            self._read_the_rest()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self._settle()
            self.loop.close()

    def _read_the_rest(self) -> None:
        for name, client in self.clients.items():
            if client.call is not None and client.call.done():
                self._hear(client, client.call.result())
            last_batch = client.last
            for _ in range(3):  # an unconfirmed batch, the rest, nothing
                delivery = self._run(self.mail.take(name, last=client.last, wait_s=0.0))
                if client.was_forgotten and last_batch != NEW:
                    assert delivery.outbox != last_batch[0], (
                        "the client is told that streams were lost"
                    )
                self._hear(client, delivery)
            assert not delivery.items
        for key, stream in self.streams.items():
            assert stream.state in ("closed", "lost") or self._is_read(key), (key, stream)


def test_every_token_reaches_its_client_once_and_in_order_whatever_is_lost_on_the_way() -> None:
    run_state_machine_as_test(_Deliveries)  # type: ignore[no-untyped-call]
