"""The rule is exact sampling, the same on any sharding, and a draft with the same noise is often
right."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from eesd_dist.backends.api import engine_on
from eesd_dist.backends.cpu.kernels.best_two import best_two_kernel
from eesd_dist.backends.cpu.kernels.choice import gumbel_kernel
from eesd_dist.backends.cpu.sampling import CompiledSampling, CpuSampling
from eesd_dist.backends.torch.sampling import TorchSampling
from eesd_dist.model.parallel import rank_range
from eesd_dist.sampling.backend import BestTwo
from eesd_dist.sampling.processors import VocabularyShard
from eesd_dist.sampling.rule import (
    WIDEST_GAP,
    RowRule,
    TokenChoice,
    choose,
    draft_choice,
    first_max,
    joined_choices,
    perturbed,
    top1_probs,
)
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.types import SamplingParams
from tests.support.fake_cuda import fake_cuda
from tests.support.operators import OperatorWatch
from tests.support.thread_ranks import on_ranks
from tests.unit.sampling.rows_and_odds import (
    NUM_AT_ONCE,
    NUM_DRAWS,
    PLAIN,
    chi_square_p_value,
    counts_of,
    rule,
    total_variation,
    with_one_percent_moved,
)

V = 64
MENU = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=4, temperature=0.7, top_p=0.9),
    SamplingParams(seed=5, top_k=5, logit_bias=((3, 4.0), (60, -100.0))),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(seed=6, presence_penalty=2.0, min_p=0.05),
    SamplingParams(seed=7, min_tokens=99, stop_token_ids=(1, 33)),
]


def random_logits(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_of(tokens: Sequence[int], *, vocab_size: int = V) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(-(-vocab_size // 32) * 4, "little")


def menu_rules(*, top_logprobs: int | None = None) -> list[RowRule]:
    """One rule for each parameters of the menu without a mask, and one for each with."""
    rules = [
        rule(
            structs.replace(params, top_logprobs=top_logprobs),
            position=5,
            num_prompt=2,
            history=(5, 9, 9, 33, 12),
        )
        for params in MENU
    ]
    masked = mask_of((0, 7, 13, 16, 31, 33, 34, 63))
    return [*rules, *(structs.replace(row_rule, mask=masked) for row_rule in rules)]


@cache
def rules_with_seeds(num_seeds: int, params: SamplingParams = PLAIN) -> tuple[RowRule, ...]:
    """Returns rules for the same position of requests that differ only in their seeds."""
    return tuple(
        rule(structs.replace(params, seed=seed), position=12, num_prompt=4)
        for seed in range(num_seeds)
    )


def draws(logits_V: Tensor, rules: Sequence[RowRule]) -> Tensor:
    logits_SV = logits_V.repeat(NUM_AT_ONCE, 1)
    batches = [rules[start : start + NUM_AT_ONCE] for start in range(0, len(rules), NUM_AT_ONCE)]
    return torch.cat([torch.from_numpy(choose(logits_SV, batch).tokens) for batch in batches])


def test_200_000_choices_at_temperature_1_have_the_distribution_of_the_target() -> None:
    logits_V = random_logits(0, V, scale=1.0)
    target_V = logits_V.double().softmax(-1)
    counts_V = counts_of(draws(logits_V, rules_with_seeds(NUM_DRAWS)), vocab_size=V)
    assert chi_square_p_value(counts_V, target_V) > 1e-3
    assert total_variation(counts_V / NUM_DRAWS, target_V) < 0.01


def test_a_sampler_with_one_percent_of_bias_is_caught_by_the_same_test() -> None:
    target_V = random_logits(0, V, scale=1.0).double().softmax(-1)
    biased_V = with_one_percent_moved(target_V)
    biased_draws = draws(biased_V.log().float(), rules_with_seeds(NUM_DRAWS))
    assert chi_square_p_value(counts_of(biased_draws, vocab_size=V), target_V) < 1e-12


def test_successive_positions_of_one_seed_have_the_distribution_of_the_target() -> None:
    logits_V = random_logits(11, V, scale=1.0)
    rules = [rule(SamplingParams(seed=5), position=position) for position in range(40_000)]
    counts_V = counts_of(draws(logits_V, rules), vocab_size=V)
    assert chi_square_p_value(counts_V, logits_V.double().softmax(-1)) > 1e-3


def test_temperature_and_top_p_give_the_filtered_distribution() -> None:
    logits_V = random_logits(1, V, scale=1.0)
    probs_V = (logits_V.double() / 0.7).softmax(-1)
    order = probs_V.argsort(descending=True)
    nucleus = order[: int((probs_V[order].cumsum(0) < 0.8).sum()) + 1]
    target_V = torch.zeros(V, dtype=torch.float64)
    target_V[nucleus] = probs_V[nucleus] / probs_V[nucleus].sum()
    rules = rules_with_seeds(40_000, SamplingParams(temperature=0.7, top_p=0.8))
    counts_V = counts_of(draws(logits_V, rules), vocab_size=V)
    assert chi_square_p_value(counts_V, target_V) > 1e-3


@pytest.mark.parametrize("distance", [0.1, 0.5, 2.0])
def test_a_draft_with_the_same_noise_is_accepted_as_often_as_the_theorem_says(
    distance: float,
) -> None:
    target_V = random_logits(2, V)
    head_V = target_V + distance * random_logits(3, V, scale=1.0)
    tv = total_variation(target_V.softmax(-1), head_V.softmax(-1))
    rules = rules_with_seeds(20_000)
    drafted_S = draft_choice(head_V.expand(len(rules), -1), rules).tokens[:, 0]
    accepted = float((drafted_S == draws(target_V, rules)).double().mean())
    slack = 4 * 0.5 / len(rules) ** 0.5
    assert (1 - tv) / (1 + tv) - slack < accepted < 1 - tv + slack


def test_temperature_0_takes_the_largest_logit_and_the_smallest_id_of_equals() -> None:
    logits_SV = torch.zeros(2, V)
    logits_SV[0, [9, 40]] = 5.0
    greedy = rule(SamplingParams(temperature=0.0))
    assert choose(logits_SV, [greedy, greedy]).tokens.tolist() == [9, 0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=70))
def test_first_max_is_the_first(values: list[int]) -> None:
    assert first_max(torch.tensor([values]).float()).tolist() == [values.index(max(values))]


def test_the_noise_of_a_row_does_not_depend_on_greedy_rows_of_its_batch() -> None:
    logits_SV = random_logits(4, 3, V)
    sampled = rule(SamplingParams(seed=8), position=3)
    greedy = rule(SamplingParams(temperature=0.0), position=3)
    batch_tokens = choose(logits_SV, [greedy, sampled, greedy]).tokens
    assert batch_tokens[1] == choose(logits_SV[1:2], [sampled]).tokens[0]
    assert batch_tokens[[0, 2]].tolist() == logits_SV[[0, 2]].argmax(-1).tolist()


def choose_on_shards(logits_SV: Tensor, rules: list[RowRule], num_ranks: int) -> list[TokenChoice]:
    count = logits_SV.shape[-1]

    def on_rank(group: TensorGroup) -> TokenChoice:
        shard = rank_range(count, group.rank, num_ranks)
        return choose(
            logits_SV[:, shard.start : shard.stop],
            rules,
            group=group,
            vocab_start=shard.start,
        )

    return on_ranks(num_ranks, on_rank)


@pytest.mark.parametrize(("num_columns", "num_ranks"), [(97, 2), (21, 2), (3, 2), (97, 5), (3, 5)])
def test_ranks_share_a_vocabulary_that_does_not_divide_evenly(
    num_columns: int, num_ranks: int
) -> None:
    """Of five ranks two have no token of three."""
    rules = [
        structs.replace(row_rule, top_logprobs=20)
        for row_rule in (
            rule(SamplingParams(temperature=0.0)),
            rule(SamplingParams(temperature=0.8, seed=3)),
            rule(SamplingParams(temperature=0.8, top_p=0.9)),
        )
    ]
    logits_SV = random_logits(4, len(rules), num_columns)
    expected = choose(logits_SV, rules)
    for choice in choose_on_shards(logits_SV, rules, num_ranks):
        assert choice.tokens.tolist() == expected.tokens.tolist()
        assert choice.top_ids.tolist() == expected.top_ids.tolist()
        np.testing.assert_allclose(choice.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("top_logprobs", [None, 0, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_rank_of_a_sharded_vocabulary_makes_the_choice_of_the_whole_one(
    num_ranks: int, top_logprobs: int | None, seed: int
) -> None:
    rules = menu_rules(top_logprobs=top_logprobs)
    logits_SV = random_logits(seed, len(rules), V)
    expected = choose(logits_SV, rules)
    for choice in choose_on_shards(logits_SV, rules, num_ranks):
        assert choice.tokens.tolist() == expected.tokens.tolist()
        assert choice.top_ids.tolist() == expected.top_ids.tolist()
        np.testing.assert_allclose(choice.logprobs, expected.logprobs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(choice.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-6)


def test_ties_across_shards_go_to_the_smallest_id() -> None:
    logits_SV = torch.zeros(2, V)
    logits_SV[0, [20, 40, 60]] = 1.0
    greedy = rule(SamplingParams(temperature=0.0))
    for num_ranks in (2, 4):
        for choice in choose_on_shards(logits_SV, [greedy, greedy], num_ranks):
            assert choice.tokens.tolist() == [20, 0]


def test_a_shard_smaller_than_the_wanted_alternatives_still_reports_them_all() -> None:
    rules = [rule(SamplingParams(top_logprobs=20))]
    logits_SV = random_logits(7, 1, V)
    expected = choose(logits_SV, rules)
    for choice in choose_on_shards(logits_SV, rules, 4):
        assert choice.top_ids.tolist() == expected.top_ids.tolist()


def test_logprobs_are_those_of_the_raw_logits_whatever_the_parameters() -> None:
    rules = menu_rules(top_logprobs=4)
    logits_SV = random_logits(5, len(rules), V)
    expected_SV = logits_SV.double().log_softmax(-1)
    choice = choose(logits_SV, rules)
    tokens_S = torch.from_numpy(choice.tokens).long()
    np.testing.assert_allclose(
        choice.logprobs, expected_SV.gather(-1, tokens_S[:, None]).squeeze(-1), atol=1e-5
    )
    best = expected_SV.topk(4)
    assert choice.top_ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(choice.top_logprobs, best.values, atol=1e-5)


def test_a_row_that_asks_for_no_logprobs_gets_none() -> None:
    choice = choose(random_logits(5, 2, V), [rule(), rule()])
    assert choice.logprobs.shape == (0,)
    assert choice.top_ids.shape == choice.top_logprobs.shape == (2, 0)


def test_a_bias_of_100_forces_a_token_and_of_minus_100_bans_it() -> None:
    logits_SV = random_logits(6, 1, V)
    for temperature in (0.0, 1.0):
        forced = SamplingParams(temperature=temperature, logit_bias=((11, 100.0),))
        assert choose(logits_SV, [rule(forced)]).tokens.tolist() == [11]
    favourite = int(logits_SV.argmax())
    banned = SamplingParams(temperature=0.0, logit_bias=((favourite, -100.0),))
    assert (
        choose(logits_SV, [rule(banned)]).tokens.tolist()
        == logits_SV.topk(2).indices[:, 1].tolist()
    )


@pytest.mark.parametrize("params", MENU)
def test_a_mask_leaves_the_other_tokens_as_they_are(params: SamplingParams) -> None:
    logits_SV = random_logits(8, 40, V)
    allowed = [0, 7, 15, 16, 31, 32, 40, 63]
    rules = [
        RowRule.of(
            structs.replace(params, seed=seed), position=5, num_prompt=2, mask=mask_of(allowed)
        )
        for seed in range(40)
    ]
    chosen = choose(logits_SV, rules).tokens
    assert set(chosen.tolist()) <= set(allowed)
    only_SV = torch.full_like(logits_SV, -torch.inf)
    only_SV[:, allowed] = logits_SV[:, allowed]
    plain = choose(only_SV, [structs.replace(row_rule, mask=b"") for row_rule in rules]).tokens
    assert chosen.tolist() == plain.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_forced_token_is_reported_with_the_log_probability_of_the_raw_logits(
    num_ranks: int,
) -> None:
    tokens = [0, 20, 21, 42, 63, 7]
    logits_SV = random_logits(12, len(tokens) + 1, V)
    plain = rule(SamplingParams(temperature=0.0, top_logprobs=1))
    rules = [
        *(
            structs.replace(plain, forced=token, top_logprobs=at % 4)
            for at, token in enumerate(tokens)
        ),
        plain,
    ]
    expected_SV = logits_SV.double().log_softmax(-1)
    choices = (
        choose_on_shards(logits_SV, rules, num_ranks)
        if num_ranks > 1
        else [choose(logits_SV, rules)]
    )
    for choice in choices:
        assert choice.tokens.tolist() == [*tokens, int(logits_SV[-1].argmax())]
        chosen = torch.from_numpy(choice.tokens).long()[:, None]
        np.testing.assert_allclose(
            choice.logprobs, expected_SV.gather(-1, chosen).squeeze(-1), atol=1e-5
        )
        assert choice.top_ids.tolist() == expected_SV.topk(3).indices.tolist()


def test_choices_in_parts_are_those_of_all_rows() -> None:
    rules = menu_rules()
    rules = [structs.replace(r, top_logprobs=(None, 0, 5)[at // 5]) for at, r in enumerate(rules)]
    logits_SV = random_logits(13, len(rules), V)
    whole = choose(logits_SV, rules)
    choices = [
        choose(logits_SV[first : first + 5], rules[first : first + 5])
        for first in range(0, len(rules), 5)
    ]
    merged = joined_choices(choices)
    assert merged.tokens.tolist() == whole.tokens.tolist()
    for row, row_rule in enumerate(rules):
        if row_rule.top_logprobs is not None:
            assert merged.logprobs[row] == whole.logprobs[row]
            top = slice(0, row_rule.top_logprobs)
            assert merged.top_ids[row, top].tolist() == whole.top_ids[row, top].tolist()
    assert joined_choices(choices[:1]).logprobs.size == 0


def test_a_mask_of_one_token_forces_it_and_a_full_one_forbids_nothing() -> None:
    logits_SV = random_logits(9, 3, V)
    for params in MENU:
        plain = rule(params, position=5)
        forced = structs.replace(plain, mask=mask_of([41]))
        assert choose(logits_SV, [forced] * 3).tokens.tolist() == [41] * 3
        free = structs.replace(plain, mask=b"\xff" * 8)
        assert (
            choose(logits_SV, [free] * 3).tokens.tolist()
            == choose(logits_SV, [plain] * 3).tokens.tolist()
        )


def test_a_truncated_draft_vocabulary_is_masked_by_target_ids() -> None:
    vocab_ids = torch.tensor([60, 3, 40, 8])
    logits_SV = random_logits(10, 5, 4)
    rules = [
        structs.replace(rule(SamplingParams(seed=seed), position=1), mask=mask_of([3, 8, 9]))
        for seed in range(5)
    ]
    drafted = draft_choice(logits_SV, rules, vocab_ids=vocab_ids, width=4)
    assert set(drafted.tokens[:, :2].flatten().tolist()) <= {3, 8}
    assert bool((drafted.scores[:, 2:] == -torch.inf).all())
    none = [structs.replace(row_rule, mask=mask_of([9])) for row_rule in rules]
    assert bool((draft_choice(logits_SV, none, vocab_ids=vocab_ids).scores == -torch.inf).all())


def test_no_stop_is_chosen_before_min_tokens() -> None:
    logits_SV = torch.zeros(2, V)
    logits_SV[:, 33] = 50.0
    params = SamplingParams(min_tokens=3, stop_token_ids=(33,))
    rules = [rule(params, position=position, num_prompt=4) for position in (6, 7)]
    first, second = choose(logits_SV, rules).tokens.tolist()
    assert first != 33
    assert second == 33


def test_a_penalty_sees_the_drafted_ancestors_of_its_row() -> None:
    logits_SV = torch.zeros(2, V)
    logits_SV[:, 5], logits_SV[:, 6] = 2.0, 1.9
    params = SamplingParams(temperature=0.0, presence_penalty=0.5)
    before = rule(params, position=2, num_prompt=2, history=(1, 5))
    after = rule(params, position=3, num_prompt=2, history=(1, 5, 5))
    assert choose(logits_SV, [before, after]).tokens.tolist() == [5, 6]


def test_a_head_with_the_targets_logits_drafts_the_targets_choice() -> None:
    rules = menu_rules()
    logits_SV = random_logits(8, len(rules), V)
    assert (
        draft_choice(logits_SV, rules).tokens[:, 0].tolist()
        == choose(logits_SV, rules).tokens.tolist()
    )


def test_a_truncated_draft_vocabulary_uses_the_noise_of_the_target_ids() -> None:
    rules = menu_rules()
    logits_SV = random_logits(9, len(rules), V)
    vocab_ids = torch.tensor([2, 3, 5, 8, 13, 21, 33, 34, 55])
    outside = torch.ones(V, dtype=torch.bool)
    outside[vocab_ids] = False
    only_these_SV = logits_SV.masked_fill(outside, -torch.inf)
    drafted = draft_choice(logits_SV[:, vocab_ids], rules, vocab_ids=vocab_ids)
    assert drafted.tokens[:, 0].tolist() == choose(only_these_SV, rules).tokens.tolist()


def test_alternatives_are_the_next_best_under_the_same_noise() -> None:
    rules = [*menu_rules(), rule(SamplingParams(temperature=1.0, top_k=2))]
    logits_SV = random_logits(12, len(rules), V)
    choice = draft_choice(logits_SV, rules, width=3)
    scores_SV = perturbed(logits_SV, rules, VocabularyShard(start=0, size=V))
    for row in range(len(rules)):
        ranked = scores_SV[row].sort(descending=True, stable=True)
        possible = int((ranked.values[:3] > -torch.inf).sum())
        assert choice.tokens[row, :possible].tolist() == ranked.indices[:possible].tolist()
        assert torch.equal(choice.scores[row], ranked.values[:3])
    assert choice.scores[-1].isfinite().tolist() == [True, True, False]


ROW_PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 7.5])},
    optional={
        "top_k": st.sampled_from([1, 2, 7, 50, 299, 5000]),
        "top_p": st.sampled_from([1e-4, 0.1, 0.5, 0.9, 0.999, 1 - 1e-16]),
        "min_p": st.sampled_from([1e-4, 0.05, 0.5, 1.0]),
        "logit_bias": st.sampled_from([((3, 2.0), (8, -torch.inf)), ((1, 100.0),)]),
    },
)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.sampled_from([2, 3, 40, 300, 5000]),
    rows=st.lists(ROW_PARAMS, min_size=1, max_size=5),
    scale=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    is_rough=st.booleans(),
    has_infinity=st.booleans(),
)
def test_the_compiled_choice_is_that_of_the_scores(
    seed: int,
    width: int,
    rows: list[dict[str, Any]],
    scale: float,
    is_rough: bool,
    has_infinity: bool,
) -> None:
    """Rough logits have many equal values, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    logits_SV = scale * torch.randn(len(rows), width, generator=generator)
    logits_SV = logits_SV.round() * 0.5 if is_rough else logits_SV
    if has_infinity:
        logits_SV[0, seed % width] = torch.inf
    vocab_ids = torch.randperm(4 * width, generator=generator)[:width].sort().values
    rules = [rule(SamplingParams(seed=seed + at, **params)) for at, params in enumerate(rows)]
    choice = draft_choice(logits_SV, rules, vocab_ids=vocab_ids)
    expected = draft_choice(logits_SV, rules, vocab_ids=vocab_ids, width=2)
    assert torch.equal(choice.tokens, expected.tokens[:, :1])
    assert torch.equal(choice.scores, expected.scores[:, :1])
    assert torch.equal(choice.gaps, expected.gaps)


