"""Limits of callers over several ingresses, which come, go and fall silent."""

from random import Random

import pytest

from eesd_dist.routing.quotas import Quota, QuotaBook, Standing

TWO_AT_ONCE = Quota(max_concurrent=2)
SIXTY = Quota(tokens_per_minute=60)


class Asking:
    """A book, and what is asked of it at a time that only the test moves."""

    def __init__(self, *, expiry_s: float = 5.0, first: int = 1) -> None:
        self.book = QuotaBook(expiry_s=expiry_s)
        self.now_s = 100.0
        self._num = first - 1

    def acquire(self, quota: Quota, *, ingress: str = "one", caller: str = "c") -> Standing:
        self._num += 1
        return self.book.acquire(
            caller, quota, permit=f"p{self._num}", ingress=ingress, now_s=self.now_s
        )

    def release(self, number: int, *, ingress: str = "one", num_tokens: int = 0) -> None:
        self.book.release(
            "c", permit=f"p{number}", ingress=ingress, num_tokens=num_tokens, now_s=self.now_s
        )


def test_requests_at_all_ingresses_count_together() -> None:
    asking = Asking()
    assert asking.acquire(TWO_AT_ONCE).num_running == 1
    assert asking.acquire(TWO_AT_ONCE, ingress="two").num_running == 2
    refused = asking.acquire(TWO_AT_ONCE)
    assert (refused.refused, refused.num_running, refused.wait_s) == ("concurrency", 2, 1.0)
    assert asking.acquire(TWO_AT_ONCE, caller="another").refused is None
    asking.release(2, ingress="two")
    assert asking.acquire(TWO_AT_ONCE).refused is None


def test_a_permit_is_returned_once() -> None:
    asking = Asking()
    asking.acquire(TWO_AT_ONCE)
    asking.acquire(TWO_AT_ONCE)
    asking.release(1)
    asking.release(1)
    assert asking.acquire(TWO_AT_ONCE).refused is None
    assert asking.acquire(TWO_AT_ONCE).refused == "concurrency"


def test_an_ingress_that_falls_silent_holds_nothing() -> None:
    asking = Asking(expiry_s=5.0)
    asking.acquire(TWO_AT_ONCE, ingress="gone")
    asking.acquire(TWO_AT_ONCE, ingress="gone")
    asking.now_s += 4
    assert asking.acquire(TWO_AT_ONCE).refused == "concurrency"
    asking.now_s += 2
    assert asking.acquire(TWO_AT_ONCE).refused is None


def test_an_ingress_that_says_what_it_holds_is_not_silent() -> None:
    asking = Asking(expiry_s=5.0)
    asking.acquire(TWO_AT_ONCE, ingress="busy")
    asking.acquire(TWO_AT_ONCE, ingress="busy")
    for _ in range(10):
        asking.now_s += 2
        held = asking.book.held_by("busy")
        asking.book.hold("busy", held, now_s=asking.now_s)
        assert asking.acquire(TWO_AT_ONCE).refused == "concurrency"


def test_a_book_that_was_lost_learns_again_what_is_held() -> None:
    before, after = Asking(), Asking(first=100)
    before.acquire(TWO_AT_ONCE, ingress="one")
    before.acquire(TWO_AT_ONCE, ingress="two")
    for ingress in ("one", "two"):
        after.book.hold(ingress, before.book.held_by(ingress), now_s=after.now_s)
    assert after.acquire(TWO_AT_ONCE).refused == "concurrency"
    after.release(1, ingress="one")
    assert after.acquire(TWO_AT_ONCE).refused is None


def test_a_permit_that_is_told_of_before_it_is_asked_for_counts_once() -> None:
    asking = Asking()
    asking.book.hold("one", {"c": ["p1"]}, now_s=asking.now_s)
    assert asking.acquire(Quota(max_concurrent=1)).refused is None
    assert asking.acquire(Quota(max_concurrent=1)).refused == "concurrency"


def test_tokens_of_requests_that_a_new_book_has_not_seen_begin_are_owed() -> None:
    asking = Asking()
    asking.release(7, num_tokens=80)
    assert asking.acquire(SIXTY).refused == "tokens"


def test_what_an_ingress_no_longer_holds_is_forgotten() -> None:
    """The call that returned it was lost."""
    asking = Asking()
    asking.acquire(TWO_AT_ONCE)
    asking.acquire(TWO_AT_ONCE)
    asking.book.hold("one", {"c": ["p2"]}, now_s=asking.now_s)
    assert asking.acquire(TWO_AT_ONCE).refused is None
    asking.book.hold("one", {}, now_s=asking.now_s)
    assert asking.acquire(TWO_AT_ONCE).num_running == 1


def test_tokens_are_forgotten_over_a_minute() -> None:
    asking = Asking()
    first = asking.acquire(SIXTY)
    assert (first.refused, first.num_tokens_left, first.wait_s) == (None, 60, 0.0)
    asking.release(1, num_tokens=40)
    second = asking.acquire(SIXTY)
    assert (second.refused, second.num_tokens_left, second.wait_s) == (None, 20, 40.0)
    asking.release(2, num_tokens=50)
    refused = asking.acquire(SIXTY)
    assert (refused.refused, refused.num_tokens_left) == ("tokens", 0)
    assert refused.wait_s == pytest.approx(31.0), "30 tokens too many, and one to begin with"
    asking.now_s += refused.wait_s
    assert asking.acquire(SIXTY).refused is None
    asking.now_s += 1000
    assert asking.acquire(SIXTY).num_tokens_left == 60, "no more than a minute's are saved"


@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_calls_lets_more_through_than_the_limits(seed: int) -> None:
    rng = Random(seed)
    asking, quota = Asking(), Quota(max_concurrent=3, tokens_per_minute=600)
    running: dict[int, str] = {}
    num_used, num_allowed, num_refused = 0, 0, 0
    for number in range(1, 800):
        asking.now_s += rng.random() * 0.2
        ingress = rng.choice(["one", "two"])
        standing = asking.acquire(quota, ingress=ingress)
        if standing.refused is None:
            running[number] = ingress
            num_allowed += 1
        num_refused += standing.refused is not None
        assert len(running) <= 3
        assert standing.num_running == len(running)
        if running and rng.random() < 0.7:
            ended = rng.choice(list(running))
            num_tokens = rng.randrange(20)
            asking.release(ended, ingress=running.pop(ended), num_tokens=num_tokens)
            num_used += num_tokens
        if rng.random() < 0.1:
            asking.book.hold(ingress, asking.book.held_by(ingress), now_s=asking.now_s)
        elapsed_s = asking.now_s - 100.0
        assert num_used <= 600 + elapsed_s * 10 + 3 * 20, "at most what runs is too much"
    assert num_allowed > 100
    assert num_refused > 100
