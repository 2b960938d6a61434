"""Regret, computed from logs alone."""

from random import Random

import pytest

from eesd_dist.control.cost import CostModel
from eesd_dist.control.regret import hindsight, oracle_length, position_rates
from eesd_dist.types import Branch, Outcome
from tests.unit.control.worlds import ONE, evidence, outcome

COST = CostModel(draft_step_s=0.2, verify_s=tuple(1 + 0.02 * i for i in range(9)))


def _world(rng: Random, *, theta: float, lengths: list[int]) -> list[Outcome]:
    rounds = []
    for length in lengths:
        survived = next((i for i in range(length) if rng.random() >= theta), length)
        rounds.append(outcome(length, survived))
    return rounds


def test_one_round_tells_what_shorter_lengths_would_have_yielded() -> None:
    assert position_rates([outcome(4, 2)], max_length=4) == (1.0, 1.0, 0.0, 0.0)


def test_lengths_beyond_a_draft_that_survived_whole_are_censored_and_not_failed() -> None:
    rounds = [outcome(2, 2)] * 10 + [outcome(4, 4)]
    assert position_rates(rounds, max_length=4) == (1.0, 1.0, 1.0, 1.0)


def test_the_best_fixed_length_in_hindsight_is_the_one_that_wins_when_tried() -> None:
    """Compares the estimate from mixed lengths with real drafts of each length."""
    rng = Random(9)
    mixed = _world(rng, theta=0.75, lengths=[rng.randrange(1, 9) for _ in range(6_000)])
    judged = hindsight(mixed, cost=COST, max_length=8)
    for length in range(9):
        tried = _world(rng, theta=0.75, lengths=[length] * 3_000)
        rate = hindsight(tried, cost=COST, max_length=8).rate
        assert judged.fixed_rates[length] == pytest.approx(rate, rel=0.04)
    assert judged.best_fixed_rate == max(judged.fixed_rates)


def test_the_oracle_is_never_beaten() -> None:
    rng = Random(10)
    rounds = _world(rng, theta=0.6, lengths=[rng.randrange(0, 9) for _ in range(500)])
    judged = hindsight(rounds, cost=COST, max_length=8)
    assert judged.oracle_rate > judged.best_fixed_rate
    assert 0.0 < judged.oracle_regret < 1.0
    assert oracle_length(outcome(5, 3)) == 3


def test_a_draft_that_was_exactly_right_has_no_regret() -> None:
    judged = hindsight([outcome(3, 3)] * 5, cost=COST, max_length=8)
    assert judged.oracle_regret == pytest.approx(0.0)


def test_no_rounds_are_plain_decoding() -> None:
    judged = hindsight([], cost=COST, max_length=4)
    assert judged.rate == judged.plain_rate == judged.best_fixed_rate
    assert judged.best_fixed_length == 0


def test_rounds_that_drafted_trees_are_left_out() -> None:
    branch = Branch(depth=0, num_offered=2, chosen_rank=1, evidence=evidence())
    tree = Outcome(request_id=ONE, num_drafted=2, num_accepted=1, branches=(branch,))
    chains = [outcome(3, 1), outcome(2, 2)]
    mixed = hindsight([*chains, tree], cost=COST, max_length=4)
    assert mixed == hindsight(chains, cost=COST, max_length=4)
    assert position_rates([tree], max_length=2) == (0.0, 0.0)
