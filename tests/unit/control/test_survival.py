"""Survival probabilities of tokens on a tree, compared with counts."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.control.goodput.estimates import Drift, sigmoid
from eesd_dist.control.survival import ROOT, Node, RankShares, Siblings
from eesd_dist.types import Branch, Outcome
from tests.unit.control.worlds import ONE, evidence


def _tree(*branches: tuple[int, int]) -> Outcome:
    """Takes (num_offered, chosen_rank) of each branch that the verdict reached."""
    return Outcome(
        request_id=ONE,
        num_drafted=sum(offered for offered, _ in branches),
        num_accepted=sum(chosen >= 0 for _, chosen in branches),
        branches=tuple(
            Branch(depth=depth, num_offered=offered, chosen_rank=chosen, evidence=evidence())
            for depth, (offered, chosen) in enumerate(branches)
        ),
    )


def test_siblings_share_what_the_first_choice_misses() -> None:
    family = Siblings(parent=Node(0.5, 0.4), drawn=0.6, expected=0.5)
    first, second, third = (family.next_node(share) for share in (1.0, 0.5, 0.25))
    assert first == pytest.approx((0.3, 0.2))
    assert second == pytest.approx((0.5 * 0.4 * 0.5, 0.4 * 0.5 * 0.5))
    assert third == pytest.approx((0.5 * 0.4 * 0.5 * 0.25, 0.4 * 0.5 * 0.5 * 0.25))


@given(st.floats(0, 1), st.lists(st.floats(0, 1), max_size=4))
def test_siblings_together_are_never_likelier_than_their_parent_and_come_in_order(
    theta: float, shares: list[float]
) -> None:
    family = Siblings(parent=ROOT, drawn=theta, expected=theta)
    nodes = [family.next_node(share) for share in (1.0, *shares)]
    assert sum(node.drawn for node in nodes) <= 1.0 + 1e-9
    drawn = [node.drawn for node in nodes]
    assert drawn == sorted(drawn, reverse=True)


def test_shares_of_ranks_are_learnt_from_the_branches_that_tested_them() -> None:
    rng, shares = Random(4), RankShares(discount=0.999)
    for _ in range(3_000):
        rank = next((r for r, p in enumerate((0.6, 0.5, 0.1)) if rng.random() < p), -1)
        shares.observe(_tree((3, rank)))
    assert shares.of(0) == 1.0
    assert shares.of(1) == pytest.approx(0.5, abs=0.06)
    assert shares.of(2) == pytest.approx(0.1, abs=0.06)
    assert 0.0 < shares.of(5) < 0.5


def test_a_rank_that_was_not_offered_or_not_come_to_learns_nothing() -> None:
    shares = RankShares(discount=0.9)
    before = shares.of(1)
    for outcome in (_tree((1, -1)), _tree((3, 0)), _tree()):
        shares.observe(outcome)
    assert shares.of(1) == before


def test_a_drift_finds_how_far_the_forecasts_are_off_and_follows_it() -> None:
    rng, drift = Random(6), Drift(std=1.0, memory=0.98)
    for truth in (-1.5, 1.0):
        for _ in range(1_500):
            score = rng.gauss(0.0, 1.5)
            drift.forget_a_little()
            drift.observe(score, accepted=rng.random() < sigmoid(score + truth))
        assert drift.mean == pytest.approx(truth, abs=0.45)
        assert drift.variance < 0.16


def test_a_drift_that_hears_nothing_grows_unsure_and_keeps_its_mean() -> None:
    drift = Drift(std=1.0, memory=0.98)
    for _ in range(200):
        drift.observe(0.0, accepted=False)
    mean = drift.mean
    for _ in range(500):
        drift.forget_a_little()
    assert drift.mean == mean < -2.0
    assert drift.variance == pytest.approx(1.0)
    assert sigmoid(-1e6) == 0.0
