"""The belief book: priors from pools, limits, checkpoints."""

import json
import pickle
import time
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.control.belief import Belief
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.routing import BeliefBook
from eesd_dist.routing.beliefs import (
    Priors,
    pools_from_json,
    priors_to_json,
    read_snapshot,
    write_snapshot,
)
from eesd_dist.types import Outcome, RequestId


def rid(name: object) -> RequestId:
    return RequestId(str(name))


def outcome(name: object, drafted: int, accepted: int) -> Outcome:
    return Outcome(request_id=rid(name), num_drafted=drafted, num_accepted=accepted)


def serve(
    book: BeliefBook,
    name: object,
    workload: str,
    *,
    accepted: int,
    rounds: int = 30,
    caller: str = "",
) -> None:
    """Runs one request from admission to its end, drafting 8 tokens in every round."""
    book.admit(rid(name), workload, caller=caller)
    for _ in range(rounds):
        book.observe([outcome(name, 8, accepted)])
    book.finish(rid(name))


def test_the_first_request_ever_starts_undecided() -> None:
    plan = BeliefBook().admit(rid("a"))
    assert plan.belief == Belief()


def test_a_new_request_is_warmed_by_its_class() -> None:
    book = BeliefBook()
    serve(book, 1, "code", accepted=8)
    serve(book, 2, "poetry", accepted=0)
    assert book.admit(rid(3), "code").belief.mean > 0.9
    assert book.admit(rid(4), "poetry").belief.mean < 0.1


def test_warmed_is_not_fixed() -> None:
    """After fifty easy requests, a few hard rounds change the belief of a request."""
    book = BeliefBook(prior_weight=16)
    for name in range(50):
        serve(book, name, "code", accepted=8)
    assert book.admit(rid("hard"), "code").belief.weight <= 16
    for _ in range(20):
        plan = book.observe([outcome("hard", 8, 0)])[rid("hard")]
    assert plan.belief.mean < 0.5


def test_a_class_never_met_borrows_from_all_others() -> None:
    book = BeliefBook()
    serve(book, 1, "code", accepted=8)
    assert book.admit(rid(2), "never met").belief.mean > 0.9


def test_the_pool_gets_a_requests_own_rounds_and_no_prior_twice() -> None:
    book = BeliefBook(pool_discount=1.0, discount=1.0)
    serve(book, 1, "code", accepted=4, rounds=2)
    serve(book, 2, "code", accepted=4, rounds=2)
    assert book.pools()["code"] == Belief(alpha=17.0, beta=5.0, num_rounds=4)


def test_a_pool_follows_a_world_that_changes() -> None:
    book = BeliefBook(pool_discount=0.8)
    for name in range(100):
        serve(book, name, "code", accepted=8, rounds=10)
    for name in range(100, 120):
        serve(book, name, "code", accepted=0, rounds=10)
    assert book.prior("code").mean < 0.2


def test_admitted_again_a_request_keeps_its_belief() -> None:
    book = BeliefBook()
    book.admit(rid("a"), "code")
    plan = book.observe([outcome("a", 4, 4)])[rid("a")]
    assert book.admit(rid("a"), "code") == plan


def test_every_request_heard_of_gets_one_plan_with_all_its_rounds() -> None:
    book = BeliefBook()
    plans = book.observe([outcome("a", 4, 4), outcome("b", 2, 0), outcome("a", 4, 1)])
    assert set(plans) == {rid("a"), rid("b")}
    assert plans[rid("a")].belief.num_rounds == 2


def test_a_plan_costs_the_same_however_many_requests_live() -> None:
    """Ten thousand times as many: anything but a constant would be far beyond this bound."""
    round_s: list[float] = []
    request_s: list[float] = []
    for num_live in (1, 10_000):
        book = BeliefBook()
        for number in range(num_live):
            book.admit(rid(number), f"class {number % 8}")
        outcomes = cycle([outcome(number, 4, 2) for number in range(num_live)])
        new = (rid(f"new {number}") for number in count())
        round_s.append(median_s(lambda: book.observe([next(outcomes)])))  # noqa: B023
        request_s.append(median_s(lambda: come_and_go(book, next(new))))  # noqa: B023
    assert round_s[1] < 10 * round_s[0]
    assert request_s[1] < 10 * request_s[0]


def come_and_go(book: BeliefBook, request_id: RequestId) -> None:
    book.admit(request_id, "class 0")
    book.finish(request_id)


def median_s(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(300):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)


def test_finishing_the_unknown_is_nothing() -> None:
    BeliefBook().finish(rid("who"))


def test_requests_that_never_finish_are_bounded_and_what_they_taught_is_kept() -> None:
    book = BeliefBook(max_live=10)
    for name in range(100):
        book.admit(rid(name), "code")
        book.observe([outcome(name, 8, 8)])
    assert book.num_live == 10
    assert book.prior("code").mean > 0.8


