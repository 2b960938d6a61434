"""Costs, and the most profitable length."""

from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.control.cost import CostModel
from eesd_dist.control.stopping import OptimalStop
from eesd_dist.errors import ConfigError

thetas = st.floats(0.0, 1.0)
drafts = st.floats(0.01, 1.0)
slopes = st.floats(0.0, 0.3)


def _linear(draft_step_s: float, slope: float) -> CostModel:
    verify_s = tuple(1.0 + slope * i for i in range(9))
    return CostModel(draft_step_s=draft_step_s, verify_s=verify_s, round_s=0.1)


def _length(stop: OptimalStop, theta: float) -> int:
    stop.begin_round(theta, theta)
    return next((k for k in range(8) if not (stop.wants_guess() and stop.goes_on(theta))), 8)


@given(thetas, drafts, slopes)
def test_with_one_theta_the_optimal_rule_finds_the_length_of_highest_rate(
    theta: float, draft_step_s: float, slope: float
) -> None:
    cost = _linear(draft_step_s, slope)
    survival = list(accumulate([theta] * 8, mul))
    length = _length(OptimalStop(cost=cost, max_draft_tokens=8), theta)
    best = max(cost.rate(k, survival) for k in range(9))
    assert cost.rate(length, survival) == pytest.approx(best)


@given(thetas, drafts, slopes)
def test_on_convex_costs_it_is_the_published_rule_of_one_step(
    theta: float, draft_step_s: float, slope: float
) -> None:
    cost = _linear(draft_step_s, slope)
    length, survival, tokens, best = 0, 1.0, 1.0, 1.0 / cost.seconds(0)
    while length < 8:
        marginal = survival * theta / (cost.seconds(length + 1) - cost.seconds(length))
        if marginal <= best * (1 + 1e-9):
            break
        length += 1
        survival *= theta
        tokens += survival
        best = max(best, tokens / cost.seconds(length))
    assert abs(_length(OptimalStop(cost=cost, max_draft_tokens=8), theta) - length) <= (
        1 if abs(marginal / best - 1) < 1e-6 else 0
    )


def test_a_step_in_verify_time_does_not_hide_the_longer_drafts_behind_it() -> None:
    """Kernels work in blocks of rows: the fifth row is expensive, the sixth to eighth are free."""
    cost = CostModel(draft_step_s=0.05, verify_s=(1.0,) * 4 + (1.4,) * 4)
    assert _length(OptimalStop(cost=cost, max_draft_tokens=7), 0.95) == 7


def test_when_drafting_never_pays_nothing_is_drafted() -> None:
    cost = _linear(1.2, 0.2)
    assert _length(OptimalStop(cost=cost, max_draft_tokens=8), 0.95) == 0


def test_beyond_the_table_the_last_slope_goes_on() -> None:
    cost = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.1, 1.3))
    assert cost.verify(4) == pytest.approx(1.7)
    assert CostModel(draft_step_s=0.1, verify_s=(1.0,)).verify(5) == 1.0


BATCH = CostModel(
    draft_step_s=0.1,
    verify_s=(1.0, 1.1, 1.3),
    round_s=0.05,
    guess_s=0.06,
    request_s=0.2,
    verify_rows_s=((6, 1.9), (10, 2.3)),
    draft_rows_s=((2, 0.12), (4, 0.2)),
    known_rows_s=((4, 0.08),),
)


def test_a_batch_of_one_costs_what_one_request_costs() -> None:
    for cost in (BATCH, _linear(0.1, 0.03)):
        for length in range(6):
            assert cost.batch_seconds([length]) == pytest.approx(cost.seconds(length))


def test_between_measured_batches_seconds_are_interpolated_and_requests_cost_their_own() -> None:
    assert BATCH.verify_batch(3) == 1.3
    assert BATCH.verify_batch(4) == pytest.approx(1.5)
    assert BATCH.verify_batch(8, 3) == pytest.approx(2.1 + 2 * 0.2)
    assert BATCH.verify_batch(20) == pytest.approx(2.3 + 10 * 0.1)
    assert BATCH.draft_batch(3) == pytest.approx(0.16)
    assert BATCH.draft_batch(0) == 0.0
    assert BATCH.guess_batch(3) == pytest.approx(0.6 * 0.16)
    assert BATCH.known_batch(1) == 0.05
    assert BATCH.known_batch(2) == pytest.approx(0.06)


