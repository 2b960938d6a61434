"""Costs learnt from rounds, with the start-up profile as the prior."""

from dataclasses import replace
from random import Random

import pytest

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.learnt_cost import LearntCost, RoundCost
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.types import RequestId

PROFILE = CostModel(
    draft_step_s=0.05e-3,
    verify_s=tuple((1.0 + 0.15 * i) * 1e-3 for i in range(9)),
    round_s=0.1e-3,
    guess_s=0.03e-3,
)
"""As measured in a loop, with everything in the processor's caches."""
REAL = CostModel(
    draft_step_s=0.12e-3,
    verify_s=tuple((1.4 + 0.12 * i) * 1e-3 for i in range(9)),
    round_s=0.5e-3,
    guess_s=0.07e-3,
)


def a_round(
    cost: CostModel, length: int, *, noise: float = 1.0, is_ended: bool = False
) -> RoundCost:
    """`refused`: the draft was ended by a guess."""
    return RoundCost(
        levels=(1,) * length,
        guesses=(1,) * (length + is_ended),
        num_rows=1 + length,
        num_requests=1,
        verify_s=noise * cost.verify(length),
        other_s=noise * (cost.round_s + length * cost.draft_step_s + is_ended * cost.guess_s),
    )


def after(cost: CostModel, num_rounds: int, *, spread: float, lengths: int = 9) -> CostModel:
    learnt, rng = LearntCost(PROFILE), Random(4)
    for _ in range(num_rounds):
        noise = rng.lognormvariate(0.0, spread)
        learnt.observe(a_round(cost, rng.randrange(lengths), noise=noise))
    return learnt.model


@pytest.mark.parametrize("spread", [0.02, 0.15])
def test_it_learns_what_rounds_cost(spread: float) -> None:
    learnt = after(REAL, 400, spread=spread)
    for length in range(9):
        assert learnt.seconds(length) == pytest.approx(REAL.seconds(length), rel=0.05)
    longer = learnt.seconds(8) - learnt.seconds(0)
    assert longer == pytest.approx(REAL.seconds(8) - REAL.seconds(0), rel=0.15)


def test_a_profile_that_is_right_stays() -> None:
    assert after(PROFILE, 100, spread=0.01).seconds(4) == pytest.approx(
        PROFILE.seconds(4), rel=0.03
    )


def test_what_was_never_drafted_keeps_the_price_of_the_profile() -> None:
    learnt = after(REAL, 300, spread=0.1, lengths=1)
    assert learnt.seconds(0) == pytest.approx(REAL.seconds(0), rel=0.08)
    step_s = learnt.draft_step_s
    assert step_s == pytest.approx(PROFILE.draft_step_s, rel=0.01)


def test_guesses_that_are_not_drafted_do_not_make_plain_rounds_look_slow() -> None:
    """Those of a GPU before its steps were graphs: a guess was nearly the whole step."""
    real = replace(REAL, draft_step_s=0.75e-3, guess_s=0.64e-3)
    learnt, rng = LearntCost(replace(PROFILE, draft_step_s=0.75e-3, guess_s=0.64e-3)), Random(4)
    for _ in range(300):
        length = rng.randrange(3)
        learnt.observe(a_round(real, length, is_ended=rng.random() < 0.7))
    assert learnt.model.seconds(0) == pytest.approx(real.seconds(0), rel=0.05)
    assert learnt.model.draft_step_s == pytest.approx(real.draft_step_s, rel=0.1)


def test_a_disturbance_moves_little_and_does_not_stay() -> None:
    learnt, rng = LearntCost(PROFILE), Random(9)
    for _ in range(100):
        learnt.observe(a_round(REAL, rng.randrange(9)))
    before = learnt.model.seconds(4)
    for _ in range(4):  # one in four is looked at
        learnt.observe(a_round(REAL, 4, noise=100.0))
    assert before < learnt.model.seconds(4) < 1.3 * before
    for _ in range(40):
        learnt.observe(a_round(REAL, rng.randrange(9)))
    assert learnt.model.seconds(4) == pytest.approx(before, rel=0.05)


def test_a_machine_that_became_slower_is_noticed() -> None:
    learnt, rng = LearntCost(PROFILE), Random(9)
    for _ in range(200):
        learnt.observe(a_round(REAL, rng.randrange(9)))
    for _ in range(200):
        learnt.observe(a_round(REAL, rng.randrange(9), noise=1.6))
    assert learnt.model.seconds(4) == pytest.approx(1.6 * REAL.seconds(4), rel=0.05)


def test_costs_are_costs_whatever_is_observed() -> None:
    learnt, rng = LearntCost(PROFILE), Random(2)
    for _ in range(500):
        length = rng.randrange(9)
        seconds = rng.choice((0.0, 1e-9, 1e3))
        learnt.observe(
            RoundCost(
                levels=(1,) * length,
                guesses=(1,) * length,
                num_rows=1 + length,
                num_requests=1,
                verify_s=seconds,
                other_s=seconds,
            )
        )
        model = learnt.model
        assert model.draft_step_s > 0
        assert model.round_s >= 0
        assert min(model.verify_s) > 0


