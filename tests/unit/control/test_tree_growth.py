"""Growth of trees: the controller decides the depth, survival probabilities the width."""

import pytest

from eesd_dist.config import SpeculationConfig, TreeConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.tree_growth import FLOOR, Offer
from eesd_dist.types import (
    Branch,
    Evidence,
    Outcome,
    RequestId,
    TreeShape,
)

KEY = RequestId("a")


def sure(probability: float, *, depth: int = 0) -> Evidence:
    """Returns evidence with this probability, which is used as it is without a calibration."""
    return Evidence(depth=depth, top1_prob=probability)


def offer(
    rank: int = 0,
    *,
    parent: int = -1,
    depth: int = 0,
    probability: float = 0.6,
    shape: TreeShape = "dynamic",
    key: RequestId = KEY,
) -> Offer:
    evidence = sure(probability, depth=depth)
    return Offer(request_id=key, evidence=evidence, parent=parent, rank=rank, shape=shape)


def policy(*names: str, **config: object) -> DraftPolicy:
    policy_ = DraftPolicy(
        speculation=SpeculationConfig(tree=TreeConfig(), **config),  # type: ignore[arg-type]
        cost=None,
        calibrator=None,
    )
    ids = [RequestId("abc"[i]) for i in range(len(names))]
    for request_id, name in zip(ids, names, strict=True):
        policy_.admit(request_id, name, Belief())
    policy_.begin_round(ids)
    return policy_


def test_a_static_tree_goes_as_deep_as_a_chain_and_as_wide_as_it_was_offered() -> None:
    policy_ = policy("fixed", fixed_length=2)
    for depth, parents in enumerate([(-1,), (0, 1), (2, 3, 4, 5)]):
        assert policy_.worth_a_guess([KEY]) == (frozenset() if depth == 2 else {KEY})
        offers = [
            offer(rank, parent=parent, depth=depth, shape="static")
            for rank in (0, 1)
            for parent in parents
        ]
        assert policy_.choose(offers) == [depth < 2] * len(offers)


@pytest.mark.usefixtures("documented_controller")
def test_a_controller_is_asked_once_a_level_and_about_the_likeliest_token() -> None:
    policy_ = policy("threshold")
    level = [
        offer(0, probability=0.6, shape="static"),
        offer(0, parent=1, probability=0.2, shape="static"),
        offer(1, probability=0.6, shape="static"),
    ]
    assert policy_.choose(level) == [True, True, True]
    assert policy_.choose([level[1], level[0]]) == [False, False]


def test_a_dynamic_tree_takes_what_is_likely_to_survive() -> None:
    policy_ = policy("fixed", fixed_length=5)
    first = policy_.choose([offer(0, probability=0.6), offer(1, probability=0.6)])
    assert first == [True, True]  # 0.6, and a third of the remaining 0.4
    second = policy_.choose(
        [
            offer(0, parent=0, depth=1, probability=0.5),
            offer(0, parent=1, depth=1, probability=0.5),
            offer(1, parent=0, depth=1, probability=0.5),
            offer(1, parent=1, depth=1, probability=0.5),
        ]
    )
    assert second == [True, False, False, False]
    assert 0.6 * 0.5 > FLOOR > 0.6 * 0.5 / 3 > 0.4 / 3 * 0.5
    # The third token is number 2: the survival of its children includes its own.
    third = policy_.choose([offer(0, parent=2, depth=2, probability=0.45)])
    assert third == [FLOOR < 0.6 * 0.5 * 0.45]
    policy_.begin_round([KEY])
    assert policy_.choose([offer(0, probability=0.1)]) == [False]


@pytest.mark.parametrize("hits", [True, False])
def test_what_alternatives_are_worth_is_learnt_from_verdicts(hits: bool) -> None:
    policy_ = policy("fixed", fixed_length=5)
    branch = Branch(depth=0, num_offered=2, chosen_rank=1 if hits else -1, evidence=sure(0.8))
    outcome = Outcome(request_id=KEY, num_drafted=2, num_accepted=int(hits), branches=(branch,))
    for _ in range(40):
        policy_.observe([outcome])
    policy_.begin_round([KEY])
    assert policy_.choose([offer(0, probability=0.8), offer(1, probability=0.8)]) == [True, hits]


def test_requests_of_all_shapes_are_decided_together_and_apart() -> None:
    policy_ = policy("fixed", "fixed", "fixed", fixed_length=1)
    a, b, c = (RequestId(name) for name in "abc")
    offers = [
        offer(shape="none", key=a, probability=0.01),
        offer(0, shape="dynamic", key=b, probability=0.01),
        offer(0, shape="static", key=c, probability=0.01),
        offer(1, shape="static", key=c, probability=0.01),
    ]
    assert policy_.choose(offers) == [True, False, True, True]
    assert policy_.choose(offers) == [False] * 4


def test_a_belief_learns_of_first_choices_alone_and_only_where_they_were_judged() -> None:
    def branch(depth: int, chosen_rank: int) -> Branch:
        return Branch(depth=depth, num_offered=2, chosen_rank=chosen_rank, evidence=sure(0.5))

    # The first choice is right, then an alternative, then no drafted token: one right, two wrong.
    tree = Outcome(
        request_id=KEY,
        num_drafted=9,
        num_accepted=2,
        branches=(branch(0, 0), branch(1, 1), branch(2, -1)),
    )
    belief = Belief().after(tree)
    assert (belief.alpha, belief.beta) == (2, 3)
    whole = Outcome(request_id=KEY, num_drafted=3, num_accepted=1, branches=(branch(0, 0),))
    assert Belief().after(whole).weight == 1
    chain = Outcome(request_id=KEY, num_drafted=5, num_accepted=2)
    assert (chain.num_first_accepted, chain.num_first_rejected) == (2, 1)
