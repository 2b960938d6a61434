"""Controllers: their published formulas by simulation, and their behaviour at known acceptance
rates."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import acceptance, of_length
from eesd_dist.control.cost import CostModel
from eesd_dist.control.draws import Deviate
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.control.regret import hindsight
from eesd_dist.control.thompson import CalibratedPosterior
from eesd_dist.errors import ConfigError
from eesd_dist.types import Evidence
from tests.unit.control.worlds import (
    ONE,
    Alone,
    decode,
    draft_length,
    evidence,
    outcome,
    serve,
    text,
)

CHEAP = CostModel(draft_step_s=0.15, verify_s=tuple(1 + 0.03 * i for i in range(9)), round_s=0.1)


def controller(name: str, *, seed: int = 7, **setup: Any) -> Alone:
    return Alone(name, seed=seed, **setup)


def test_fixed_drafts_its_length_every_round() -> None:
    fixed = controller("fixed", fixed_length=3)
    assert [draft_length(fixed, ceiling=8) for _ in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("fixed", False),
        ("beta", False),
        ("calibration", True),
        ("goodput", True),
        ("smartspec", False),
    ],
)
def test_only_those_that_look_at_probabilities_ask_for_them(name: str, needs: bool) -> None:
    assert controller(name).needs_probs is needs


def test_with_a_calibration_no_controller_reads_probabilities() -> None:
    fitted = Calibrator(logit_top1=0.0, log_gap=1.0)
    for name in CONTROLLER_NAMES:
        cost = CHEAP if name in ("smartspec", "goodput") else None
        policy = DraftPolicy(speculation=SpeculationConfig(), cost=cost, calibrator=fitted)
        policy.admit(ONE, name, Belief())
        assert not policy.needs_probs([ONE]), name


@pytest.mark.parametrize("cost", [None, CHEAP])
def test_a_controller_that_only_sees_rejections_gives_up(cost: CostModel | None) -> None:
    names: tuple[str, ...] = ("beta", "calibration")
    for name in names:
        pessimist = controller(name, cost=cost, discount=1.0)
        for _ in range(2_000):
            pessimist.observe(outcome(1, 0))
        lengths = [draft_length(pessimist, ceiling=8, top1_prob=0.05) for _ in range(1_000)]
        assert sum(length > 0 for length in lengths) < 80


def test_a_controller_that_gave_up_tries_again() -> None:
    """Rounds without a draft discount old counts, so that a text that became easy is detected."""
    hopeful = controller("beta", cost=CHEAP, discount=0.95)
    for _ in range(60):
        hopeful.observe(outcome(8, 0))
    assert sum(draft_length(hopeful, ceiling=8) > 0 for _ in range(50)) < 10
    for _ in range(80):
        hopeful.observe(outcome(0, 0))
    assert sum(draft_length(hopeful, ceiling=8) > 0 for _ in range(50)) > 20


def test_drawn_once_a_round_the_chance_to_continue_is_the_published_product() -> None:
    alpha, beta, draws = 3.0, 2.0, 20_000
    belief = Belief(alpha=alpha, beta=beta)
    beta_ts = controller("beta", belief=belief, stop_rule="bernoulli", redraw="round")
    lengths = [draft_length(beta_ts, ceiling=6) for _ in range(draws)]
    for k in range(1, 7):
        expected = math.prod((alpha + i) / (alpha + beta + i) for i in range(k))
        assert sum(length >= k for length in lengths) / draws == pytest.approx(expected, abs=0.015)


def test_drawn_every_token_only_the_posterior_mean_matters() -> None:
    draws = 15_000
    for strength in (1.0, 50.0):
        belief = Belief(alpha=3 * strength, beta=2 * strength)
        beta_ts = controller("beta", belief=belief, stop_rule="bernoulli", redraw="token")
        lengths = [draft_length(beta_ts, ceiling=4) for _ in range(draws)]
        for k in range(1, 5):
            share = sum(length >= k for length in lengths) / draws
            assert share == pytest.approx(0.6**k, abs=0.015)


@settings(max_examples=30)
@given(st.integers(0, 1000), st.sampled_from(["token", "round"]), st.floats(0.0, 1.0))
def test_without_weight_on_the_calibration_it_is_beta_ts(
    seed: int, redraw: str, top1_prob: float
) -> None:
    belief = Belief(alpha=5.0, beta=2.0)
    lengths = [
        [draft_length(variant, ceiling=20, top1_prob=top1_prob) for _ in range(5)]
        for variant in (
            controller("beta", belief=belief, seed=seed, redraw=redraw, stop_rule="bernoulli"),
            controller(
                "calibration",
                belief=belief,
                seed=seed,
                redraw=redraw,
                stop_rule="bernoulli",
                calibration_strength=1e-12,
            ),
        )
    ]
    assert lengths[0] == lengths[1]


def test_calibration_drafts_longer_where_the_exit_head_is_sure() -> None:
    belief = Belief().after(outcome(8, 5))
    thompson = controller("calibration", belief=belief, cost=CHEAP)
    sure = sum(draft_length(thompson, ceiling=8, top1_prob=0.97) for _ in range(200))
    unsure = sum(draft_length(thompson, ceiling=8, top1_prob=0.15) for _ in range(200))
    assert sure > 3 * unsure


@pytest.mark.parametrize("name", CONTROLLER_NAMES)
def test_the_same_seed_gives_the_same_choices(name: str) -> None:
    tokens = text(Random(1), ease=1.0, spread=1.5, num_tokens=300)
    runs = [decode(controller(name, cost=CHEAP), tokens, ceiling=8) for _ in range(2)]
    assert runs[0] == runs[1]


def test_cost_aware_thompson_sampling_keeps_up_with_the_best_fixed_length() -> None:
    for ease in (3.0, 1.0, -2.0):
        tokens = text(Random(2), ease=ease, spread=1.5, num_tokens=2_500)
        longest = decode(controller("fixed", fixed_length=8), tokens, ceiling=8)
        best_fixed = hindsight(longest, cost=CHEAP, max_length=8).best_fixed_rate
        min_share: dict[str, float] = {"beta": 0.95, "calibration": 0.98}
        for name in min_share:
            rounds = decode(controller(name, cost=CHEAP), tokens, ceiling=8)
            assert hindsight(rounds, cost=CHEAP, max_length=8).rate > min_share[name] * best_fixed


CALIBRATED = Calibrator(
    logit_top1=0.0,
    log_gap=0.5,
    log_gap_squared=0.3,
    greedy_log_gap=1.0,
    bias=-1.0,
    curve=((0.1, 0.05), (0.4, 0.5), (0.9, 0.97)),
)


@pytest.mark.parametrize("calibrator", [CALIBRATED, replace(CALIBRATED, curve=())])
@pytest.mark.parametrize("guess_s", [0.0, 0.06])
@pytest.mark.parametrize("name", ["beta", "calibration"])
def test_a_thompson_controller_decides_by_its_rules_as_token_by_token(
    name: str, calibrator: Calibrator, guess_s: float
) -> None:
    cost = replace(CHEAP, guess_s=guess_s)
    served = []
    for by_rules in (True, False):
        config = SpeculationConfig(controller=name)
        policy = DraftPolicy(speculation=config, cost=cost, calibrator=calibrator)
        texts = [text(Random(n), ease=1.0, spread=1.5, num_tokens=600) for n in range(2)]
        served.append(serve(policy, texts, cost=cost, max_running=2, by_rules=by_rules))
    assert served[0].lengths == served[1].lengths
    assert served[0].num_guesses == served[1].num_guesses
    assert len(set(served[0].lengths)) > 4


def test_the_rule_of_calibration_is_its_published_draw() -> None:
    """Theta of the compiled draft is a draw of Beta(kappa m + r, kappa (1 - m) + f)."""
    posterior = CalibratedPosterior(calibrator=CALIBRATED, strength=64.0)
    belief, chance = Belief(alpha=9.0, beta=4.0), Deviate(Random(3))
    curve = posterior.curve(belief, chance)
    assert curve is not None
    rule = of_length(1)._replace(odds=CALIBRATED.at_temperature(0.0)._replace(curve=curve))
    for gap in (0.1, 0.5, 1.0, 2.0, 5.0):
        guess = Evidence(depth=0, gap=gap)
        theta, _ = acceptance(rule, 0, gap)
        assert theta == pytest.approx(posterior.theta(belief, guess, chance), abs=0.01)


def test_a_cost_aware_rule_without_costs_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="start-up profile"):
        controller("beta", stop_rule="optimal")


def test_evidence_that_is_not_a_number_costs_speed_alone() -> None:
    thompson = controller("calibration", cost=CHEAP)
    thompson.begin_round()
    assert isinstance(thompson.keep_drafting(evidence(math.nan)), bool)


def test_goodput_and_smartspec_assume_costs_without_a_measurement() -> None:
    names: tuple[str, ...] = ("goodput", "smartspec")
    for name in names:
        easy = decode(controller(name), [(True, 0.9)] * 400, ceiling=8)
        assert sum(o.num_drafted for o in easy) > 3 * len(easy)


def test_goodput_alone_keeps_up_with_the_best_fixed_length() -> None:
    tokens = text(Random(2), ease=1.0, spread=1.5, num_tokens=1_500)
    longest = decode(controller("fixed", fixed_length=8), tokens, ceiling=8)
    best_fixed = hindsight(longest, cost=CHEAP, max_length=8).best_fixed_rate
    rounds = decode(controller("goodput", cost=CHEAP), tokens, ceiling=8)
    assert hindsight(rounds, cost=CHEAP, max_length=8).rate > 0.98 * best_fixed
