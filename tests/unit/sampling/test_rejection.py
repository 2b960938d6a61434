"""Rejection sampling gives the target's distribution at every position of a chain."""

import pytest
import torch
from torch import Tensor

from eesd_dist.sampling.rejection import draft_sample, reject_all
from eesd_dist.types import SamplingParams, Verdict
from tests.unit.sampling.rows_and_odds import (
    NUM_AT_ONCE,
    NUM_DRAWS,
    chi_square_p_value,
    counts_of,
    rule,
    total_variation,
    with_one_percent_moved,
)

V = 64
CHAIN = 3


def chain_logits(seed: int, *, num_rows: int = CHAIN + 1) -> Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed))


TARGET = chain_logits(0)
HEAD = (TARGET + 0.5 * chain_logits(1))[:CHAIN]


NUM_CHAINS = 70_000
"""A chain yields nearly three tokens: these are the 200,000 draws."""


def run_chains(target: Tensor, head: Tensor, num_chains: int) -> list[tuple[Verdict, list[int]]]:
    """Returns the verdicts and drafts of independent chains of 3."""
    runs: list[tuple[Verdict, list[int]]] = []
    for start in range(0, num_chains, NUM_AT_ONCE):
        rules = [
            rule(SamplingParams(seed=seed), position=depth)
            for seed in range(start, start + NUM_AT_ONCE)
            for depth in range(CHAIN + 1)
        ]
        draft_rules = [row for row in rules if row.position < CHAIN]
        depths = list(range(CHAIN)) * NUM_AT_ONCE
        drafted = draft_sample(head.repeat(NUM_AT_ONCE, 1), draft_rules, depths)
        drafts = drafted.tokens.view(NUM_AT_ONCE, CHAIN).tolist()
        verdicts = reject_all(target.repeat(NUM_AT_ONCE, 1), drafted.probs, drafts, rules)
        runs.extend(zip(verdicts, drafts, strict=True))
    return runs


def counts_at(runs: list[tuple[Verdict, list[int]]], depth: int) -> Tensor:
    """Counts the tokens at `depth`, accepted or next, of the chains that reached it."""
    tokens = [
        draft[depth] if verdict.num_accepted > depth else verdict.next_token
        for verdict, draft in runs
        if verdict.num_accepted >= depth
    ]
    return counts_of(torch.tensor(tokens), vocab_size=V)


def test_200_000_tokens_of_chains_have_the_distribution_of_the_target_at_every_depth() -> None:
    runs = run_chains(TARGET, HEAD, NUM_CHAINS)
    assert sum(verdict.num_accepted + 1 for verdict, _ in runs) >= NUM_DRAWS
    for depth in range(CHAIN + 1):
        target_V = TARGET[depth].double().softmax(-1)
        assert chi_square_p_value(counts_at(runs, depth), target_V) > 1e-3
    accepted = sum(verdict.num_accepted >= 1 for verdict, _ in runs) / len(runs)
    tv = total_variation(TARGET[0].softmax(-1), HEAD[0].softmax(-1))
    assert accepted == pytest.approx(1 - tv, abs=0.01)


def test_a_verifier_with_one_percent_of_bias_is_caught_at_every_depth() -> None:
    target_SV = TARGET.double().softmax(-1)
    biased_SV = torch.stack([with_one_percent_moved(target_V) for target_V in target_SV])
    runs = run_chains(biased_SV.log().float(), HEAD, 30_000)
    for depth in range(CHAIN):
        assert chi_square_p_value(counts_at(runs, depth), target_SV[depth]) < 1e-6


def test_a_chain_judged_with_others_is_judged_as_alone() -> None:
    drafts = [[1, 2], [], [3, 4, 5]]
    num_rows = sum(len(draft) + 1 for draft in drafts)
    target_SV, head_KV = chain_logits(4, num_rows=num_rows), chain_logits(5, num_rows=5)
    rules = [rule(SamplingParams(seed=row), position=row) for row in range(num_rows)]
    draft_probs_KV = head_KV.softmax(-1)
    batch_verdicts = reject_all(target_SV, draft_probs_KV, drafts, rules)
    row = drafted = 0
    for draft, verdict in zip(drafts, batch_verdicts, strict=True):
        rows, of_draft = slice(row, row + len(draft) + 1), slice(drafted, drafted + len(draft))
        (single_verdict,) = reject_all(
            target_SV[rows], draft_probs_KV[of_draft], [draft], rules[rows]
        )
        assert single_verdict == verdict
        row, drafted = rows.stop, of_draft.stop


def test_at_temperature_0_a_draft_survives_exactly_while_it_is_the_targets_argmax() -> None:
    favourites = TARGET.argmax(-1).tolist()
    rules = [rule(SamplingParams(temperature=0.0), position=p) for p in range(CHAIN + 1)]
    wrong = (favourites[1] + 1) % V
    for draft, expected in [
        (favourites[:3], Verdict(num_drafted=3, num_accepted=3, next_token=favourites[3])),
        (
            [favourites[0], wrong, favourites[2]],
            Verdict(num_drafted=3, num_accepted=1, next_token=favourites[1]),
        ),
    ]:
        certain_KV = torch.nn.functional.one_hot(torch.tensor(draft), V).float()
        assert reject_all(TARGET, certain_KV, [draft], rules) == [expected]


def test_a_draft_outside_the_filtered_target_never_survives() -> None:
    target_V = TARGET[:1].expand(2, -1)
    unlikely = int(TARGET[0].argmin())
    certain_KV = torch.nn.functional.one_hot(torch.tensor([unlikely]), V).float()
    for seed in range(50):
        rules = [rule(SamplingParams(seed=seed, top_k=3), position=p) for p in (0, 1)]
        (verdict,) = reject_all(target_V, certain_KV, [[unlikely]], rules)
        assert verdict.num_accepted == 0
        assert verdict.next_token in TARGET[0].topk(3).indices.tolist()


def test_a_head_equal_to_the_target_is_never_rejected() -> None:
    rules = [rule(SamplingParams(seed=3), position=p) for p in range(CHAIN + 1)]
    drafted = draft_sample(TARGET[:CHAIN], rules[:CHAIN], range(CHAIN))
    (verdict,) = reject_all(TARGET, drafted.probs, [drafted.tokens.tolist()], rules)
    assert verdict.num_accepted == CHAIN


def test_the_same_seed_gives_the_same_draft_and_another_depth_a_fresh_one() -> None:
    flat_SV = torch.zeros(8, 4_096)
    rules = [rule(SamplingParams(seed=3), position=p) for p in range(8)]
    first = draft_sample(flat_SV, rules, [0] * 8).tokens.tolist()
    assert draft_sample(flat_SV, rules, [0] * 8).tokens.tolist() == first
    assert draft_sample(flat_SV, rules, [1] * 8).tokens.tolist() != first


def test_a_truncated_draft_vocabulary_speaks_of_target_tokens() -> None:
    vocab_ids = torch.tensor([40, 3, 17])
    logits_SV = torch.tensor([[0.0, 1.0, 2.0]])
    drafted = draft_sample(logits_SV, [rule()], [0], vocab_ids=vocab_ids, vocab_size=V)
    assert drafted.tokens.tolist()[0] in vocab_ids.tolist()
    assert drafted.probs.shape == (1, V)
    torch.testing.assert_close(drafted.probs[0, vocab_ids], logits_SV[0].softmax(-1))
    assert float(drafted.probs.sum()) == pytest.approx(1.0)
