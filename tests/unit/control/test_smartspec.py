"""SmartSpec: the formula of the paper, and its lengths by load and acceptance."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.base import ControlSetup, RoundLoad
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.smartspec import SmartSpec
from eesd_dist.control.tree_growth import Offer, TreeGrowth
from eesd_dist.types import Outcome, RequestId
from tests.unit.control.worlds import Text, evidence, serve, text

IDLE = CostModel(draft_step_s=0.05, verify_s=tuple(1 + 0.001 * i for i in range(9)), round_s=0.1)
"""The verifier is bound by reading weights: up to nine rows are nearly free."""
LOADED = CostModel(
    draft_step_s=0.05, verify_s=(1.0,) * 9, verify_rows_s=((10, 1.1), (330, 33.0)), round_s=0.1
)
CEILING = 8


def ids(count: int) -> list[RequestId]:
    return [RequestId(f"{number}") for number in range(count)]


def load(count: int, *, others: int = 0, num_known: int = 0, overlapped: bool = False) -> RoundLoad:
    return RoundLoad(
        request_ids=tuple(ids(count)),
        num_requests=count + others,
        num_known=max(count + others, num_known),
        overlapped=overlapped,
    )


def accepting(rate: float, *, weight: float = 500.0) -> Belief:
    return Belief(alpha=weight * rate, beta=weight * (1.0 - rate), num_rounds=1)


def smartspec(
    cost: CostModel, *, belief: Belief, count: int = 1, discount: float = 0.98
) -> SmartSpec:
    setup = ControlSetup(
        speculation=SpeculationConfig(max_draft_tokens=CEILING),
        cost=cost,
        calibrator=Calibrator(),
        trees=TreeGrowth(calibrator=Calibrator(), discount=0.98),
    )
    control = SmartSpec(setup)
    for request_id in ids(count):
        control.admit(request_id, belief)
    return control


def policy(cost: CostModel, *, belief: Belief, count: int) -> DraftPolicy:
    speculation = SpeculationConfig(controller="smartspec", max_draft_tokens=CEILING)
    policy_ = DraftPolicy(speculation=speculation, cost=cost, calibrator=None)
    for request_id in ids(count):
        policy_.admit(request_id, None, belief)
    return policy_


@given(
    rate=st.floats(0.01, 0.99),
    count=st.integers(1, 40),
    others=st.integers(0, 8),
    num_known=st.integers(0, 300),
    overlapped=st.booleans(),
    cost=st.sampled_from([IDLE, LOADED]),
)
def test_its_length_has_the_highest_goodput_of_the_papers_formula(
    rate: float, count: int, others: int, num_known: int, overlapped: bool, cost: CostModel
) -> None:
    round_ = load(count, others=others, num_known=num_known, overlapped=overlapped)

    def goodput(length: int) -> float:
        tokens = count * (1 - rate ** (length + 1)) / (1 - rate) + others
        lengths = [length] * count + [0] * others
        return tokens / cost.batch_seconds(
            lengths, num_known=round_.num_known, overlapped=overlapped
        )

    chosen = smartspec(cost, belief=accepting(rate), count=count).length_for(round_)
    assert goodput(chosen) == pytest.approx(max(goodput(k) for k in range(CEILING + 1)))


def test_where_all_is_accepted_and_the_batch_is_small_it_drafts_all_it_may() -> None:
    assert smartspec(IDLE, belief=accepting(0.99)).length_for(load(1)) == CEILING


@pytest.mark.parametrize(("rate", "count"), [(0.02, 1), (0.5, 32)])
def test_at_low_acceptance_or_high_load_it_drafts_nothing_and_spares_the_exit_head(
    rate: float, count: int
) -> None:
    policy_ = policy(LOADED, belief=accepting(rate), count=count)
    policy_.begin_round(ids(count))
    assert policy_.worth_a_guess(ids(count)) == frozenset()


def test_the_length_falls_as_the_batch_grows() -> None:
    control = smartspec(LOADED, belief=accepting(0.8), count=64)
    lengths = [control.length_for(load(count)) for count in (1, 2, 4, 8, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_all_requests_of_a_round_get_the_same_length() -> None:
    policy_, three = policy(IDLE, belief=accepting(0.5), count=3), ids(3)
    policy_.begin_round(three)
    levels = 0
    while policy_.worth_a_guess(three):
        offers = [
            Offer(request_id=request_id, evidence=evidence(top1_prob, depth=levels))
            for request_id, top1_prob in zip(three, (0.01, 0.5, 0.99), strict=True)
        ]
        assert policy_.choose(offers) == [True, True, True]
        levels += 1
    assert 0 < levels < CEILING


def test_acceptance_is_a_moving_average_of_its_own_requests_judged_tokens() -> None:
    control = smartspec(IDLE, belief=accepting(0.99), count=2)
    own_id, other = ids(2)[0], RequestId("of another controller")

    def judged(request_id: RequestId) -> Outcome:
        return Outcome(request_id=request_id, num_drafted=8, num_accepted=0)

    for _ in range(400):
        control.observe([judged(other)])
    assert control.length_for(load(2)) == CEILING
    for _ in range(400):
        control.observe([judged(own_id)])
    assert control.length_for(load(2)) == 0


def test_after_long_failure_it_tries_again_and_finds_that_a_text_became_easy() -> None:
    hard_then_easy: Text = [(False, 0.5)] * 400 + [(True, 0.5)] * 1_200
    policy_ = policy(IDLE, belief=Belief(), count=0)
    served = serve(policy_, [hard_then_easy], cost=IDLE, max_running=1)
    assert sum(served.lengths[200:390]) / 190 < 0.5
    assert sum(served.lengths[-40:]) / 40 > 7


def test_in_a_steady_world_it_keeps_up_with_the_best_fixed_length_at_every_load() -> None:
    rng = Random(3)
    texts = [text(rng, ease=1.0, spread=0.3, num_tokens=120) for _ in range(48)]

    def rate(max_running: int, controller: str, length: int = 0) -> float:
        speculation = SpeculationConfig(controller=controller, fixed_length=length)
        policy_ = DraftPolicy(speculation=speculation, cost=LOADED, calibrator=None)
        return serve(policy_, texts, cost=LOADED, max_running=max_running).rate

    for max_running in (1, 4, 24):
        best_fixed = max(rate(max_running, "fixed", length) for length in range(CEILING + 1))
        assert rate(max_running, "smartspec") > 0.95 * best_fixed
