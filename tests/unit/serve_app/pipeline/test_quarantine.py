"""Who is let into the engine after it broke; checked against a toy engine that poison breaks."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.types import RequestId
from serve_app.pipeline.quarantine import Patience, Suspicion


def _ids(*names: str) -> list[RequestId]:
    return [RequestId(name) for name in names]


def _crowd(*names: str, suspect_after: int = 2) -> tuple[Suspicion, list[RequestId]]:
    suspicion = Suspicion(suspect_after=suspect_after)
    ids = _ids(*names)
    for request_id in ids:
        suspicion.came(request_id)
        suspicion.enter(request_id)
    return suspicion, ids


def test_after_one_interruption_all_go_on_together() -> None:
    suspicion, ids = _crowd("a", "b", "c")
    verdict = suspicion.broke(keeps_streams=True)
    assert verdict.struck == tuple(ids)
    assert verdict.refused is None
    assert not verdict.all_come_out
    assert list(suspicion.inside) == ids
    new = RequestId("new")
    suspicion.came(new)
    assert suspicion.may_enter(new)


def test_an_engine_that_has_dropped_its_streams_lets_them_enter_again() -> None:
    suspicion, ids = _crowd("a", "b")
    suspicion.broken_off(ids[0])
    assert not suspicion.may_enter(ids[0])
    assert suspicion.broke(keeps_streams=False).all_come_out
    assert all(suspicion.may_enter(request_id) for request_id in ids)


def test_a_stream_that_was_dropped_enters_again_though_the_engine_keeps_the_others() -> None:
    suspicion, (a, b) = _crowd("a", "b")
    suspicion.broken_off(a)
    suspicion.broke(keeps_streams=True)
    assert suspicion.may_enter(a)
    assert list(suspicion.inside) == [b]


def test_a_token_clears_a_stream_and_interruptions_with_progress_are_not_bounded() -> None:
    suspicion, (a,) = _crowd("a")
    for _ in range(100):
        verdict = suspicion.broke(keeps_streams=True)
        assert verdict.refused is None
        assert not verdict.all_come_out
        assert not suspicion.delivered(a)
        assert suspicion.strikes(a) == 0


def test_suspects_enter_one_at_a_time_and_everybody_else_waits() -> None:
    suspicion, (a, b) = _crowd("a", "b")
    suspicion.broke(keeps_streams=False)
    suspicion.enter(a)
    suspicion.enter(b)
    assert suspicion.broke(keeps_streams=True).all_come_out
    new = RequestId("new")
    suspicion.came(new)
    assert [suspicion.may_enter(i) for i in (a, b, new)] == [True, True, False]
    suspicion.enter(a)
    assert not suspicion.may_enter(b)
    assert suspicion.delivered(a), "it makes room for the next"
    assert not suspicion.may_enter(b), "it is still in the engine"
    suspicion.came_out(a)
    assert [suspicion.may_enter(i) for i in (a, b, new)] == [False, True, False]
    suspicion.enter(b)
    assert not suspicion.delivered(b), "nobody is left to be tested: it stays"
    assert [suspicion.may_enter(i) for i in (a, new)] == [True, True]


def test_who_breaks_the_engine_alone_is_refused_and_the_next_one_is_tested() -> None:
    suspicion, (a, b) = _crowd("a", "b")
    suspicion.broke(keeps_streams=False)
    suspicion.enter(a)
    suspicion.enter(b)
    assert suspicion.broke(keeps_streams=False).refused is None, "either may have been it"
    suspicion.enter(a)
    assert suspicion.broke(keeps_streams=False).refused == a
    suspicion.left(a)
    assert suspicion.may_enter(b)


def test_one_that_is_alone_from_the_first_is_refused_after_two_engines() -> None:
    suspicion, (a,) = _crowd("a")
    assert suspicion.broke(keeps_streams=True).refused is None
    assert suspicion.broke(keeps_streams=True).refused == a


def test_a_stream_brings_its_strikes_from_elsewhere() -> None:
    suspicion = Suspicion()
    (a,) = _ids("a")
    suspicion.came(a, strikes=1, telling=1)
    suspicion.enter(a)
    assert suspicion.broke(keeps_streams=False).refused == a


def test_a_link_that_was_lost_elsewhere_is_not_held_against_a_stream() -> None:
    suspicion = Suspicion()
    (a,) = _ids("a")
    suspicion.came(a, strikes=1, telling=0)
    suspicion.enter(a)
    assert suspicion.broke(keeps_streams=False).refused is None
    assert (suspicion.strikes(a), suspicion.telling(a)) == (2, 1)


def test_a_suspect_that_leaves_does_not_hold_up_the_others() -> None:
    suspicion, (a, b, c) = _crowd("a", "b", "c")
    suspicion.broke(keeps_streams=True)
    suspicion.broke(keeps_streams=True)
    suspicion.left(a)
    suspicion.enter(b)
    suspicion.left(b)
    assert suspicion.may_enter(c)
    suspicion.enter(c)
    suspicion.left(c)
    assert suspicion.is_calm


def test_one_that_came_last_when_the_engine_broke_again_is_tested_before_it_goes_on() -> None:
    suspicion, (a, b) = _crowd("a", "b")
    suspicion.broke(keeps_streams=True)
    suspicion.broke(keeps_streams=True)
    suspicion.enter(a)
    verdict = suspicion.broke(keeps_streams=True)
    assert verdict.refused == a
    assert verdict.all_come_out
    suspicion.left(a)
    assert list(suspicion.inside) == []
    assert suspicion.may_enter(b)


def test_patience_ends_with_failures_in_a_row() -> None:
    patience = Patience(max_failures=2)
    for _ in range(10):
        patience.failed()
        patience.failed()
        assert not patience.is_exhausted
        patience.works()
    patience.failed()
    patience.failed()
    patience.failed()
    assert patience.is_exhausted


@settings(max_examples=60)
@given(
    num_good=st.integers(0, 7),
    num_poison=st.integers(0, 3),
    keeps_streams=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_poison_is_refused_and_nobody_else_whatever_the_order(
    num_good: int, num_poison: int, keeps_streams: bool, order: Random
) -> None:
    """A toy engine: it breaks whenever poison is in a round; else everyone gets a token."""
    good = _ids(*[f"good {i}" for i in range(num_good)])
    poison = _ids(*[f"poison {i}" for i in range(num_poison)])
    suspicion = Suspicion()
    waiting = good + poison
    for request_id in waiting:
        suspicion.came(request_id)
    refused: list[RequestId] = []
    tokens = dict.fromkeys(good, 0)
    num_broken = 0
    for _ in range(60):
        order.shuffle(waiting)
        for request_id in tuple(waiting):
            if suspicion.may_enter(request_id):
                suspicion.enter(request_id)
                waiting.remove(request_id)
        inside = list(suspicion.inside)
        if set(inside) & set(poison):
            num_broken += 1
            verdict = suspicion.broke(keeps_streams=keeps_streams)
            if verdict.refused is not None:
                refused.append(verdict.refused)
                suspicion.left(verdict.refused)
            out = [i for i in inside if i not in suspicion.inside and i != verdict.refused]
            waiting += out
            continue
        for request_id in inside:
            tokens[request_id] += 1
            if suspicion.delivered(request_id):
                suspicion.came_out(request_id)
                waiting.append(request_id)
    assert sorted(refused) == sorted(poison)
    assert all(count > 30 for count in tokens.values())
    assert num_broken <= (2 + num_poison if num_poison else 0)
    assert suspicion.is_calm


def test_lost_links_refuse_nobody_until_they_are_too_many_to_be_chance() -> None:
    suspicion = Suspicion(suspect_after=2, refuse_after=6)
    suspicion.came(RequestId("lone"))
    for _ in range(5):
        suspicion.enter(RequestId("lone"))
        assert suspicion.broke(keeps_streams=False, is_telling=False).refused is None
    suspicion.enter(RequestId("lone"))
    assert suspicion.broke(keeps_streams=False, is_telling=False).refused == "lone"


def test_one_death_after_lost_links_is_not_enough_and_two_are() -> None:
    suspicion = Suspicion(suspect_after=2, refuse_after=6)
    suspicion.came(RequestId("lone"))
    for is_telling in (False, False, True):
        suspicion.enter(RequestId("lone"))
        assert suspicion.broke(keeps_streams=False, is_telling=is_telling).refused is None
    suspicion.enter(RequestId("lone"))
    assert suspicion.broke(keeps_streams=False, is_telling=True).refused == "lone"