def test_workload_names_are_bounded() -> None:
    book = BeliefBook(max_workloads=5)
    for name in range(50):
        serve(book, name, f"class {name}", accepted=4, rounds=1)
    assert set(book.pools()) == {f"class {name}" for name in range(45, 50)}


def test_a_caller_that_lies_about_a_class_moves_anothers_prior_by_eight_judged_tokens() -> None:
    book = BeliefBook()
    for name in range(5):
        serve(book, name, "code", accepted=8, caller="honest")
    before = book.prior("code", caller="honest")
    for name in range(500):
        serve(book, f"lie {name}", "code", accepted=0, caller="hostile")
    after = book.prior("code", caller="honest")
    weight = book.pools()["code"].weight
    assert weight > 1000
    assert before.mean - after.mean < 0.05
    fresh = book.prior("code", caller="newcomer")
    assert 0.4 < fresh.mean < 0.6, "one voice each"
    assert book.prior("code", caller="hostile").mean < 0.15, "it has itself to blame"


def test_a_caller_that_is_first_to_name_a_class_gives_others_little_evidence() -> None:
    book = BeliefBook()
    for name in range(100):
        serve(book, name, "team/code", accepted=0, caller="hostile")
    assert book.prior("team/code", caller="honest").weight <= 8.0
    serve(book, "own", "team/code", accepted=8, caller="honest")
    assert book.prior("team/code", caller="honest").mean > 0.9
    assert book.prior("new class", caller="honest").mean > 0.9, "of all classes, its own in full"


def test_a_caller_that_names_many_classes_loses_its_own_pools_only() -> None:
    book = BeliefBook(max_workloads=5, max_pools=12)
    for caller in ("a", "b"):
        serve(book, caller, f"class of {caller}", accepted=8, caller=caller)
    for number in range(100):
        serve(book, f"h{number}", f"h{number}", accepted=0, rounds=1, caller="hostile")
    assert book.pools().keys() == {"class of a", "class of b", *(f"h{n}" for n in range(95, 100))}
    for caller in ("c", "d"):  # more than all may have: the callers with most lose some
        for number in range(5):
            serve(book, f"{caller}{number}", f"{caller}{number}", accepted=8, caller=caller)
    by_caller = book.priors().by_caller
    assert sum(map(len, by_caller.values())) == 12
    assert {"class of a", "class of b"} <= book.pools().keys()
    assert max(map(len, by_caller.values())) - min(len(by_caller[name]) for name in "cd") <= 1


def test_pools_that_an_operator_loads_count_for_all_callers() -> None:
    book = BeliefBook()
    serve(book, 1, "code", accepted=8, caller="before")
    book.adopt(Priors(pools={"code": Belief(alpha=1.0, beta=900.0)}, is_pinned=False))
    assert book.prior("code", caller="any").mean < 0.1
    for name in range(20):
        serve(book, name, "code", accepted=8, caller="any")
    assert book.prior("code", caller="any").mean > 0.9, "and its own rounds soon count for more"


def test_a_caller_is_no_other_after_a_restart_and_unknown_requests_are_of_no_caller() -> None:
    book = BeliefBook()
    book.admit(rid("live"), "code", caller="a")
    book.observe([outcome("live", 8, 8)])
    serve(book, 1, "code", accepted=0, caller="b")
    twin = BeliefBook()
    twin.restore(json.loads(json.dumps(book.snapshot())))
    for copy in (book, twin):
        copy.observe([outcome("unheard of", 8, 0)])
        copy.finish(rid("unheard of"))
        copy.finish(rid("live"))
    assert twin.snapshot() == book.snapshot()
    assert {caller for caller, _ in twin.names()} == {"a", "b", "?"}
    assert twin.prior("code", caller="a").mean > twin.prior("code", caller="b").mean


def test_pinned_pools_stay_as_they_are_and_a_requests_own_rounds_still_count() -> None:
    book = BeliefBook()
    serve(book, 1, "code", accepted=8)
    before = book.pools()
    book.pin()
    serve(book, 2, "code", accepted=0)
    serve(book, 3, "never met", accepted=0)
    assert book.pools() == before
    first = book.admit(rid(4), "code").belief
    assert book.observe([outcome(4, 8, 0)])[rid(4)].belief.mean < first.mean
    book.finish(rid(4))
    assert book.admit(rid(5), "code").belief == first
    book.unpin()
    book.finish(rid(5))
    serve(book, 6, "code", accepted=0)
    assert book.prior("code").mean < first.mean


def test_pools_that_are_handed_on_warm_requests_of_another_book() -> None:
    source, target = BeliefBook(), BeliefBook()
    serve(source, 1, "code", accepted=8)
    serve(target, 1, "code", accepted=0)
    live_prior = target.admit(rid("under way"), "code")
    source.pin()
    target.adopt(source.priors())
    assert target.prior("code") == source.prior("code")
    assert target.prior("never met") == source.prior("never met")
    assert target.is_pinned
    assert target.admit(rid("under way"), "code") == live_prior


