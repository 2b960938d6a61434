"""Which requests are admitted after the engine broke, with a toy engine that poison breaks."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from serve_app.pipeline.quarantine import Patience, Quarantine

from eesd_dist.types import RequestId


def _ids(*names: str) -> list[RequestId]:
    return [RequestId(name) for name in names]


def _crowd(*names: str, suspect_after: int = 2) -> tuple[Quarantine, list[RequestId]]:
    quarantine = Quarantine(suspect_after=suspect_after)
    ids = _ids(*names)
    for request_id in ids:
        quarantine.add(request_id)
        quarantine.admit(request_id)
    return quarantine, ids


def test_after_one_interruption_all_go_on_together() -> None:
    quarantine, ids = _crowd("a", "b", "c")
    interruption = quarantine.broke(keeps_streams=True)
    assert interruption.running == tuple(ids)
    assert interruption.refused is None
    assert not interruption.evicts_all
    assert list(quarantine.inside) == ids
    new = RequestId("new")
    quarantine.add(new)
    assert quarantine.may_admit(new)


def test_an_engine_that_has_dropped_its_streams_lets_them_enter_again() -> None:
    quarantine, ids = _crowd("a", "b")
    quarantine.mark_dropped(ids[0])
    assert not quarantine.may_admit(ids[0])
    assert quarantine.broke(keeps_streams=False).evicts_all
    assert all(quarantine.may_admit(request_id) for request_id in ids)


def test_a_stream_that_was_dropped_enters_again_though_the_engine_keeps_the_others() -> None:
    quarantine, (a, b) = _crowd("a", "b")
    quarantine.mark_dropped(a)
    quarantine.broke(keeps_streams=True)
    assert quarantine.may_admit(a)
    assert list(quarantine.inside) == [b]


def test_a_token_clears_a_stream_and_interruptions_with_progress_are_not_bounded() -> None:
    quarantine, (a,) = _crowd("a")
    for _ in range(100):
        interruption = quarantine.broke(keeps_streams=True)
        assert interruption.refused is None
        assert not interruption.evicts_all
        assert not quarantine.delivered(a)
        assert quarantine.crashes(a) == 0


def test_suspects_are_admitted_one_at_a_time_and_all_others_wait() -> None:
    quarantine, (a, b) = _crowd("a", "b")
    quarantine.broke(keeps_streams=False)
    quarantine.admit(a)
    quarantine.admit(b)
    assert quarantine.broke(keeps_streams=True).evicts_all
    new = RequestId("new")
    quarantine.add(new)
    assert [quarantine.may_admit(i) for i in (a, b, new)] == [True, True, False]
    quarantine.admit(a)
    assert not quarantine.may_admit(b)
    assert quarantine.delivered(a), "it makes room for the next"
    assert not quarantine.may_admit(b), "it is still in the engine"
    quarantine.release(a)
    assert [quarantine.may_admit(i) for i in (a, b, new)] == [False, True, False]
    quarantine.admit(b)
    assert not quarantine.delivered(b), "no suspect is left to be tested: it stays"
    assert [quarantine.may_admit(i) for i in (a, new)] == [True, True]


def test_a_request_that_breaks_the_engine_alone_is_refused_and_the_next_one_is_tested() -> None:
    quarantine, (a, b) = _crowd("a", "b")
    quarantine.broke(keeps_streams=False)
    quarantine.admit(a)
    quarantine.admit(b)
    assert quarantine.broke(keeps_streams=False).refused is None, "either may have been it"
    quarantine.admit(a)
    assert quarantine.broke(keeps_streams=False).refused == a
    quarantine.remove(a)
    assert quarantine.may_admit(b)


def test_one_that_is_alone_from_the_first_is_refused_after_two_engines() -> None:
    quarantine, (a,) = _crowd("a")
    assert quarantine.broke(keeps_streams=True).refused is None
    assert quarantine.broke(keeps_streams=True).refused == a


def test_a_stream_brings_its_crashes_from_another_pipeline() -> None:
    quarantine = Quarantine()
    (a,) = _ids("a")
    quarantine.add(a, crashes=1, attributable=1)
    quarantine.admit(a)
    assert quarantine.broke(keeps_streams=False).refused == a


def test_a_link_lost_in_another_pipeline_is_not_held_against_a_stream() -> None:
    quarantine = Quarantine()
    (a,) = _ids("a")
    quarantine.add(a, crashes=1, attributable=0)
    quarantine.admit(a)
    assert quarantine.broke(keeps_streams=False).refused is None
    assert (quarantine.crashes(a), quarantine.attributable(a)) == (2, 1)


def test_a_suspect_that_leaves_does_not_hold_up_the_others() -> None:
    quarantine, (a, b, c) = _crowd("a", "b", "c")
    quarantine.broke(keeps_streams=True)
    quarantine.broke(keeps_streams=True)
    quarantine.remove(a)
    quarantine.admit(b)
    quarantine.remove(b)
    assert quarantine.may_admit(c)
    quarantine.admit(c)
    quarantine.remove(c)
    assert quarantine.is_calm


def test_one_that_came_last_when_the_engine_broke_again_is_tested_before_it_goes_on() -> None:
    quarantine, (a, b) = _crowd("a", "b")
    quarantine.broke(keeps_streams=True)
    quarantine.broke(keeps_streams=True)
    quarantine.admit(a)
    interruption = quarantine.broke(keeps_streams=True)
    assert interruption.refused == a
    assert interruption.evicts_all
    quarantine.remove(a)
    assert list(quarantine.inside) == []
    assert quarantine.may_admit(b)


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
def test_poison_is_refused_and_no_other_request_whatever_the_order(
    num_good: int, num_poison: int, keeps_streams: bool, order: Random
) -> None:
    """A toy engine: it breaks whenever poison is in a round; else every request gets a token."""
    good = _ids(*[f"good {i}" for i in range(num_good)])
    poison = _ids(*[f"poison {i}" for i in range(num_poison)])
    quarantine = Quarantine()
    waiting = good + poison
    for request_id in waiting:
        quarantine.add(request_id)
    refused: list[RequestId] = []
    tokens = dict.fromkeys(good, 0)
    num_broken = 0
    for _ in range(60):
        order.shuffle(waiting)
        for request_id in tuple(waiting):
            if quarantine.may_admit(request_id):
                quarantine.admit(request_id)
                waiting.remove(request_id)
        inside = list(quarantine.inside)
        if set(inside) & set(poison):
            num_broken += 1
            interruption = quarantine.broke(keeps_streams=keeps_streams)
            if interruption.refused is not None:
                refused.append(interruption.refused)
                quarantine.remove(interruption.refused)
            out = [i for i in inside if i not in quarantine.inside and i != interruption.refused]
            waiting += out
            continue
        for request_id in inside:
            tokens[request_id] += 1
            if quarantine.delivered(request_id):
                quarantine.release(request_id)
                waiting.append(request_id)
    assert sorted(refused) == sorted(poison)
    assert all(count > 30 for count in tokens.values())
    assert num_broken <= (2 + num_poison if num_poison else 0)
    assert quarantine.is_calm


def test_lost_links_refuse_no_request_until_they_are_too_many_to_be_chance() -> None:
    quarantine = Quarantine(suspect_after=2, refuse_after=6)
    quarantine.add(RequestId("lone"))
    for _ in range(5):
        quarantine.admit(RequestId("lone"))
        assert quarantine.broke(keeps_streams=False, is_attributable=False).refused is None
    quarantine.admit(RequestId("lone"))
    assert quarantine.broke(keeps_streams=False, is_attributable=False).refused == "lone"


def test_one_death_after_lost_links_is_not_enough_and_two_are() -> None:
    quarantine = Quarantine(suspect_after=2, refuse_after=6)
    quarantine.add(RequestId("lone"))
    for is_attributable in (False, False, True):
        quarantine.admit(RequestId("lone"))
        assert (
            quarantine.broke(keeps_streams=False, is_attributable=is_attributable).refused is None
        )
    quarantine.admit(RequestId("lone"))
    assert quarantine.broke(keeps_streams=False, is_attributable=True).refused == "lone"