@pytest.mark.parametrize("learns", [True, False])
def test_goodput_drafts_by_the_costs_it_has_seen(learns: bool) -> None:
    """A profile in which nothing pays, and rounds in which drafts are nearly free."""
    dear = CostModel(draft_step_s=2.0, verify_s=tuple(1.0 + 2.0 * i for i in range(9)))
    cheap = CostModel(draft_step_s=0.01, verify_s=tuple(1.0 + 0.02 * i for i in range(9)))
    policy = DraftPolicy(
        speculation=SpeculationConfig(learn_costs=learns),
        cost=dear,
        calibrator=Calibrator(log_gap=1.0, logit_top1=0.0),
    )
    request = RequestId("one")
    policy.admit(request, None, Belief(alpha=90.0, beta=10.0))
    for length in (0, 1, 2, 3) * 100:
        policy.observe_cost(a_round(cheap, length))
    policy.begin_round([request])
    assert (policy.worth_a_guess([request]) == {request}) == learns


IN_CONTEXT = replace(PROFILE, context_s=0.5e-6, row_context_s=0.05e-6)
"""A profile by which reading the context costs half of what it does."""
REAL_IN_CONTEXT = replace(PROFILE, context_s=1.0e-6, row_context_s=0.1e-6)


def _in_context(length: int, context: int) -> RoundCost:
    return replace(a_round(REAL_IN_CONTEXT.at(context), length), context=context)


def test_it_learns_what_context_costs() -> None:
    learnt, rng = LearntCost(IN_CONTEXT), Random(3)
    for context in range(0, 8_000, 20):
        learnt.observe(_in_context(rng.randrange(9), context))
    for context in (7_500, 7_900):
        model, real = learnt.select(1, context), REAL_IN_CONTEXT.at(context)
        assert model.seconds(0) == pytest.approx(real.seconds(0), rel=0.05)
        longer = model.seconds(8) - model.seconds(0)
        assert longer == pytest.approx(real.seconds(8) - real.seconds(0), rel=0.15)


def test_a_new_context_starts_from_the_nearest_one() -> None:
    learnt, rng = LearntCost(IN_CONTEXT), Random(3)
    for _ in range(200):
        learnt.observe(_in_context(rng.randrange(9), 2_000))
    real = REAL_IN_CONTEXT.at(3_000).seconds(4)
    assert learnt.select(1, 3_000).seconds(4) == pytest.approx(real, rel=0.1)
    assert IN_CONTEXT.at(3_000).seconds(4) < 0.75 * real
    assert learnt.select(1, 2_000) is not learnt.select(1, 3_000)
    assert learnt.select(1, 3_000) is learnt.select(1, 3_020)


def test_a_learnt_model_applies_at_other_contexts_too() -> None:
    """Another engine may take it over, and convert it."""
    learnt, rng = LearntCost(IN_CONTEXT), Random(3)
    for _ in range(400):
        learnt.observe(_in_context(rng.randrange(9), 8_000))
    model = CostModel.from_json(learnt.model.to_json()).at(1_000)
    for rows in (1, 9):
        real = REAL_IN_CONTEXT.at(1_000).verify_batch(rows)
        assert 0.5 * real < model.verify_batch(rows) < 2.0 * real
    assert model.verify_batch(9) > 1.2 * model.verify_batch(1)


def test_rounds_that_teach_nothing_leave_no_lines() -> None:
    """Rounds of prompts, which are decided on and not learnt from."""
    learnt, rng = LearntCost(IN_CONTEXT), Random(3)
    for _ in range(200):
        learnt.observe(_in_context(rng.randrange(9), 2_000))
        learnt.select(1, 900)
    real = REAL_IN_CONTEXT.at(1_300)  # nearer to the 900 positions of which nothing is known
    assert learnt.select(1, 1_300).seconds(0) == pytest.approx(real.seconds(0), rel=0.15)
    assert learnt.select(1, None) is learnt.select(1, 1_300)
    assert learnt.select(9, 31) == IN_CONTEXT.at(31)


def test_it_learns_what_lookups_add_to_a_round() -> None:
    learnt = LearntCost(PROFILE)
    lookups = replace(
        a_round(PROFILE, 2),
        guesses=(),
        num_lookups=2,
        other_s=PROFILE.round_s + 0.4e-3,
    )
    for _ in range(20):
        learnt.observe(a_round(PROFILE, 0))
    before = learnt.model.seconds(2)
    for _ in range(20):
        learnt.observe(lookups)
    assert learnt.model.lookup_s == pytest.approx(0.2e-3, rel=0.1)
    assert learnt.model.seconds(2) == pytest.approx(before, rel=0.01)
    assert CostModel.from_json(learnt.model.to_json()).lookup_s == learnt.model.lookup_s


def test_costs_that_are_not_learnt_still_depend_on_context() -> None:
    policy = DraftPolicy(
        speculation=SpeculationConfig(learn_costs=False), cost=IN_CONTEXT, calibrator=None
    )
    policy.admit(RequestId("one"), None, Belief())
    policy.begin_round([RequestId("one")], context=4_000)
    assert policy.cost == IN_CONTEXT.at(4_000)
    policy.observe_cost(_in_context(2, 4_000))
    policy.begin_round([RequestId("one")])
    assert policy.cost == IN_CONTEXT.at(4_000)
    assert policy.profile == IN_CONTEXT
