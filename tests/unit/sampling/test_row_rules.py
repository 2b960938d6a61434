"""The rule of a row gives its position and history, and requests nothing that it does not need."""

import pytest
from msgspec.structs import replace

from eesd_dist.sampling.row_rules import is_guessed_by_score, keeps_logits, rules_of
from eesd_dist.transport.contracts import Segment
from eesd_dist.types import ChoiceParams, SamplingParams
from tests.unit.sampling.rows_and_odds import rule

PARAMS = ChoiceParams(
    temperature=0.5, frequency_penalty=0.5, seed=17, stop_token_ids=(2,), logit_bias=((5, 1.0),)
)
SEGMENT = Segment(
    start=4,
    num_rows=3,
    num_sampled=2,
    pages=(0,),
    tokens=(10, 11, 12),
    history=(6, 7, 8, 9),
    num_prompt=3,
    params=PARAMS,
    top_logprobs=3,
)


def test_each_sampled_row_chooses_the_token_after_its_own() -> None:
    assert [row.position for row in rules_of(SEGMENT)] == [6, 7]


def test_a_rows_history_ends_with_its_own_token_and_includes_the_draft_before_it() -> None:
    histories = [tuple(row.history) for row in rules_of(SEGMENT)]
    assert histories == [(6, 7, 8, 9, 10, 11), (6, 7, 8, 9, 10, 11, 12)]
    assert all(len(row.history) == row.position for row in rules_of(SEGMENT))


def test_no_history_is_kept_for_a_row_that_does_not_need_it() -> None:
    segment = replace(SEGMENT, params=replace(PARAMS, frequency_penalty=0.0), history=())
    assert [row.history for row in rules_of(segment)] == [(), ()]


def test_a_rule_carries_every_parameter_of_its_segment() -> None:
    for row in rules_of(SEGMENT):
        for name in ("params", "num_prompt", "top_logprobs"):
            assert getattr(row, name) == getattr(SEGMENT, name)


def test_each_row_has_its_mask() -> None:
    assert [row.mask for row in rules_of(SEGMENT)] == [b"", b""]
    masked = replace(SEGMENT, masks=b"aaaabbbb")
    assert [row.mask for row in rules_of(masked)] == [b"aaaa", b"bbbb"]


def test_a_segment_in_the_middle_of_a_prefill_has_no_rules() -> None:
    assert rules_of(replace(SEGMENT, num_sampled=0)) == []


def test_only_a_sampled_row_is_filtered() -> None:
    assert rule(SamplingParams(top_p=0.9)).params.is_filtered
    assert rule(SamplingParams(top_k=5)).params.is_filtered
    assert rule(SamplingParams(min_p=0.1)).params.is_filtered
    assert not rule(SamplingParams(temperature=0.0, top_p=0.9, top_k=5)).params.is_filtered
    assert not rule(
        SamplingParams(frequency_penalty=1.0, logit_bias=((1, 2.0),))
    ).params.is_filtered


def test_stops_are_forbidden_exactly_until_min_tokens_are_out() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(7,))
    assert [rule(params, position=p, num_prompt=5).forbidden for p in (5, 6, 7)] == [(7,), (7,), ()]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert rule(SamplingParams(temperature=1e-6)).params.is_greedy
    assert not rule(SamplingParams(temperature=1e-4)).params.is_greedy


def test_a_row_of_a_tree_has_the_rule_of_its_own_branch_and_of_no_other() -> None:
    parents = (-1, -1, 0, 0, 2)
    drafted = (20, 21, 22, 23, 24)
    patient = replace(PARAMS, min_tokens=5)
    tree = replace(
        SEGMENT,
        num_rows=7,
        num_sampled=6,
        tokens=(10, 11, *drafted),
        parents=parents,
        params=patient,
    )
    branches: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 2), (0, 3), (0, 2, 4))
    committed_rule, *branch_rules = rules_of(tree)
    chain = replace(SEGMENT, num_rows=2, num_sampled=1, tokens=(10, 11), params=patient)
    assert [committed_rule] == rules_of(chain)
    for row, branch in zip(branch_rules, branches, strict=True):
        tokens = (10, 11, *(drafted[node] for node in branch))
        branch_chain = replace(chain, num_rows=len(tokens), tokens=tokens)
        assert [row] == rules_of(branch_chain)
        assert len(row.history) == row.position


@pytest.mark.parametrize(
    ("changes", "keeps", "is_guessed"),
    [
        ({}, True, True),
        ({"top_p": 0.95}, True, True),
        ({"top_p": 0.5}, True, False),
        ({"top_k": 40}, True, True),
        ({"top_k": 5}, True, False),
        ({"min_p": 0.05}, True, True),
        ({"min_p": 0.2}, True, False),
        ({"top_p": 0.5, "temperature": 0.0}, True, True),
        ({"top_p": 0.95, "frequency_penalty": 0.1}, False, True),
        ({"logit_bias": ((3, 1.0),)}, False, True),
        ({"min_tokens": 4, "stop_token_ids": (2,)}, False, True),
        ({"min_tokens": 3, "stop_token_ids": (2,)}, True, True),
    ],
)
def test_edits_and_wide_filters_are_left_out_of_guesses(
    changes: dict[str, object], keeps: bool, is_guessed: bool
) -> None:
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": 9, **changes})  # type: ignore[arg-type]
    assert keeps_logits(params, num_generated=3) == keeps
    assert is_guessed_by_score(params, has_filters=False) == is_guessed
    assert is_guessed_by_score(params, has_filters=True)
