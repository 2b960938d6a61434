"""Estimates how often the target would accept a head's guesses, and compares two heads.

Uses features, which have the target's best logits, and no target. 1 - TV is the probability that
rejection sampling accepts a guess (Leviathan et al. 2023, arXiv 2211.17192); with coupled sampling
acceptance is between (1 - TV) / (1 + TV) and 1 - TV (Daliri et al., arXiv 2408.07978).

A sequence is judged by its sampling: in greedy text a guess is accepted if head and target have the
same best token; in sampled text with probability 1 - TV of the two distributions (rejection
sampling's acceptance; the tail beyond the stored logits adds nothing, so that it is a lower bound,
the same for both heads). Only positions of tokens that the target generated are judged. Does not
depend on training or the engine.
"""

# Shapes: T positions of a sequence, G of them that the target wrote, N positions, D hidden size,
# K best tokens, V draft vocabulary, S sequences.

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd_dist.distill.features import FeatureSequence
from eesd_dist.distill.sources import TextRows
from eesd_dist.distill.train.losses import LEAST_TAIL, Comparison, DraftVocabulary, KeptTargets
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.statistics import Rows, bootstrap

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Sums of one head over the judged positions of one sequence."""

    num_positions: int
    agreed: float
    overlap: float
    """Sum of 1 - TV."""
    is_greedy: bool

    @property
    def accepted(self) -> float:
        return self.agreed if self.is_greedy else self.overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFigures:
    """Means of one head over the positions of all sequences."""

    num_positions: int
    agreement: float
    one_minus_tv: float
    acceptance: float
    """Agreement in greedy text, 1 - TV in sampled text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A new head's mean minus the old one's, with a bootstrap interval over sequences."""

    mean: float
    low: float
    high: float
    confidence: float = _CONFIDENCE

    @property
    def rises(self) -> bool:
        """True if the new head is better with confidence: the interval is above 0."""
        return self.low > 0.0


@torch.no_grad()
def judge(head: TrainableExitHead, sequences: Iterable[FeatureSequence]) -> list[Judged]:
    """Judges a head on each sequence, in order."""
    vocabulary = DraftVocabulary(head.vocab_ids, vocab_size=head.config.verifier.vocab_size)
    return [_judged(head, sequence, vocabulary) for sequence in sequences]


def figures(judged: Sequence[Judged]) -> HeldOutFigures:
    """Returns the means. Raises ConfigError if there was nothing to judge."""
    positions = sum(text.num_positions for text in judged)
    if not positions:
        raise ConfigError("held-out text has no token that the target generated: add text")
    return HeldOutFigures(
        num_positions=positions,
        agreement=sum(text.agreed for text in judged) / positions,
        one_minus_tv=sum(text.overlap for text in judged) / positions,
        acceptance=sum(text.accepted for text in judged) / positions,
    )


def difference(
    old: Sequence[Judged],
    new: Sequence[Judged],
    *,
    of: Callable[[Judged], float],
    seed: int,
) -> Difference:
    """Returns `of` the new head minus `of` the old one per position, on the same sequences.

    The interval is a paired bootstrap over whole sequences, since the tokens of one text are
    correlated.
    """
    weight_S = np.array([float(text.num_positions) for text in old])
    gain_S = np.array([of(b) - of(a) for a, b in zip(old, new, strict=True)])

    def mean_gain(groups: list[Rows]) -> NDArray[np.float64]:
        (rows,) = groups
        return np.asarray(gain_S[rows].sum(axis=-1) / np.maximum(weight_S[rows].sum(axis=-1), 1.0))

    interval = bootstrap(mean_gain, [len(old)], share=_CONFIDENCE, seed=seed)
    return Difference(
        mean=float(gain_S.sum() / weight_S.sum()), low=interval.low, high=interval.high
    )


def _judged(
    head: TrainableExitHead,
    sequence: FeatureSequence,
    vocabulary: DraftVocabulary,
) -> Judged:
    first = max(sequence.num_prompt - 1, 0)
    hidden_1TD = sequence.hidden[head.exit_layer].unsqueeze(0)
    guess_TV = head.training_forward(hidden_1TD)[0, first:]
    targets = KeptTargets(
        ids_NK=sequence.top_ids_TK[first:].long(),
        logits_NK=sequence.top_logits_TK[first:],
        lse_N=sequence.lse_T[first:],
    )
    comparison = Comparison(guess_TV, targets, vocabulary)
    return Judged(
        num_positions=guess_TV.shape[0],
        agreed=float(comparison.agrees().sum()),
        overlap=float(comparison.one_minus_tv().sum()),
        is_greedy=sequence.temperature == 0.0,
    )


@torch.no_grad()
def judge_text(
    guess_GV: Tensor,
    text: TextRows,
    *,
    num_prompt: int,
    temperature: float,
    vocabulary: DraftVocabulary,
) -> Judged:
    """Judges a head's logits at every token that the target wrote, at the text's temperature."""
    written = slice(num_prompt - 1, len(text.tokens) - 1)
    targets = KeptTargets(
        ids_NK=text.top_ids_TK[written].long(),
        logits_NK=text.top_logits_TK[written],
        lse_N=text.lse_T[written],
    )
    agreed = float(Comparison(guess_GV, targets, vocabulary).agrees().sum())
    is_greedy = temperature == 0.0
    overlap = agreed
    if not is_greedy:
        overlap = float(one_minus_tv(guess_GV, targets, vocabulary, temperature=temperature).sum())
    return Judged(
        num_positions=guess_GV.shape[0], agreed=agreed, overlap=overlap, is_greedy=is_greedy
    )


def one_minus_tv(
    guess_NV: Tensor, targets: KeptTargets, vocabulary: DraftVocabulary, *, temperature: float
) -> Tensor:
    """Returns [N], the overlap of both distributions at a temperature; tokens that the head lacks
    count as 0. Exact where all of the target's logits are kept, and a lower bound otherwise: the
    tail adds nothing, and what it takes of the target's mass is bounded from above."""
    index_NK, shared_NK = vocabulary.find(targets.ids_NK)
    q_NK = (guess_NV.float() / temperature).softmax(dim=-1).gather(-1, index_NK)
    logits_NK = targets.logits_NK.float()
    num_tail = vocabulary.vocab_size - logits_NK.shape[-1]
    log_mass_N1 = (logits_NK / temperature).logsumexp(dim=-1, keepdim=True)
    if num_tail:
        log_tail_N1 = _log_tail_bound(logits_NK, targets.lse_N, temperature, num_tail=num_tail)
        log_mass_N1 = torch.logaddexp(log_mass_N1, log_tail_N1)
    p_NK = (logits_NK / temperature - log_mass_N1).exp()
    return torch.minimum(p_NK, q_NK).masked_fill(~shared_NK, 0.0).sum(dim=-1)


def _log_tail_bound(
    logits_NK: Tensor, lse_N: Tensor, temperature: float, *, num_tail: int
) -> Tensor:
    """Returns [N, 1], an upper bound of the log of the tail's sum of exp(logit / temperature).

    The tail's sum S at temperature 1 is known. None of its logits is above the least kept one, m:
    for T <= 1 each exp(l / T) is at most exp(l) exp(m (1 / T - 1)). For T > 1, by Jensen's
    inequality, the sum is at most n (S / n)^(1 / T) for n tokens.
    """
    lse_N1 = lse_N.float().unsqueeze(-1)
    share_N1 = 1.0 - (logits_NK - lse_N1).exp().sum(dim=-1, keepdim=True)
    log_sum_N1 = lse_N1 + share_N1.clamp(min=LEAST_TAIL).log()
    if temperature <= 1.0:
        min_N1 = logits_NK.min(dim=-1, keepdim=True).values
        return log_sum_N1 + min_N1 * (1.0 / temperature - 1.0)
    log_count = math.log(num_tail)
    return log_count + (log_sum_N1 - log_count) / temperature
