"""The distillation loss from the target's best tokens, compared with the loss from all logits."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.distill.train.losses import (
    Comparison,
    Divergence,
    DraftVocabulary,
    KeptTargets,
    LossOptions,
)
from eesd_dist.errors import ConfigError

NUM_TOKENS = 40
WHOLE = DraftVocabulary(None, vocab_size=NUM_TOKENS)
DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "tv")


def two_logits(*, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (30, NUM_TOKENS)
    target = spread * torch.randn(shape, generator=generator)
    return spread * torch.randn(shape, generator=generator), target


def best_tokens(logits: Tensor, count: int) -> KeptTargets:
    top = logits.topk(count, dim=-1)
    return KeptTargets(ids_NK=top.indices, logits_NK=top.values, lse_N=logits.logsumexp(-1))


def plain_loss(guess: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Computes the formulas of the docstring over all logits."""
    log_q = (guess / options.temperature).log_softmax(-1)
    log_p = (target / options.temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    soft = {
        "forward_kl": functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1),
        "reverse_kl": functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
    }[options.divergence]
    hard = functional.cross_entropy(guess, target.argmax(-1), reduction="none")
    return (1 - options.soft) * hard + options.soft * options.temperature**2 * soft


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_with_every_token_kept_the_loss_is_that_of_the_full_logits(
    divergence: Divergence, temperature: float
) -> None:
    if divergence == "tv":
        temperature = 1.0
    guess, target = two_logits()
    options = LossOptions(soft=0.6, temperature=temperature, divergence=divergence)
    expected = plain_loss(guess, target, options)
    for targets in (KeptTargets.whole(target), best_tokens(target, NUM_TOKENS)):
        loss = Comparison(guess, targets, WHOLE).loss(options)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_best_tokens_and_a_lump_are_the_loss_but_for_what_the_lump_hides(
    divergence: Divergence,
) -> None:
    guess, target = two_logits()
    options = LossOptions(soft=1.0, divergence=divergence)
    exact = plain_loss(guess, target, options)
    gaps = []
    for count in (4, 12, 36):
        lumped = Comparison(guess, best_tokens(target, count), WHOLE).loss(options)
        assert bool((lumped <= exact + 1e-5).all())
        gaps.append(float((exact - lumped).mean()))
    assert gaps[0] > gaps[1] > gaps[2] >= -1e-5
    assert gaps[2] < 0.1 * gaps[0]


def test_what_the_lump_hides_is_the_divergence_within_the_tail() -> None:
    guess, target = two_logits()
    targets = best_tokens(target, 10)
    lumped = Comparison(guess, targets, WHOLE).loss(LossOptions(soft=1.0))
    outside = torch.ones_like(target, dtype=torch.bool).scatter(-1, targets.ids_NK, False)
    tail_p = target.masked_fill(~outside, -1e9).log_softmax(-1)
    tail_q = guess.masked_fill(~outside, -1e9).log_softmax(-1)
    within = (tail_p.exp() * (tail_p - tail_q) * outside).sum(-1)
    mass = (target.softmax(-1) * outside).sum(-1)
    exact = plain_loss(guess, target, LossOptions(soft=1.0))
    torch.testing.assert_close(lumped + mass * within, exact, rtol=1e-4, atol=1e-5)


def test_acceptance_lies_between_what_the_best_tokens_say_and_that_plus_the_tails() -> None:
    guess, target = two_logits()
    exact = torch.minimum(guess.softmax(-1), target.softmax(-1)).sum(-1)
    comparison = Comparison(guess, best_tokens(target, 12), WHOLE)
    lower = comparison.one_minus_tv()
    upper = 1.0 - comparison.loss(LossOptions(soft=1.0, divergence="tv"))
    assert bool((lower <= exact + 1e-6).all())
    assert bool((exact <= upper + 1e-6).all())
    assert float((upper - lower).mean()) < 0.1
    whole = Comparison(guess, KeptTargets.whole(target), WHOLE).one_minus_tv()
    torch.testing.assert_close(whole, exact, rtol=1e-4, atol=1e-5)


