"""Two microbatches where they are faster, one batch where they are not."""

import pytest

from eesd_dist.control.cost import CostModel
from eesd_dist.control.overlap_policy import OverlapPolicy

_GROWING = CostModel(
    draft_step_s=1.0,
    verify_s=tuple(4.0 + row for row in range(64)),
    draft_rows_s=((1, 1.0), (32, 5.0)),
)
"""Rows cost time in both stages, which take about equally long."""


def _after_drafting(policy: OverlapPolicy, length: int) -> OverlapPolicy:
    for _ in range(60):
        policy.observe(num_drafted=length * 4, num_requests=4)
    return policy


def _flat(*, draft_s: float, verify_s: float) -> CostModel:
    """Returns the costs of a machine on which the number of rows does not matter."""
    ones = ((1, 1.0), (64, 1.0))
    return CostModel(
        draft_step_s=draft_s,
        verify_s=(verify_s,) * 64,
        draft_rows_s=tuple((count, draft_s * scale) for count, scale in ones),
    )


def test_stages_that_take_as_long_as_each_other_overlap() -> None:
    assert _after_drafting(OverlapPolicy(_GROWING), 8).pays(16)


def test_where_verifying_is_nearly_all_of_a_round_and_rows_are_free_nothing_overlaps() -> None:
    policy = _after_drafting(OverlapPolicy(_flat(draft_s=0.1, verify_s=10.0)), 4)
    assert not any(policy.pays(count) for count in range(1, 33))


def test_equal_stages_on_a_machine_without_batching_cost_do_not_earn_by_halves() -> None:
    # One batch takes draft + verify; overlapped batches take twice the larger one. Equal stages
    # give equal times.
    policy = _after_drafting(OverlapPolicy(_flat(draft_s=1.0, verify_s=4.0)), 4)
    assert not policy.pays(8)


@pytest.mark.parametrize("count", [0, 1])
def test_a_single_request_has_nothing_to_overlap_with(count: int) -> None:
    assert not OverlapPolicy(_flat(draft_s=1.0, verify_s=1.0)).pays(count)


def test_without_a_cost_model_there_is_one_batch() -> None:
    assert not OverlapPolicy(None).pays(16)


def test_a_choice_near_the_edge_is_kept() -> None:
    policy = _after_drafting(
        OverlapPolicy(_GROWING), 3
    )  # gains 1.03 with two requests, 1.08 with 16
    assert not policy.pays(2)
    assert policy.pays(16)
    assert policy.pays(2)
    _after_drafting(policy, 0)
    assert not policy.pays(16)