def test_a_version_is_another_one_exactly_when_priors_may_be_others() -> None:
    book = BeliefBook()
    seen = [book.version]

    def is_other() -> bool:
        seen.append(book.version)
        return seen[-1] != seen[-2]

    book.admit(rid(1), "code")
    book.observe([outcome(1, 4, 2)])
    assert not is_other()
    book.finish(rid(1))
    assert is_other()
    book.pin()
    assert is_other()
    serve(book, 2, "code", accepted=1)
    assert not is_other()
    book.unpin()
    assert is_other()


def test_live_requests_are_counted_by_class() -> None:
    book = BeliefBook(max_live=3)
    for name, workload in enumerate(["code", "code", "poetry", "poetry"]):
        book.admit(rid(name), workload)
        book.admit(rid(name), workload)
    assert book.live_by_workload() == {"code": 1, "poetry": 2}  # the oldest one was removed
    book.finish(rid(1))
    assert book.live_by_workload() == {"poetry": 2}


def test_requests_without_a_reported_end_are_ended_after_a_page_of_silence() -> None:
    book = BeliefBook()
    for name in ("lost", "admitted again", "heard of"):
        book.admit(rid(name), "code")
        book.observe([outcome(name, 8, 8)])
    assert book.turn_page() == 0
    book.observe([outcome("heard of", 8, 8)])
    book.admit(rid("admitted again"), "code")
    assert book.turn_page() == 1
    assert book.num_live == 2
    assert book.pools()["code"].weight == 8.0
    assert book.turn_page() == 2


def test_a_copy_does_not_follow() -> None:
    book = BeliefBook()
    serve(book, 1, "code", accepted=8)
    book.admit(rid("live"), "code")
    copy = book.copy()
    before = copy.snapshot()
    serve(book, 2, "code", accepted=0)
    book.observe([outcome("live", 8, 0)])
    assert copy.snapshot() == before
    assert copy.prior("code") != book.prior("code")


rounds = st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
events = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("xy"), rounds, st.booleans()))


@given(events)
def test_a_restored_book_is_the_same_book(
    history: list[tuple[int, str, tuple[int, int], bool]],
) -> None:
    book = BeliefBook(max_live=4)
    for name, workload, (drafted, accepted), finishes in history:
        book.admit(rid(name), workload)
        book.observe([outcome(name, drafted, accepted)])
        if finishes:
            book.finish(rid(name))
    twin = BeliefBook(max_live=4)
    twin.restore(json.loads(json.dumps(book.snapshot())))
    assert twin.snapshot() == book.snapshot()
    assert twin.admit(rid("new"), "x") == book.admit(rid("new"), "x")
    assert pickle.loads(pickle.dumps(book)).snapshot() == book.snapshot()


def test_a_large_book_is_saved_piece_by_piece_as_what_it_knows(tmp_path: Path) -> None:
    book, file = BeliefBook(), tmp_path / "beliefs.json"
    for name in range(500):
        book.admit(rid(name), "code")
        book.observe([outcome(name, 8, name % 9)])
    book.pin()
    book.save(file)
    assert json.loads(file.read_text()) == book.snapshot()


def test_pools_alone_are_saved_and_read_back(tmp_path: Path) -> None:
    book, file = BeliefBook(), tmp_path / "priors.json"
    serve(book, 1, "code", accepted=8)
    book.admit(rid(2), "code")
    write_snapshot(file, priors_to_json(book.priors()))
    assert pools_from_json(read_snapshot(file)) == book.pools()
    with pytest.raises(CheckpointError, match="eesd controllers save"):
        read_snapshot(tmp_path / "nothing.json")


def test_a_checkpoint_is_complete_and_leaves_no_other_file(tmp_path: Path) -> None:
    book, file = BeliefBook(), tmp_path / "beliefs.json"
    serve(book, 1, "code", accepted=8)
    book.save(file)
    book.save(file)
    assert list(tmp_path.iterdir()) == [file]
    twin = BeliefBook()
    twin.load(file)
    assert twin.snapshot() == book.snapshot()


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_checkpoint_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "beliefs.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=r"beliefs\.json"):
        BeliefBook().load(file)


@pytest.mark.parametrize(
    "change",
    [{"version": 9}, {"pools": []}, {"live": {}}, {"live": [{"belief": "high"}]}],
)
def test_a_snapshot_of_another_form_is_refused_and_changes_nothing(
    change: dict[str, object],
) -> None:
    book = BeliefBook()
    serve(book, 1, "code", accepted=8)
    before = book.snapshot()
    with pytest.raises(ConfigError, match="belief snapshot"):
        book.restore(before | change)
    assert book.snapshot() == before
