"""Processors, compared with slow implementations, and with transformers where it has the same."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from eesd_dist.sampling.processors import DraftVocabulary, VocabularyShard, processed
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.types import SamplingParams
from tests.unit.sampling.rows_and_odds import rule

V = 40


def logits_of(seed: int, *, num_rows: int = 1, vocab_size: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(num_rows, vocab_size, generator=generator)


def whole(logits_SV: Tensor, *rules: RowRule) -> Tensor:
    return processed(logits_SV, rules, VocabularyShard(start=0, size=logits_SV.shape[-1]))


def processed_slowly(logits: list[float], row: RowRule) -> list[float]:
    """Processes one token at a time, in Python floats."""
    x = list(logits)
    for token, bias in row.params.logit_bias:
        x[token] += bias
    for token in row.forbidden:
        x[token] = -math.inf
    if row.params.needs_history:
        for token in set(row.history):
            x[token] = (
                x[token] / row.params.repetition_penalty
                if x[token] > 0
                else (x[token] * row.params.repetition_penalty)
            )
        for token, count in Counter(row.history[row.num_prompt :]).items():
            x[token] -= row.params.frequency_penalty * count + row.params.presence_penalty
    if row.params.is_greedy:
        return x
    x = [logit / row.params.temperature for logit in x]
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if row.params.top_k:
        last = x[order[min(row.params.top_k, len(x)) - 1]]
        x = [logit if logit >= last else -math.inf for logit in x]
    if row.params.top_p < 1.0:
        nucleus: set[int] = set()
        total, mass = sum(math.exp(logit) for logit in x), 0.0
        for token in order:
            if nucleus and mass >= row.params.top_p:
                break
            nucleus.add(token)
            mass += math.exp(x[token]) / total
        x = [logit if token in nucleus else -math.inf for token, logit in enumerate(x)]
    if row.params.min_p > 0.0:
        x = [v if math.exp(v - max(x)) >= row.params.min_p else -math.inf for v in x]
    return x


def close(fast_V: Tensor, slow: list[float]) -> None:
    torch.testing.assert_close(fast_V.double(), torch.tensor(slow).double(), rtol=1e-5, atol=1e-5)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.0, 0.31, 0.77, 0.96, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 17, 40, 1_000]),
    min_p=st.sampled_from([0.0, 0.023, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 2.0, 100.0])), max_size=4
    ).map(tuple),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=3).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(PARAMS, st.lists(st.integers(0, V - 1), min_size=3, max_size=12).map(tuple)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 10_000),
)
def test_every_row_of_any_batch_is_processed_as_by_the_slow_twin(
    rows: list[tuple[SamplingParams, tuple[int, ...]]], seed: int
) -> None:
    rules = [
        rule(params, position=len(history), num_prompt=3, history=history)
        for params, history in rows
    ]
    logits_SV = logits_of(seed, num_rows=len(rules))
    before_SV = logits_SV.clone()
    fast_SV = whole(logits_SV, *rules)
    assert torch.equal(logits_SV, before_SV), "the caller's logits were changed"
    for row, row_rule in enumerate(rules):
        close(fast_SV[row], processed_slowly(logits_SV[row].tolist(), row_rule))
        assert torch.equal(fast_SV[row], whole(logits_SV[row : row + 1], row_rule)[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("params", "twin"),
    [
        (SamplingParams(top_k=7), hf.TopKLogitsWarper(7)),
        (SamplingParams(top_p=0.6), hf.TopPLogitsWarper(0.6)),
        (SamplingParams(top_p=0.999), hf.TopPLogitsWarper(0.999)),
        (SamplingParams(min_p=0.05), hf.MinPLogitsWarper(0.05)),
        (SamplingParams(temperature=0.3), hf.TemperatureLogitsWarper(0.3)),
    ],
)
def test_filters_agree_with_transformers(
    params: SamplingParams, twin: hf.LogitsProcessor, seed: int
) -> None:
    logits_SV = logits_of(seed, num_rows=3, vocab_size=1_000)
    expected_SV = twin(torch.zeros(3, 1, dtype=torch.long), logits_SV)
    torch.testing.assert_close(whole(logits_SV, *[rule(params)] * 3), expected_SV)


@pytest.mark.parametrize("seed", range(5))
def test_the_repetition_penalty_agrees_with_transformers(seed: int) -> None:
    logits_SV, history = logits_of(seed), (3, 9, 9, 27)
    twin = hf.RepetitionPenaltyLogitsProcessor(1.4)
    row = rule(SamplingParams(repetition_penalty=1.4), position=4, num_prompt=2, history=history)
    expected_SV = twin(torch.tensor([history]), logits_SV.clone())
    torch.testing.assert_close(whole(logits_SV, row), expected_SV)


def test_the_order_of_temperature_top_k_and_top_p_is_that_of_transformers() -> None:
    params = SamplingParams(temperature=1.6, top_k=9, top_p=0.8, min_p=0.1)
    warpers = [
        hf.TemperatureLogitsWarper(1.6),
        hf.TopKLogitsWarper(9),
        hf.TopPLogitsWarper(0.8),
        hf.MinPLogitsWarper(0.1),
    ]
    for seed in range(20):
        expected_SV = logits_SV = logits_of(seed)
        for warper in warpers:
            expected_SV = warper(torch.zeros(1, 1, dtype=torch.long), expected_SV)
        torch.testing.assert_close(whole(logits_SV, rule(params)), expected_SV)


def test_a_flat_row_wider_than_the_quick_look_keeps_exactly_its_mass() -> None:
    logits_SV = 0.001 * logits_of(1, num_rows=2, vocab_size=4_000)
    logits_SV[1] *= 5_000
    is_finite_SV = whole(logits_SV, *[rule(SamplingParams(top_p=0.5))] * 2).isfinite()
    for row in range(2):
        probs_V = logits_SV[row].double().softmax(-1)
        mass, smallest = (
            float(probs_V[is_finite_SV[row]].sum()),
            float(probs_V[is_finite_SV[row]].min()),
        )
        assert mass >= 0.5 - 1e-6
        assert mass - smallest < 0.5 + 1e-6
    assert int(is_finite_SV[0].sum()) > 1_900
    assert int(is_finite_SV[1].sum()) < 256


def test_of_equally_probable_tokens_top_p_keeps_the_smallest_ids() -> None:
    is_finite_SV = whole(torch.zeros(1, 10), rule(SamplingParams(top_p=0.35))).isfinite()
    assert is_finite_SV.nonzero()[:, 1].tolist() == [0, 1, 2, 3]


def test_a_forbidden_stop_stays_forbidden_under_any_bias() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(4,), logit_bias=((4, 100.0),))
    assert float(whole(logits_of(0), rule(params))[0, 4]) == -math.inf
    assert float(whole(logits_of(0), rule(params, position=1))[0, 4]) > 90.0


def test_shards_and_draft_vocabularies_edit_the_same_tokens() -> None:
    params = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias=((7, 3.0), (39, -2.0)),
        min_tokens=9,
        stop_token_ids=(0, 21),
    )
    row = rule(params, position=6, num_prompt=2, history=(1, 7, 7, 21, 30, 39))
    logits_SV = logits_of(2)
    expected_SV = whole(logits_SV, row)
    for start in (0, 10, 20, 30):
        shard = processed(
            logits_SV[:, start : start + 10], [row], VocabularyShard(start=start, size=10)
        )
        assert torch.equal(shard, expected_SV[:, start : start + 10])
    vocab_ids = torch.tensor([39, 0, 7, 8, 30])
    drafted = processed(logits_SV[:, vocab_ids], [row], DraftVocabulary(vocab_ids))
    assert torch.equal(drafted, expected_SV[:, vocab_ids])


def test_nothing_to_do_costs_nothing() -> None:
    logits_SV = logits_of(0)
    assert whole(logits_SV, rule()) is logits_SV