def test_the_loss_falls_to_nothing_when_the_head_says_what_the_target_says() -> None:
    _, target = two_logits()
    for divergence in DIVERGENCES:
        for count in (5, NUM_TOKENS):
            comparison = Comparison(target, best_tokens(target, count), WHOLE)
            loss = comparison.loss(LossOptions(soft=1.0, divergence=divergence))
            assert float(loss.abs().max()) < 1e-5
            assert bool(comparison.agrees().all())


def test_gradients_from_the_best_tokens_point_where_the_full_ones_do() -> None:
    noise, target = two_logits(spread=3.0)
    guess = target + 0.5 * noise
    for divergence in DIVERGENCES:
        options = LossOptions(divergence=divergence)
        whole, lumped = guess.clone().requires_grad_(), guess.clone().requires_grad_()
        plain_loss(whole, target, options).sum().backward()
        Comparison(lumped, best_tokens(target, 16), WHOLE).loss(options).sum().backward()
        assert whole.grad is not None
        assert lumped.grad is not None
        cosine = functional.cosine_similarity(whole.grad.flatten(), lumped.grad.flatten(), dim=0)
        assert float(cosine) > 0.95


def test_a_truncated_head_is_held_against_what_it_has_of_the_target() -> None:
    guess, target = two_logits()
    chosen = torch.arange(0, NUM_TOKENS, 2)
    vocabulary = DraftVocabulary(chosen, vocab_size=NUM_TOKENS)
    guess = guess[:, : len(chosen)]
    comparison = Comparison(guess, KeptTargets.whole(target), vocabulary)
    seen = target[:, chosen]
    mass = target.softmax(-1)[:, chosen].sum(-1)
    has_best = target.argmax(-1) % 2 == 0
    hard = functional.cross_entropy(guess, seen.argmax(-1), reduction="none") * has_best
    soft = plain_loss(guess, seen, LossOptions(soft=1.0)) * mass
    loss = comparison.loss(LossOptions(soft=0.4))
    torch.testing.assert_close(loss, 0.6 * hard + 0.4 * soft, rtol=1e-4, atol=1e-5)
    agrees = (guess.argmax(-1) * 2 == target.argmax(-1)) & has_best
    assert torch.equal(comparison.agrees(), agrees)
    accepted = torch.minimum(guess.softmax(-1), target.softmax(-1)[:, chosen]).sum(-1)
    torch.testing.assert_close(comparison.one_minus_tv(), accepted, rtol=1e-4, atol=1e-5)


def test_a_truncated_head_is_not_blamed_for_tokens_it_lacks() -> None:
    target = torch.full((2, 4), -9.0)
    target[0, 3] = 9.0  # the head lacks token 3
    target[1, 2] = 9.0
    vocabulary = DraftVocabulary(torch.tensor([0, 2]), vocab_size=4)
    guess = torch.tensor([[9.0, -9.0], [-9.0, 9.0]], requires_grad=True)
    loss = Comparison(guess, KeptTargets.whole(target), vocabulary).loss(LossOptions(soft=0.5))
    assert float(loss.detach().max()) < 1e-3
    loss.sum().backward()
    assert guess.grad is not None
    assert float(guess.grad.abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"soft": 1.5}, "from 0 to 1"),
        ({"temperature": 0.0}, "above 0"),
        ({"divergence": "l2"}, "one of forward_kl"),
        ({"divergence": "tv", "temperature": 2.0}, "leave the temperature at 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LossOptions(**settings)  # type: ignore[arg-type]


def test_extreme_logits_stay_finite() -> None:
    guess = torch.tensor([[80.0, -80.0, 0.0, 0.0], [-80.0, 80.0, 0.0, 0.0]], requires_grad=True)
    target = torch.tensor([[-90.0, 90.0, 0.0, 0.0], [-90.0, 90.0, 0.0, 0.0]])
    for divergence in DIVERGENCES:
        loss = Comparison(guess, best_tokens(target, 2), DraftVocabulary(None, vocab_size=4)).loss(
            LossOptions(divergence=divergence)
        )
        assert math.isfinite(float(loss.detach().sum()))
        (gradient,) = torch.autograd.grad(loss.sum(), guess)
        assert bool(gradient.isfinite().all())
