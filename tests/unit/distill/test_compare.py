"""Heads on held-out text: what is counted, and the confidence in the better of two."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eesd_dist.distill.compare import (
    Judged,
    difference,
    figures,
    judge,
    judge_text,
    one_minus_tv,
)
from eesd_dist.distill.features import FeatureSequence
from eesd_dist.distill.sources import TextRows
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.distill.train.losses import DraftVocabulary, KeptTargets
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from tests.support.drafters import EXIT_LAYER, Agreement, save_head, save_target

VOCAB = 96


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB)


def sequences_of(target: Path, count: int, *, temperature: float) -> list[FeatureSequence]:
    rng = random.Random(1)
    frozen = FrozenTarget(target, ModelSpec.from_folder(target), [EXIT_LAYER])
    sequences = []
    for _ in range(count):
        tokens = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(6, 20))]
        (view,) = frozen.view([tokens], top_k=VOCAB)
        sequences.append(
            FeatureSequence(
                tokens_T=torch.tensor(tokens),
                num_prompt=4,
                workload="test",
                temperature=temperature,
                hidden={at: x_TD.float() for at, x_TD in view.hidden.items()},
                top_ids_TK=view.top_ids_TK,
                top_logits_TK=view.top_logits_TK,
                lse_T=view.lse_T,
            )
        )
    return sequences


def head_that_agrees(target: Path, folder: Path, agreement: Agreement) -> TrainableExitHead:
    spec = ModelSpec.from_folder(target)
    saved = save_head(target, folder / agreement, agreement)
    return TrainableExitHead.read(saved, target=spec, target_path=target)


def full_logits(target: Path, sequence: FeatureSequence) -> Tensor:
    frozen = FrozenTarget(target, ModelSpec.from_folder(target), [EXIT_LAYER])
    return frozen.forward(sequence.tokens_T.unsqueeze(0), [EXIT_LAYER])[1][0]


def test_figures_are_those_of_the_whole_distributions(target: Path, tmp_path: Path) -> None:
    head = head_that_agrees(target, tmp_path, "sometimes")
    sequences = sequences_of(target, 6, temperature=0.8)
    agreed = overlap = positions = 0.0
    for sequence in sequences:
        p_TV = full_logits(target, sequence)[3:].softmax(-1)  # row 3 predicts an answer token
        guess_1TV = head.training_forward(sequence.hidden[EXIT_LAYER].unsqueeze(0)).detach()
        q_TV = guess_1TV[0, 3:].softmax(-1)
        agreed += float((p_TV.argmax(-1) == q_TV.argmax(-1)).sum())
        overlap += float((1.0 - 0.5 * (p_TV - q_TV).abs().sum(-1)).sum())
        positions += p_TV.shape[0]
    result = figures(judge(head, sequences))
    assert result.num_positions == positions
    assert result.agreement == pytest.approx(agreed / positions)
    assert result.one_minus_tv == pytest.approx(overlap / positions, abs=1e-4)
    assert result.acceptance == result.one_minus_tv


def test_greedy_text_is_accepted_where_both_put_the_same_token_first(
    target: Path, tmp_path: Path
) -> None:
    sequences = sequences_of(target, 3, temperature=0.0)
    always = figures(judge(head_that_agrees(target, tmp_path, "always"), sequences))
    never = figures(judge(head_that_agrees(target, tmp_path, "never"), sequences))
    assert always.acceptance == always.agreement == 1.0
    assert never.acceptance == never.agreement == 0.0


def test_a_better_head_rises_and_the_same_head_does_not(target: Path, tmp_path: Path) -> None:
    sequences = sequences_of(target, 8, temperature=0.0)
    old = judge(head_that_agrees(target, tmp_path, "sometimes"), sequences)
    new = judge(head_that_agrees(target, tmp_path, "always"), sequences)
    better = difference(old, new, of=lambda text: text.accepted, seed=0)
    assert better.rises
    assert better.mean == pytest.approx(figures(new).acceptance - figures(old).acceptance)
    assert better.low <= better.mean <= better.high
    assert not difference(old, old, of=lambda text: text.accepted, seed=0).rises
    assert difference(new, old, of=lambda text: text.accepted, seed=0).high < 0.0


def judged(agreed: float, num_positions: int = 100) -> Judged:
    return Judged(num_positions=num_positions, agreed=agreed, overlap=0.0, is_greedy=True)


def test_a_gain_of_one_lucky_text_among_many_does_not_count_as_a_rise() -> None:
    old = [judged(50.0) for _ in range(20)]
    new = [judged(90.0), *(judged(50.0) for _ in range(19))]
    lucky = difference(old, new, of=lambda text: text.accepted, seed=3)
    assert lucky.mean == pytest.approx(0.02)
    assert not lucky.rises


def test_the_interval_is_about_two_standard_errors_wide() -> None:
    rng = random.Random(5)
    gains = [rng.gauss(4.0, 10.0) for _ in range(200)]
    old = [judged(50.0) for _ in gains]
    new = [judged(50.0 + gain) for gain in gains]
    gain = difference(old, new, of=lambda text: text.accepted, seed=3)
    mean = sum(gains) / len(gains)
    std = (sum((gain - mean) ** 2 for gain in gains) / len(gains)) ** 0.5
    half_width = 1.96 * std / len(gains) ** 0.5 / 100
    assert (gain.high - gain.low) / 2 == pytest.approx(half_width, rel=0.1)


def test_nothing_to_judge_is_said() -> None:
    with pytest.raises(ConfigError, match="held-out text"):
        figures([judged(0.0, 0)])


def exact_overlap(guess_V: Tensor, target_W: Tensor, ids: Tensor, temperature: float) -> float:
    p_W = (target_W / temperature).softmax(dim=0)
    q_W = torch.zeros_like(p_W)
    q_W[ids] = (guess_V / temperature).softmax(dim=0)
    return 1.0 - 0.5 * (p_W - q_W).abs().sum().item()


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab_ids", [None, [0, 3, 4, 9]])
@pytest.mark.parametrize("num_logits", [12, 11, 4])
def test_one_minus_tv_is_exact_with_all_logits_and_else_a_lower_bound(
    temperature: float, vocab_ids: list[int] | None, num_logits: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    target = 3.0 * torch.randn(6, 12, generator=generator)
    ids = torch.arange(12) if vocab_ids is None else torch.tensor(vocab_ids)
    guess = 3.0 * torch.randn(6, len(ids), generator=generator)
    best = target.topk(num_logits, dim=-1)
    targets = KeptTargets(
        ids_NK=best.indices, logits_NK=best.values, lse_N=target.logsumexp(dim=-1)
    )
    vocabulary = DraftVocabulary(None if vocab_ids is None else ids, vocab_size=12)
    overlap = one_minus_tv(guess, targets, vocabulary, temperature=temperature)
    for row in range(6):
        exact = exact_overlap(guess[row], target[row], ids, temperature)
        assert overlap[row].item() <= exact + 1e-5
        if num_logits == 12:
            assert overlap[row].item() == pytest.approx(exact, abs=1e-5)


def test_the_bound_is_close_where_the_tail_is_small() -> None:
    generator = torch.Generator().manual_seed(1)
    target = 3.0 * torch.randn(50, 2000, generator=generator)
    guess = target + 0.3 * torch.randn(50, 2000, generator=generator)
    best = target.topk(256, dim=-1)
    targets = KeptTargets(
        ids_NK=best.indices, logits_NK=best.values, lse_N=target.logsumexp(dim=-1)
    )
    vocabulary = DraftVocabulary(None, vocab_size=2000)
    for temperature in (0.5, 0.7):
        overlap = one_minus_tv(guess, targets, vocabulary, temperature=temperature).mean().item()
        whole = one_minus_tv(guess, KeptTargets.whole(target), vocabulary, temperature=temperature)
        assert whole.mean().item() - 0.03 < overlap <= whole.mean().item() + 1e-5


@pytest.mark.parametrize(("agreement", "share"), [("always", 1.0), ("never", 0.0)])
def test_heads_that_always_and_never_agree_are_told_apart(
    target: Path, tmp_path: Path, agreement: Agreement, share: float
) -> None:
    head = head_that_agrees(target, tmp_path, agreement)
    frozen = FrozenTarget(target, ModelSpec.from_folder(target), [EXIT_LAYER])
    tokens = list(range(3, 23))
    (view,) = frozen.view([tokens[:-1]], top_k=VOCAB)
    text = TextRows(
        tokens=tuple(tokens),
        hidden=view.hidden,
        top_ids_TK=view.top_ids_TK,
        top_logits_TK=view.top_logits_TK,
        lse_T=view.lse_T,
    )
    guess = head.training_forward(view.hidden[EXIT_LAYER].unsqueeze(0))[0, 4:]

    def judged_at(temperature: float) -> Judged:
        return judge_text(
            guess,
            text,
            num_prompt=5,
            temperature=temperature,
            vocabulary=DraftVocabulary(None, vocab_size=VOCAB),
        )

    greedy, sampled = judged_at(0.0), judged_at(1.0)
    # The last prompt token and all written tokens except the last are judged.
    assert greedy.num_positions == 20 - 5
    assert greedy.agreed == greedy.accepted == share * 15
    assert sampled.agreed == greedy.agreed
    if share:
        assert sampled.accepted == pytest.approx(15.0, abs=1e-2)
    else:
        assert 0.0 < sampled.accepted < 12.0