def test_a_forced_token_is_reported_whatever_the_logits() -> None:
    row_rule = structs.replace(rule(SamplingParams(temperature=0.0)), forced=7)
    logits_SV = random_logits(3, 2, V)
    assert choose(logits_SV, [row_rule, row_rule]).tokens.tolist() == [7, 7]


def test_a_row_that_a_call_cannot_decide_is_decided_by_its_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = [rule(SamplingParams(temperature=0.9, top_p=0.5, seed=seed)) for seed in range(4)]
    logits_SV = random_logits(3, 4, V)
    expected = choose(logits_SV, rules).tokens.tolist()
    decide = CompiledSampling.best_two

    def undecided(*arguments: Any) -> BestTwo:
        best = decide(*arguments)
        best.tokens_S2[[0, 2]], best.scores_S2[[0, 2]] = 1, np.nan
        return best

    monkeypatch.setattr(CompiledSampling, "best_two", undecided)
    assert choose(logits_SV, rules).tokens.tolist() == expected
    assert draft_choice(logits_SV, rules).tokens[:, 0].tolist() == expected


def test_no_choice_compiles_once_the_rule_is_ready() -> None:
    engine_on(torch.device("cpu")).warm_up()
    kernels = (gumbel_kernel(), best_two_kernel())
    before = [len(kernel.signatures) for kernel in kernels]
    for temperature in (0.0, 0.7):
        row_rule = rule(SamplingParams(temperature=temperature, seed=3))
        draft_choice(random_logits(3, 2, V), [row_rule, row_rule])
        draft_choice(random_logits(3, 2, V)[:, :9], [row_rule, row_rule], vocab_ids=torch.arange(9))
        choose(random_logits(4, 2, V), [row_rule, row_rule])
    assert [len(kernel.signatures) for kernel in kernels] == before


