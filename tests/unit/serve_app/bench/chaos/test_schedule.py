"""The seeded plan of a chaos run, and its requests."""

from collections import Counter
from itertools import islice

import pytest

from eesd_dist.errors import ConfigError
from serve_app.bench.chaos.faults import FAULT_KINDS
from serve_app.bench.chaos.schedule import bodies_of, names_in, schedule


def test_one_seed_is_one_schedule_and_another_seed_another() -> None:
    def first(seed: int) -> list[object]:
        return list(islice(schedule(seed=seed), 50))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_every_turn_of_the_schedule_has_every_quick_kind_and_the_slow_ones_in_turn() -> None:
    slow = {kind for kind in FAULT_KINDS if FAULT_KINDS[kind].is_slow}
    quick = set(FAULT_KINDS) - slow
    length = len(quick) + 2
    kinds = [planned.kind for planned in islice(schedule(seed=5), 10 * length)]
    turns = [kinds[length * turn :][:length] for turn in range(10)]
    for turn in turns:
        counts = Counter(kind for kind in turn if kind in quick)
        assert counts == dict.fromkeys(quick, 1) | {"verify rank": 2}
    (first, *others) = [[kind for kind in turn if kind in slow] for turn in turns]
    assert all(len(kinds_of_turn) == 1 for kinds_of_turn in (first, *others))
    for start in (0, 5):
        assert {kind for turn in turns[start : start + 5] for kind in turn if kind in slow} == slow


def test_only_the_kinds_that_were_asked_for_are_dealt() -> None:
    assert {p.kind for p in islice(schedule(seed=1, kinds=["link", "hang"]), 20)} == {
        "link",
        "hang",
    }


def test_some_faults_come_before_the_one_before_is_mended_but_never_the_first() -> None:
    shares = []
    for seed in range(40):
        plan = list(islice(schedule(seed=seed, at_once=0.25), 50))
        assert plan[0].when_ready
        shares.append(sum(not planned.when_ready for planned in plan) / 50)
        assert max(p.gap_s for p in plan if not p.when_ready) < 1.0
    assert 0.2 < sum(shares) / len(shares) < 0.3


def test_gaps_have_the_mean_that_was_asked_for() -> None:
    gaps = [p.gap_s for p in islice(schedule(seed=0, mean_gap_s=2.0, at_once=0.0), 4000)]
    assert sum(gaps) / len(gaps) == pytest.approx(2.0, rel=0.1)


def test_requests_are_the_same_for_a_seed_and_of_every_sampling() -> None:
    prompts = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}]
    first, second = (
        bodies_of(prompts, model="m", num=80, seed=9, max_tokens=100) for _ in range(2)
    )
    assert first == second
    assert {body["temperature"] for body in first} == {0.0, 0.8, 1.0}
    assert {body["ignore_eos"] for body in first} == {True, False}
    assert len({body["seed"] for body in first}) == 80
    lengths = [body["max_tokens"] for body in first]
    assert all(isinstance(length, int) and 4 <= length <= 100 for length in lengths)
    assert len(set(lengths)) > 20


def test_a_request_is_recognised_by_the_id_that_the_service_gives_it() -> None:
    ids = ["cmpl-chaos-17-1f3b-0", "chatcmpl-chaos-1-ffff-0", "probe-12", "cmpl-other-3-0"]
    assert names_in(ids) == {"chaos-17", "chaos-1"}


def test_an_unknown_kind_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="found fault kind 'drafter', expected one of: verify rank"
    ):
        schedule(seed=0, kinds=["link", "drafter"])
