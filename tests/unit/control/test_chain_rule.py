"""The rule of one chain: its value against every length, and its forecast."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import (
    LOOK,
    NO,
    NO_ODDS,
    PROBE,
    YES,
    ChainRule,
    acceptance,
    of_length,
    takes,
    value_of_longer,
    wants_guess,
)
from eesd_dist.types import Evidence

chances = st.floats(0.0, 1.0)
steps = st.lists(st.floats(0.0, 0.4), min_size=8, max_size=8)


def _rule(prices: list[float], **changes: object) -> ChainRule:
    rule = ChainRule(
        prices=np.array([0.0, *prices]).cumsum(),
        guess_price=0.0,
        mean=0.8,
        hopeful=0.95,
        looks=False,
        probes=False,
        optimism=0.0,
        odds=NO_ODDS,
        shift=0.0,
        deviation=0.0,
    )
    return rule._replace(**changes)


@given(chances, chances, steps)
def test_its_value_is_that_of_the_best_length(
    first: float, theta: float, prices: list[float]
) -> None:
    values = [
        sum(first * theta**i for i in range(length)) - sum(prices[:length])
        for length in range(len(prices) + 1)
    ]
    value, by_mean = value_of_longer(_rule(prices, mean=theta), 0, first, first, 0.0)
    assert value == by_mean == pytest.approx(max(values), abs=1e-9)


def test_a_token_is_drafted_for_what_lies_behind_a_step_of_the_prices() -> None:
    prices = [0.61, 0.01, 0.01, 0.01]
    assert takes(_rule(prices, mean=0.9), 0, 0.5, 0.5, 0.0)[0]
    assert not takes(_rule(prices[:1], mean=0.9), 0, 0.5, 0.5, 0.0)[0]


def test_a_draw_above_the_mean_decides_as_long_as_its_budget_lasts() -> None:
    rule = _rule([0.6], mean=0.5)
    assert takes(rule, 0, 0.9, 0.5, 0.2) == (True, pytest.approx(0.1), pytest.approx(-0.1))
    assert takes(rule, 0, 0.9, 0.5, 0.05)[:2] == (False, 0.0)
    assert takes(rule, 0, 0.9, 0.7, 0.0)[:2] == (True, 0.0)


def test_it_guesses_looks_or_probes_in_this_order() -> None:
    assert wants_guess(_rule([0.5]), 0, 1.0) == YES
    dear = _rule([0.9], guess_price=0.02)
    assert wants_guess(dear, 0, 1.0) == NO
    assert wants_guess(dear._replace(looks=True), 0, 1.0) == LOOK
    assert wants_guess(dear._replace(looks=True, hopeful=0.91), 0, 1.0) == NO, "pays for two"
    assert wants_guess(dear._replace(probes=True), 0, 1.0) == PROBE
    assert wants_guess(dear._replace(probes=True), 1, 1.0) == NO, "a probe is a first token"
    assert wants_guess(_rule([], probes=True), 0, 1.0) == NO, "no token may be drafted"


def test_a_fixed_length_is_drafted_whatever_the_guesses_are() -> None:
    rule = of_length(3)
    assert [wants_guess(rule, drafted, 1e-9) for drafted in range(4)] == [YES, YES, YES, NO]
    drawn, mean = acceptance(rule, 0, 0.0)
    assert takes(rule, 0, drawn, mean, 0.0)[0]


@given(st.floats(-1.0, 40.0), st.integers(0, 8), st.sampled_from([0.0, 0.3, 1.0, 2.0]))
def test_its_forecast_is_the_calibration(gap: float, depth: int, temperature: float) -> None:
    calibrator = Calibrator(
        log_gap=0.4,
        log_gap_squared=0.2,
        depth=0.05,
        temperature=-0.3,
        temperature_log_gap=0.7,
        greedy=0.2,
        greedy_log_gap=1.5,
        bias=-0.6,
        logit_top1=0.0,
        curve=((0.2, 0.1), (0.5, 0.55), (0.9, 0.97)),
    )
    evidence = Evidence(depth=depth, temperature=temperature, gap=gap)
    rule = _rule([0.1], odds=calibrator.at_temperature(temperature))
    drawn, mean = acceptance(rule, depth, gap)
    assert drawn == mean == pytest.approx(calibrator.probability(evidence), abs=1e-12)
    lower = acceptance(rule._replace(deviation=-1.0), depth, gap)
    assert lower[0] < lower[1] == mean
    assert acceptance(rule._replace(shift=1.0), depth, gap)[1] > mean


def test_a_head_that_finds_no_number_is_not_believed() -> None:
    curve = Calibrator(log_gap=1.0, logit_top1=0.0).at_temperature(1.0)
    assert acceptance(_rule([0.1], odds=curve), 0, float("nan"))[1] == pytest.approx(1e-3)