class _Sorts(OperatorWatch):
    """Records the operators that order whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def saw(
        self, operator: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        if any(word in str(operator) for word in ("sort", "topk", "kthvalue")):
            self.found.append(str(operator))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_sorts_no_row_to_find_two_maxima(device: str) -> None:
    with fake_cuda() if device == "cuda" else nullcontext():
        logits_SV = torch.zeros(2, 500, device=device)
        with _Sorts() as sorts, torch.inference_mode():
            draft_choice(logits_SV, [rule(), rule()], width=2)
            assert sorts.found == []
            logits_SV.sort(dim=-1)
    assert len(sorts.found) == 1


def test_maxima_are_found_on_a_device_as_on_the_host() -> None:
    x_SV = random_logits(14, 5, V).round()
    on_device, expected = (s.first_maxima(x_SV, 4) for s in (TorchSampling(), CpuSampling()))
    assert torch.equal(on_device[0], expected[0])
    assert torch.equal(on_device[1], expected[1])


def test_equal_maxima_of_a_draft_are_in_the_order_of_their_columns() -> None:
    logits_SV = torch.zeros(1, V)
    logits_SV[0, [41, 7, 30]] = 5.0
    greedy = rule(SamplingParams(temperature=0.0))
    choice = draft_choice(logits_SV.expand(2, -1), [greedy] * 2, width=4)
    assert choice.tokens.tolist() == [[7, 30, 41, 0]] * 2
    assert choice.gaps.tolist() == [0.0, 0.0]
    assert logits_SV.sum() == 15.0, "the caller's logits were changed"


def test_a_token_without_a_possible_rival_has_the_widest_gap_and_no_endless_one() -> None:
    rules = [rule(SamplingParams(temperature=1.0, top_k=1))]
    choice = draft_choice(random_logits(13, 1, V), rules)
    assert choice.gaps.tolist() == [WIDEST_GAP]


def test_the_probability_of_the_likeliest_token_is_that_of_the_softmax() -> None:
    logits_SV = random_logits(10, 3, V)
    logits_SV[1, 5:] = -torch.inf
    expected_S = logits_SV.double().softmax(-1).amax(-1)
    assert top1_probs(logits_SV) == pytest.approx(expected_S.tolist(), rel=1e-5)
