"""Requests and the controllers that they name, through the interface of the engine."""

import pytest

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.control.tree_growth import Offer
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.types import RequestId
from tests.unit.control.worlds import ONE, evidence, outcome

COST = CostModel(draft_step_s=0.15, verify_s=tuple(1 + 0.03 * i for i in range(9)), round_s=0.1)
HOPELESS = Belief(alpha=1.0, beta=400.0, num_rounds=400)


def policy(controller: str = "beta", **config: object) -> DraftPolicy:
    speculation = SpeculationConfig(controller=controller, **config)  # type: ignore[arg-type]
    return DraftPolicy(speculation=speculation, cost=COST, calibrator=None)


def drafted(policy_: DraftPolicy, *, rounds: int = 50) -> int:
    """Returns how often a first token was drafted for the request."""
    count = 0
    for _ in range(rounds):
        policy_.begin_round([ONE])
        if policy_.worth_a_guess([ONE]):
            count += policy_.choose([Offer(request_id=ONE, evidence=evidence(0.9))])[0]
    return count


def test_a_controller_that_needs_no_evidence_spares_the_exit_head_its_last_guess() -> None:
    policy_ = policy("fixed", fixed_length=2)
    policy_.admit(ONE, None, Belief())
    policy_.begin_round([ONE])
    offer = Offer(request_id=ONE, evidence=evidence())
    for _ in range(2):
        assert policy_.worth_a_guess([ONE]) == {ONE}
        assert policy_.worth_a_guess([ONE]) == {ONE}  # asked twice, the answer is the same
        assert policy_.choose([offer]) == [True]
    assert policy_.worth_a_guess([ONE]) == frozenset()


def test_every_request_of_a_round_is_answered_by_the_controller_it_names() -> None:
    policy_ = policy("goodput", fixed_length=0)
    ids = {name: RequestId(name) for name in ("fixed", "goodput", "calibration")}
    for name, request_id in ids.items():
        policy_.admit(request_id, name, Belief())
    policy_.begin_round(ids.values())
    offers = [Offer(request_id=i, evidence=evidence(0.95)) for i in ids.values()]
    assert policy_.choose(offers) == [False, True, True]
    assert policy_.needs_probs([ids["calibration"]])
    assert not policy_.needs_probs([ids["fixed"]])
    assert policy_.needs_probs(ids.values())


@pytest.mark.parametrize("name", CONTROLLER_NAMES)
def test_a_request_that_has_ended_is_forgotten_and_its_late_verdict_passed_over(name: str) -> None:
    policy_ = policy(name)
    policy_.admit(ONE, None, Belief())
    assert policy_.live() == (ONE,)
    policy_.end(ONE)
    policy_.end(ONE)
    policy_.observe([outcome(4, 0)])
    assert policy_.live() == ()
    policy_.admit(ONE, None, Belief())  # the id may come back
    drafted(policy_)
    assert policy_.live() == (ONE,)


def test_advice_counts_where_the_router_knows_more_rounds() -> None:
    policy_ = policy("beta", discount=1.0)
    policy_.admit(ONE, None, Belief(alpha=40.0, beta=1.0))
    policy_.advise({ONE: HOPELESS, RequestId("not here"): HOPELESS})
    assert drafted(policy_) < 10
    for _ in range(500):
        policy_.observe([outcome(8, 8)])
    policy_.advise({ONE: HOPELESS})
    assert drafted(policy_) > 40


def test_a_belief_outlives_the_exit_head_it_was_learnt_with() -> None:
    policy_ = policy("beta", discount=1.0)
    policy_.admit(ONE, None, Belief())
    assert drafted(policy_) > 20
    for _ in range(400):
        policy_.observe([outcome(4, 0)])
    policy_.recalibrate(Calibrator())
    assert drafted(policy_) < 10


def test_a_request_may_not_name_a_controller_that_needs_what_this_engine_does_not_know() -> None:
    speculation = SpeculationConfig(controller="goodput", stop_rule="optimal")
    policy_ = DraftPolicy(speculation=speculation, cost=None, calibrator=None)
    with pytest.raises(RequestError, match="start-up profile") as error:
        policy_.check("beta")
    assert error.value.param == "speculation.controller"
    policy_.check(None)


def test_a_name_that_is_not_registered_is_refused_with_the_list_of_those_that_are() -> None:
    names = ", ".join(CONTROLLER_NAMES)
    with pytest.raises(RequestError, match=f"'magic', expected one of {names}") as error:
        policy().check("magic")
    assert error.value.param == "speculation.controller"
    with pytest.raises(ConfigError, match=f"'magic', expected one of {names}"):
        policy("magic")
