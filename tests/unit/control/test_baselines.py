"""Published controllers: their rules, and their behaviour at known acceptance rates."""

from random import Random

import pytest

from eesd_dist.control import CostModel
from eesd_dist.control.baselines import DraftVerifyController, EmaController, UcbController
from eesd_dist.types import Branch, Outcome, RequestId
from tests.unit.control.worlds import draft_length, evidence, outcome

COST = CostModel(draft_step_s=0.15, verify_s=tuple(1 + 0.03 * i for i in range(9)), round_s=0.1)


def _draft_verify(gamma: float = 0.6) -> DraftVerifyController:
    return DraftVerifyController(gamma=gamma, max_draft_tokens=8)


def _ema(ceiling: int = 8) -> EmaController:
    return EmaController(max_draft_tokens=ceiling)


def _ucb() -> UcbController:
    return UcbController(cost=COST, max_draft_tokens=4, discount=0.99)


def test_draft_verify_drafts_the_token_it_is_unsure_of_and_stops_behind_it() -> None:
    one = _draft_verify(0.6)
    one.begin_round()
    assert [one.keep_drafting(evidence(p)) for p in (0.9, 0.5, 0.9)] == [True, True, False]
    assert draft_length(one, ceiling=8, top1_prob=0.7) == 8


def test_draft_verify_moves_its_threshold_by_the_published_rule() -> None:
    one, gamma, mean = _draft_verify(0.6), 0.6, 0.0
    for drafted, accepted in [(4, 4), (8, 8), (5, 5), (6, 6), (5, 5), (8, 8), (3, 0), (4, 4)]:
        one.observe(outcome(drafted, accepted))
        mean = 0.5 * mean + 0.5 * accepted / drafted
        step = 0.01 if mean < 0.9 else 0.0 if drafted == 8 else -0.01
        gamma = 0.9 * gamma + 0.1 * (gamma + step)
        assert one.gamma == pytest.approx(gamma)
    before = one.gamma
    one.observe(outcome(0, 0))
    assert one.gamma == before


def test_ema_climbs_its_ladder_and_comes_down_by_the_published_rule() -> None:
    one = _ema()
    assert one.length == 3
    for accepted, length_after in ((7, 7), (0, 1), (1, 3)):
        for _ in range(40):
            one.observe(outcome(one.length, min(accepted, one.length)))
        assert one.length == length_after
    assert draft_length(one, ceiling=8) == 3


def test_ema_waits_for_its_warm_up_and_its_interval() -> None:
    one = _ema()
    lengths = []
    for _ in range(16):
        one.observe(outcome(3, 0))
        lengths.append(one.length)
    assert lengths == [3] * 14 + [1, 1]


def test_ema_keeps_to_the_lengths_that_are_allowed() -> None:
    assert _ema(ceiling=2).length == 1
    assert EmaController(max_draft_tokens=5, ladder=(6, 9)).length == 5


def test_ucb_tries_every_length_once_and_then_keeps_to_the_one_that_earns_most() -> None:
    one, rng = _ucb(), Random(3)
    lengths = []
    for _ in range(1_200):
        length = draft_length(one, ceiling=4)
        lengths.append(length)
        accepted = next((i for i in range(length) if rng.random() >= 0.9), length)
        one.observe(outcome(length, accepted))
    assert lengths[:5] == [0, 1, 2, 3, 4]
    late = lengths[600:]
    assert max(range(5), key=late.count) == 4
    assert min(late.count(length) for length in range(5)) > 0  # continues to explore


def test_ucb_follows_a_world_that_changes() -> None:
    one = _ucb()
    shares = []
    for accepts in (True, False):
        lengths = []
        for _ in range(800):
            length = draft_length(one, ceiling=4)
            lengths.append(length)
            one.observe(outcome(length, length if accepts else 0))
        shares.append(sum(length >= 3 for length in lengths[400:]) / 400)
    assert shares[0] > 0.5 > 0.45 > shares[1]


def test_ucb_counts_a_trees_depth_and_not_its_tokens() -> None:
    cost = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.02), round_s=0.05)
    ucb = UcbController(cost=cost, max_draft_tokens=5, discount=0.98)
    lengths = []
    for _ in range(200):
        ucb.begin_round()
        depth = 0
        while depth < 5 and ucb.keep_drafting(evidence(0.9, depth=depth)):
            depth += 1
        lengths.append(depth)
        branches = tuple(
            Branch(depth=at, num_offered=3, chosen_rank=0, evidence=evidence(0.9, depth=at))
            for at in range(depth)
        )
        ucb.observe(
            Outcome(
                request_id=RequestId("tree"),
                num_drafted=3 * depth,
                num_accepted=depth,
                branches=branches,
            )
        )
    assert lengths[100:].count(5) > 50
