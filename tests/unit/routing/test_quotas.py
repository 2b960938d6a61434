"""Limits of callers over several ingresses, which come, go and fall silent."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Literal, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eesd_dist.routing.quotas import Quota, QuotaBook, Standing

TWO_AT_ONCE = Quota(max_concurrent=2)
SIXTY = Quota(tokens_per_minute=60)
INGRESSES = st.sampled_from(["one", "two"])
MOSTLY = st.sampled_from([True, True, True, False])


class Asking:
    """A book, and what is asked of it at a time that only the test moves."""

    def __init__(self, *, expiry_s: float = 5.0, first: int = 1) -> None:
        self.book = QuotaBook(expiry_s=expiry_s)
        self.now_s = 100.0
        self._num = first - 1

    def acquire(self, quota: Quota, *, ingress: str = "one", caller: str = "c") -> Standing:
        self._num += 1
        return self.book.acquire(
            caller, quota, permit=f"p{self._num}", ingress=ingress, time_s=self.now_s
        )

    def reserve(
        self, number: int, quota: Quota, *, num_tokens: int, ingress: str = "one"
    ) -> Standing:
        return self.book.reserve(
            "c",
            quota,
            permit=f"p{number}",
            ingress=ingress,
            num_tokens=num_tokens,
            time_s=self.now_s,
        )

    def release(self, number: int, *, ingress: str = "one", num_tokens: int = 0) -> None:
        self.book.release(
            "c", permit=f"p{number}", ingress=ingress, num_tokens=num_tokens, time_s=self.now_s
        )


def test_requests_at_all_ingresses_count_together() -> None:
    asking = Asking()
    assert asking.acquire(TWO_AT_ONCE).num_running == 1
    assert asking.acquire(TWO_AT_ONCE, ingress="two").num_running == 2
    standing = asking.acquire(TWO_AT_ONCE)
    assert (standing.refusal, standing.num_running, standing.wait_s) == ("concurrency", 2, 1.0)
    assert asking.acquire(TWO_AT_ONCE, caller="another").refusal is None
    asking.release(2, ingress="two")
    assert asking.acquire(TWO_AT_ONCE).refusal is None


def test_a_permit_is_returned_once() -> None:
    asking = Asking()
    asking.acquire(TWO_AT_ONCE)
    asking.acquire(TWO_AT_ONCE)
    asking.release(1)
    asking.release(1)
    assert asking.acquire(TWO_AT_ONCE).refusal is None
    assert asking.acquire(TWO_AT_ONCE).refusal == "concurrency"


def test_an_ingress_that_falls_silent_holds_nothing() -> None:
    asking = Asking(expiry_s=5.0)
    asking.acquire(TWO_AT_ONCE, ingress="gone")
    asking.acquire(TWO_AT_ONCE, ingress="gone")
    asking.now_s += 4
    assert asking.acquire(TWO_AT_ONCE).refusal == "concurrency"
    asking.now_s += 2
    assert asking.acquire(TWO_AT_ONCE).refusal is None


def test_an_ingress_that_says_what_it_holds_is_not_silent() -> None:
    asking = Asking(expiry_s=5.0)
    asking.acquire(TWO_AT_ONCE, ingress="busy")
    asking.acquire(TWO_AT_ONCE, ingress="busy")
    for _ in range(10):
        asking.now_s += 2
        held = asking.book.held_by("busy")
        asking.book.hold("busy", held, time_s=asking.now_s)
        assert asking.acquire(TWO_AT_ONCE).refusal == "concurrency"


def test_a_book_that_was_lost_learns_again_what_is_held() -> None:
    before, after = Asking(), Asking(first=100)
    before.acquire(TWO_AT_ONCE, ingress="one")
    before.acquire(TWO_AT_ONCE, ingress="two")
    for ingress in ("one", "two"):
        after.book.hold(ingress, before.book.held_by(ingress), time_s=after.now_s)
    assert after.acquire(TWO_AT_ONCE).refusal == "concurrency"
    after.release(1, ingress="one")
    assert after.acquire(TWO_AT_ONCE).refusal is None


def test_a_permit_that_is_told_of_before_it_is_asked_for_counts_once() -> None:
    asking = Asking()
    asking.book.hold("one", {"c": {"p1": 0}}, time_s=asking.now_s)
    assert asking.acquire(Quota(max_concurrent=1)).refusal is None
    assert asking.acquire(Quota(max_concurrent=1)).refusal == "concurrency"


def test_tokens_of_requests_that_a_new_book_has_not_seen_begin_are_owed() -> None:
    asking = Asking()
    asking.release(7, num_tokens=80)
    assert asking.acquire(SIXTY).refusal == "tokens"


def test_what_an_ingress_no_longer_holds_is_forgotten() -> None:
    """The call that returned it was lost."""
    asking = Asking()
    asking.acquire(TWO_AT_ONCE)
    asking.acquire(TWO_AT_ONCE)
    asking.book.hold("one", {"c": {"p2": 0}}, time_s=asking.now_s)
    assert asking.acquire(TWO_AT_ONCE).refusal is None
    asking.book.hold("one", {}, time_s=asking.now_s)
    assert asking.acquire(TWO_AT_ONCE).num_running == 1


def test_tokens_are_forgotten_over_a_minute() -> None:
    asking = Asking()
    first = asking.acquire(SIXTY)
    assert (first.refusal, first.num_tokens_left, first.wait_s) == (None, 60, 0.0)
    asking.release(1, num_tokens=40)
    second = asking.acquire(SIXTY)
    assert (second.refusal, second.num_tokens_left, second.wait_s) == (None, 20, 40.0)
    asking.release(2, num_tokens=50)
    standing = asking.acquire(SIXTY)
    assert (standing.refusal, standing.num_tokens_left) == ("tokens", 0)
    assert standing.wait_s == pytest.approx(31.0), "30 tokens too many, and one to begin with"
    asking.now_s += standing.wait_s
    assert asking.acquire(SIXTY).refusal is None
    asking.now_s += 1000
    assert asking.acquire(SIXTY).num_tokens_left == 60, "no more than a minute's are saved"


@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_calls_lets_more_through_than_the_limits(seed: int) -> None:
    rng = Random(seed)
    asking, quota = Asking(), Quota(max_concurrent=3, tokens_per_minute=600)
    running: dict[int, str] = {}
    num_used, num_allowed, num_rejected = 0, 0, 0
    for number in range(1, 800):
        asking.now_s += rng.random() * 0.2
        ingress = rng.choice(["one", "two"])
        standing = asking.acquire(quota, ingress=ingress)
        if standing.refusal is None:
            running[number] = ingress
            num_allowed += 1
        num_rejected += standing.refusal is not None
        assert len(running) <= 3
        assert standing.num_running == len(running)
        if running and rng.random() < 0.7:
            ended = rng.choice(list(running))
            num_tokens = rng.randrange(20)
            asking.release(ended, ingress=running.pop(ended), num_tokens=num_tokens)
            num_used += num_tokens
        if rng.random() < 0.1:
            asking.book.hold(ingress, asking.book.held_by(ingress), time_s=asking.now_s)
        elapsed_s = asking.now_s - 100.0
        assert num_used <= 600 + elapsed_s * 10 + 3 * 20, "at most what runs is too much"
    assert num_allowed > 100
    assert num_rejected > 100


def test_what_a_request_may_use_is_charged_before_it_is_computed_and_the_rest_refunded() -> None:
    asking = Asking()
    asking.acquire(SIXTY)
    assert asking.reserve(1, SIXTY, num_tokens=50).refusal is None
    assert asking.acquire(SIXTY).num_tokens_left == 10
    assert asking.reserve(2, SIXTY, num_tokens=30).refusal is None, "one that began is finished"
    standing = asking.acquire(SIXTY)
    assert (standing.refusal, standing.wait_s) == ("tokens", 21.0)
    asking.release(1, num_tokens=8)
    assert asking.acquire(SIXTY).num_tokens_left == 22
    asking.release(2, num_tokens=35)
    assert asking.acquire(SIXTY).num_tokens_left == 17, "it took more than was expected"


def test_of_requests_that_come_at_once_those_behind_the_limit_are_refused_before_they_run() -> None:
    asking = Asking()
    assert [asking.acquire(SIXTY).refusal for _ in range(4)] == [None] * 4
    standings = [asking.reserve(n, SIXTY, num_tokens=40).refusal for n in (1, 2, 3, 4)]
    assert standings == [None, None, "tokens", "tokens"]
    for number, num_tokens in ((1, 40), (2, 40), (3, 0), (4, 0)):
        asking.release(number, num_tokens=num_tokens)
    assert asking.acquire(SIXTY).wait_s == 21.0


def test_a_reservation_that_is_made_again_replaces_the_first() -> None:
    asking = Asking()
    asking.acquire(SIXTY)
    for num_tokens in (30, 45, 20):
        asking.reserve(1, SIXTY, num_tokens=num_tokens)
        assert asking.acquire(SIXTY, caller="c").num_tokens_left == 60 - num_tokens
    asking.acquire(SIXTY)
    asking.reserve(5, SIXTY, num_tokens=100)
    assert asking.reserve(1, SIXTY, num_tokens=25).refusal == "tokens"
    asking.release(5, num_tokens=0)
    assert asking.acquire(SIXTY).num_tokens_left == 40, "the refused change has changed nothing"


def test_what_is_forgotten_of_a_request_is_not_charged_again_when_more_is_reserved() -> None:
    asking = Asking()
    asking.acquire(SIXTY)
    asking.reserve(1, SIXTY, num_tokens=30)
    asking.now_s += 25
    asking.reserve(1, SIXTY, num_tokens=50)
    assert asking.acquire(SIXTY).num_tokens_left == 35


def test_a_long_stream_is_forgotten_while_it_runs() -> None:
    asking = Asking()
    asking.acquire(SIXTY)
    asking.reserve(1, SIXTY, num_tokens=300)
    asking.now_s += 240
    asking.release(1, num_tokens=280)
    assert asking.acquire(SIXTY).num_tokens_left == 20


def test_what_was_computed_long_after_the_last_request_is_not_forgotten_at_once() -> None:
    asking = Asking()
    asking.acquire(SIXTY)
    asking.now_s += 600
    asking.release(1, num_tokens=50)
    assert asking.acquire(SIXTY).num_tokens_left == 10


def test_what_an_ingress_that_has_died_had_in_work_is_refunded_and_charged_if_it_lives() -> None:
    asking = Asking(expiry_s=5.0)
    slow = Quota(tokens_per_minute=1000)
    asking.acquire(slow, ingress="silent")
    asking.reserve(1, slow, ingress="silent", num_tokens=900)
    held = asking.book.held_by("silent")
    asking.now_s += 6
    assert asking.acquire(slow).num_tokens_left == 1000
    asking.book.hold("silent", held, time_s=asking.now_s)
    assert asking.acquire(slow).num_tokens_left == 100
    asking.release(1, ingress="silent", num_tokens=300)
    assert asking.acquire(slow).num_tokens_left == 700


@pytest.mark.parametrize("seed", range(60))
def test_calls_that_arrive_in_another_order_charge_each_request_once(seed: int) -> None:
    rng, quota = Random(seed), Quota(tokens_per_minute=10**9, max_concurrent=10**6)
    local, router = QuotaBook(expiry_s=5.0), QuotaBook(expiry_s=5.0)
    calls: list[Callable[[], object]] = []
    running: list[str] = []
    num_used = 0

    def send(name: str, *args: object, **options: object) -> None:
        own = {"ingress": "i", "time_s": 1.0, **options}
        calls.append(lambda: getattr(router, name)(*args, **own))
        getattr(local, name)(*args, **own)

    def tell() -> None:
        held = local.held_by("i")
        calls.append(lambda: router.hold("i", held, time_s=1.0))

    for number in range(200):
        step = rng.random()
        if step < 0.4 or not running:
            running.append(f"p{number}")
            send("acquire", "c", quota, permit=running[-1])
            send("reserve", "c", quota, permit=running[-1], num_tokens=rng.randrange(500))
        elif step < 0.8:
            permit = running.pop(rng.randrange(len(running)))
            num_tokens = rng.randrange(500)
            num_used += num_tokens
            for _ in range(rng.choice([1, 1, 2])):
                send("release", "c", permit=permit, num_tokens=num_tokens)
        else:
            tell()
        while len(calls) > 6 or (calls and rng.random() < 0.5):
            calls.pop(rng.randrange(min(len(calls), 4)))()
    for permit in running:
        send("release", "c", permit=permit, num_tokens=1)
        num_used += 1
    tell()
    for call in calls:
        call()
    for book in (local, router):
        assert book._accounts["c"].num_owed == num_used
        assert book._accounts["c"].num_running == 0


class Message(NamedTuple):
    """What an ingress tells the router, in order; any but the first may be lost."""

    kind: Literal["acquire", "reserve", "release", "hold"]
    permit: str = ""
    num_tokens: int = 0
    held: Mapping[str, int] = {}


class Charging(RuleBasedStateMachine):
    """Requests at two ingresses and a router that restarts and misses calls: each is charged once.

    No time passes, so that nothing is forgotten, and the limit is never reached.
    """

    LIMIT = Quota(tokens_per_minute=10**9, max_concurrent=10**6)

    def __init__(self) -> None:
        super().__init__()
        self.book = QuotaBook(expiry_s=5.0)
        self.now_s = 100.0
        self.number = 0
        self.running: dict[str, dict[str, int]] = {"one": {}, "two": {}}
        """By ingress: what was reserved for each permit, as the ingress knows it."""
        self.known: dict[str, dict[str, int]] = {"one": {}, "two": {}}
        """The same, as the router was told."""
        self.num_charged = 0
        """Tokens of requests that have ended, as the router was told."""

    def _send(self, ingress: str, message: Message, *, arrives: bool) -> None:
        permits = self.known[ingress]
        if not arrives:
            return
        call = {"ingress": ingress, "time_s": self.now_s}
        permit, num_tokens = message.permit, message.num_tokens
        if message.kind == "acquire":
            self.book.acquire("c", self.LIMIT, permit=permit, **call)
            permits[permit] = 0
        elif message.kind == "reserve":
            self.book.reserve("c", self.LIMIT, permit=permit, num_tokens=num_tokens, **call)
            permits[permit] = num_tokens
        elif message.kind == "release":
            self.book.release("c", permit=permit, num_tokens=num_tokens, **call)
            permits.pop(permit, None)
            self.num_charged += num_tokens
        else:
            self.book.hold(ingress, {"c": message.held} if message.held else {}, time_s=self.now_s)
            self.num_charged += sum(n for p, n in permits.items() if p not in message.held)
            self.known[ingress] = dict(message.held)

    @rule(ingress=INGRESSES, arrives=MOSTLY)
    def begin(self, ingress: str, arrives: bool) -> None:
        self.number += 1
        permit = f"p{self.number}"
        self.running[ingress][permit] = 0
        self._send(ingress, Message("acquire", permit), arrives=arrives)

    @rule(ingress=INGRESSES, arrives=MOSTLY, num_tokens=st.integers(0, 500), data=st.data())
    def reserve(self, ingress: str, arrives: bool, num_tokens: int, data: st.DataObject) -> None:
        if self.running[ingress]:
            permit = data.draw(st.sampled_from(sorted(self.running[ingress])))
            self.running[ingress][permit] = num_tokens
            self._send(ingress, Message("reserve", permit, num_tokens), arrives=arrives)

    @rule(ingress=INGRESSES, arrives=MOSTLY, num_tokens=st.integers(0, 500), data=st.data())
    def end(self, ingress: str, arrives: bool, num_tokens: int, data: st.DataObject) -> None:
        if self.running[ingress]:
            permit = data.draw(st.sampled_from(sorted(self.running[ingress])))
            del self.running[ingress][permit]
            self._send(ingress, Message("release", permit, num_tokens), arrives=arrives)

    @rule(ingress=INGRESSES)
    def tell(self, ingress: str) -> None:
        self._send(ingress, Message("hold", held=dict(self.running[ingress])), arrives=True)

    @rule()
    def restart_the_router(self) -> None:
        self.book = QuotaBook(expiry_s=5.0)
        self.known = {"one": {}, "two": {}}
        self.num_charged = 0

    @rule(ingress=INGRESSES)
    def lose_the_ingress(self, ingress: str) -> None:
        """It dies with its requests; the book hears of the other one only."""
        other = "two" if ingress == "one" else "one"
        self.book._received_s[ingress] = -100.0
        self.running[ingress].clear()
        self._send(other, Message("hold", held=dict(self.running[other])), arrives=True)
        self.known[ingress].clear()

    @invariant()
    def each_request_is_charged_once(self) -> None:
        in_work = sum(sum(permits.values()) for permits in self.known.values())
        account = self.book._accounts.get("c")
        owed = 0.0 if account is None else account.num_owed
        assert owed == self.num_charged + in_work

    def teardown(self) -> None:
        """In the end, with all told and all ended, nothing is held and nothing charged twice."""
        for ingress, permits in self.running.items():
            self.tell(ingress)
            for permit in list(permits):
                del permits[permit]
                self._send(ingress, Message("release", permit, 7), arrives=True)
        self.each_request_is_charged_once()
        assert not self.book.held_by("one")
        assert not self.book.held_by("two")


TestCharging = Charging.TestCase
TestCharging.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