def test_a_batch_pays_each_level_once_and_each_row() -> None:
    levels = BATCH.draft_batch(3) + BATCH.draft_batch(2) + BATCH.draft_batch(1)
    drafting = BATCH.known_batch(4) + levels
    verifying = BATCH.verify_batch(4 + 6, 4)
    assert BATCH.batch_seconds([3, 0, 1, 2]) == pytest.approx(drafting + verifying)
    overlapped = BATCH.batch_seconds([3, 0, 1, 2], overlapped=True)
    assert overlapped == pytest.approx(max(drafting, verifying))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(0, 39))
def test_a_longer_draft_never_makes_a_batch_cheaper(lengths: list[int], which: int) -> None:
    for cost in (BATCH, _linear(0.1, 0.03)):
        longer = [k + (i == which % len(lengths)) for i, k in enumerate(lengths)]
        assert cost.batch_seconds(longer) >= cost.batch_seconds(lengths)


def test_a_flat_end_of_the_table_does_not_make_further_rows_free() -> None:
    noisy = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.2, 1.2))
    assert noisy.verify_batch(5) > 1.3


def test_a_pinned_cost_model_survives_its_file(tmp_path: Path) -> None:
    BATCH.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == BATCH
    with pytest.raises(ConfigError, match="cost_file"):
        CostModel.load(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="object"):
        CostModel.load(tmp_path / "list.json")


@pytest.mark.parametrize("points", [3, "ab", [[1]], [[2, 0.1], [1, 0.2]], [[0, 0.1]], [[1, "x"]]])
def test_points_that_are_none_are_refused(points: object) -> None:
    with pytest.raises(ConfigError, match="cost model"):
        CostModel.from_json(BATCH.to_json() | {"verify_rows_s": points})


def test_costs_survive_json_and_nonsense_is_refused() -> None:
    cost = _linear(0.1, 0.03)
    assert CostModel.from_json(cost.to_json()) == cost
    with pytest.raises(ConfigError, match="verify_s"):
        CostModel.from_json({"draft_step_s": 0.1})
    with pytest.raises(ConfigError, match="seconds"):
        CostModel.from_json({"verify_s": ["fast"], "draft_step_s": 0.1})
    with pytest.raises(ConfigError, match="profile"):
        CostModel(draft_step_s=0.1, verify_s=())


IN_CONTEXT = replace(
    BATCH, context=100, context_s=2e-3, row_context_s=0.5e-3, draft_context_s=0.1e-3
)


def test_figures_at_a_context_add_what_each_request_and_row_reads() -> None:
    at = IN_CONTEXT.at(300)
    for rows, requests in ((1, 1), (3, 1), (6, 3), (9, 2)):
        more = at.verify_batch(rows, requests) - IN_CONTEXT.verify_batch(rows, requests)
        assert more == pytest.approx(200 * (2e-3 * requests + 0.5e-3 * rows)), (rows, requests)
    for requests in (1, 4):
        more = at.draft_batch(requests) - IN_CONTEXT.draft_batch(requests)
        assert more == pytest.approx(200 * 0.1e-3 * requests)
        more = at.known_batch(requests) - IN_CONTEXT.known_batch(requests)
        assert more == pytest.approx(200 * 0.1e-3 * requests)


def test_figures_at_a_context_do_not_depend_on_the_way_there() -> None:
    converted = IN_CONTEXT.at(5_000).at(700)
    assert converted.context == 700
    assert converted.verify_batch(6, 3) == pytest.approx(IN_CONTEXT.at(700).verify_batch(6, 3))
    assert BATCH.at(5_000) is BATCH  # nothing is known about context
    assert min(IN_CONTEXT.at(0).verify_s) > 0.0


def test_a_context_survives_the_file() -> None:
    assert CostModel.from_json(IN_CONTEXT.at(700).to_json()) == IN_CONTEXT.at(700)
    with pytest.raises(ConfigError, match="expected stored positions"):
        CostModel.from_json(BATCH.to_json() | {"context": -1})
