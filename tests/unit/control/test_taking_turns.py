"""Two cohorts where they earn more, one batch where they do not."""

import pytest

from eesd_dist.control.cost import CostModel
from eesd_dist.control.taking_turns import TakingTurns

_GROWING = CostModel(
    draft_step_s=1.0,
    verify_s=tuple(4.0 + row for row in range(64)),
    draft_rows_s=((1, 1.0), (32, 5.0)),
)
"""Rows cost something in both stages, which take about as long."""


def _after_drafting(turns: TakingTurns, length: int) -> TakingTurns:
    for _ in range(60):
        turns.observe(num_drafted=length * 4, num_requests=4)
    return turns


def _flat(*, draft_s: float, verify_s: float) -> CostModel:
    """A machine that does not feel how many rows there are."""
    ones = ((1, 1.0), (64, 1.0))
    return CostModel(
        draft_step_s=draft_s,
        verify_s=(verify_s,) * 64,
        draft_rows_s=tuple((count, draft_s * scale) for count, scale in ones),
    )


def test_stages_that_take_as_long_as_each_other_take_turns() -> None:
    assert _after_drafting(TakingTurns(_GROWING), 8).pays(16)


def test_where_verifying_is_nearly_all_of_a_round_and_rows_are_free_nobody_takes_turns() -> None:
    turns = _after_drafting(TakingTurns(_flat(draft_s=0.1, verify_s=10.0)), 4)
    assert not any(turns.pays(count) for count in range(1, 33))


def test_equal_stages_on_a_machine_without_batching_cost_do_not_earn_by_halves() -> None:
    # One batch: draft + verify; in turns: twice the larger one. Equal stages come out even.
    turns = _after_drafting(TakingTurns(_flat(draft_s=1.0, verify_s=4.0)), 4)
    assert not turns.pays(8)


@pytest.mark.parametrize("count", [0, 1])
def test_a_single_request_has_nobody_to_take_turns_with(count: int) -> None:
    assert not TakingTurns(_flat(draft_s=1.0, verify_s=1.0)).pays(count)


def test_without_a_cost_model_there_is_one_batch() -> None:
    assert not TakingTurns(None).pays(16)


def test_a_choice_near_the_edge_is_kept() -> None:
    turns = _after_drafting(TakingTurns(_GROWING), 3)  # gains 1.03 with two requests, 1.08 with 16
    assert not turns.pays(2)
    assert turns.pays(16)
    assert turns.pays(2)
    _after_drafting(turns, 0)
    assert not turns.pays(16)
