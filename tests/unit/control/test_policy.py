"""Requests and the controllers that they name, through the interface of the engine."""

import pytest

from eesd_dist.config import SpeculationConfig
from eesd_dist.control import Belief, Calibrator, CostModel
from eesd_dist.control.offers import Offer
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.types import RequestId
from tests.unit.control.worlds import ONE, evidence, outcome

COST = CostModel(draft_step_s=0.15, verify_s=tuple(1 + 0.03 * i for i in range(9)), round_s=0.1)
HOPELESS = Belief(alpha=1.0, beta=400.0, num_tested=400, num_accepted=0, num_rounds=400)


def policy(controller: str = "beta", **config: object) -> DraftPolicy:
    speculation = SpeculationConfig(controller=controller, **config)  # type: ignore[arg-type]
    return DraftPolicy(speculation=speculation, cost=COST, calibrator=None)


def drafted(made: DraftPolicy, *, rounds: int = 50) -> int:
    """Returns how often a first token was drafted for the request."""
    count = 0
    for _ in range(rounds):
        made.begin_round([ONE])
        if made.worth_a_guess([ONE]):
            count += made.choose([Offer(request_id=ONE, evidence=evidence(0.9))])[0]
    return count


def test_a_controller_that_needs_no_evidence_spares_the_exit_head_its_last_guess() -> None:
    made = policy("fixed", fixed_length=2)
    made.admit(ONE, None, Belief())
    made.begin_round([ONE])
    offer = Offer(request_id=ONE, evidence=evidence())
    for _ in range(2):
        assert made.worth_a_guess([ONE]) == {ONE}
        assert made.worth_a_guess([ONE]) == {ONE}  # asked twice, the answer is the same
        assert made.choose([offer]) == [True]
    assert made.worth_a_guess([ONE]) == frozenset()


def test_every_request_of_a_round_is_answered_by_the_controller_it_names() -> None:
    made = policy("goodput", fixed_length=0)
    ids = {name: RequestId(name) for name in ("fixed", "goodput", "calibration")}
    for name, request_id in ids.items():
        made.admit(request_id, name, Belief())
    made.begin_round(ids.values())
    offers = [Offer(request_id=i, evidence=evidence(0.95)) for i in ids.values()]
    assert made.choose(offers) == [False, True, True]
    assert made.needs_probs([ids["calibration"]])
    assert not made.needs_probs([ids["fixed"]])
    assert made.needs_probs(ids.values())


@pytest.mark.parametrize("name", CONTROLLER_NAMES)
def test_a_request_that_has_ended_is_forgotten_and_its_late_verdict_passed_over(name: str) -> None:
    made = policy(name)
    made.admit(ONE, None, Belief())
    assert made.live() == (ONE,)
    made.end(ONE)
    made.end(ONE)
    made.observe([outcome(4, 0)])
    assert made.live() == ()
    made.admit(ONE, None, Belief())  # the id may come back
    drafted(made)
    assert made.live() == (ONE,)


def test_advice_counts_where_the_router_knows_more_rounds() -> None:
    made = policy("beta", discount=1.0)
    made.admit(ONE, None, Belief(alpha=40.0, beta=1.0))
    made.advise({ONE: HOPELESS, RequestId("not here"): HOPELESS})
    assert drafted(made) < 10
    for _ in range(500):
        made.observe([outcome(8, 8)])
    made.advise({ONE: HOPELESS})
    assert drafted(made) > 40


def test_a_belief_outlives_the_exit_head_it_was_learnt_with() -> None:
    made = policy("beta", discount=1.0)
    made.admit(ONE, None, Belief())
    assert drafted(made) > 20
    for _ in range(400):
        made.observe([outcome(4, 0)])
    made.recalibrate(Calibrator())
    assert drafted(made) < 10


def test_a_request_may_not_name_a_controller_that_needs_what_this_engine_does_not_know() -> None:
    speculation = SpeculationConfig(controller="goodput", stop_rule="optimal")
    made = DraftPolicy(speculation=speculation, cost=None, calibrator=None)
    with pytest.raises(RequestError, match="start-up profile") as refused:
        made.check("beta")
    assert refused.value.param == "speculation.controller"
    made.check(None)


def test_a_name_that_is_not_registered_is_refused_with_the_list_of_those_that_are() -> None:
    known = ", ".join(CONTROLLER_NAMES)
    with pytest.raises(RequestError, match=f"'magic', expected one of {known}") as refused:
        policy().check("magic")
    assert refused.value.param == "speculation.controller"
    with pytest.raises(ConfigError, match=f"'magic', expected one of {known}"):
        policy("magic")
