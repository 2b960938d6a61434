"""Estimates how often the target would accept a head's guesses, and compares two heads.

`judge` uses stored features, which have the target's best logits; `overlap_of` runs the target and
uses all logits. 1 - TV is the probability that rejection sampling accepts a guess (Leviathan et al.
2023, arXiv 2211.17192); with coupled sampling acceptance is between (1 - TV) / (1 + TV) and 1 - TV
(Daliri et al., arXiv 2408.07978).

A sequence is judged by its sampling: in greedy text a guess is accepted if head and target have the
same best token; in sampled text with probability 1 - TV of the two distributions (rejection
sampling's acceptance; the tail beyond the stored logits adds nothing, so that it is a lower bound,
the same for both heads). Only positions of tokens that the target generated are judged. Does not
depend on training or the engine.
"""

# Shapes: T positions, D hidden size, V draft vocabulary, W target vocabulary, S sequences,
# R resamples.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.distill.features import FeatureSequence
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.distill.train.losses import Comparison, DraftVocabulary, KeptTargets
from eesd_dist.errors import ConfigError
from eesd_dist.model.exit_head import TrainableExitHead

Embed = Callable[[Tensor], Tensor]
"""Token ids -> the target's embeddings."""

_RESAMPLES = 4000
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
        """Whether the new head is better with confidence: the interval is above 0."""
        return self.low > 0.0


@torch.no_grad()
def judge(
    head: TrainableExitHead, sequences: Iterable[FeatureSequence], *, embed: Embed | None = None
) -> list[Judged]:
    """Judges a head on each sequence, in order; `embed`: needed if the head reads embeddings."""
    vocabulary = DraftVocabulary(head.vocab_ids, vocab_size=head.config.verifier.vocab_size)
    return [_judged(head, sequence, vocabulary, embed) for sequence in sequences]


def figures(judged: Sequence[Judged]) -> HeldOutFigures:
    """Returns the means. Raises ConfigError if there was nothing to judge."""
    positions = sum(one.num_positions for one in judged)
    if not positions:
        raise ConfigError("held-out text has no token that the target generated: add text")
    return HeldOutFigures(
        num_positions=positions,
        agreement=sum(one.agreed for one in judged) / positions,
        one_minus_tv=sum(one.overlap for one in judged) / positions,
        acceptance=sum(one.accepted for one in judged) / positions,
    )


def difference(
    old: Sequence[Judged],
    new: Sequence[Judged],
    *,
    of: Callable[[Judged], float],
    seed: int,
) -> Difference:
    """Returns `of` the new head minus `of` the old one per position, on the same sequences.

    The interval is a paired percentile bootstrap (Efron and Tibshirani 1993, chapter 13) over whole
    sequences, since the tokens of one text are correlated.
    """
    weight_S = torch.tensor([float(one.num_positions) for one in old])
    gain_S = torch.tensor([of(b) - of(a) for a, b in zip(old, new, strict=True)])
    generator = torch.Generator().manual_seed(seed)
    chosen_RS = torch.randint(len(old), (_RESAMPLES, len(old)), generator=generator)
    gain_R = gain_S[chosen_RS].sum(dim=1) / weight_S[chosen_RS].sum(dim=1).clamp(min=1.0)
    tail = (1.0 - _CONFIDENCE) / 2.0
    low, high = torch.quantile(gain_R.double(), torch.tensor([tail, 1.0 - tail]).double()).tolist()
    return Difference(mean=float(gain_S.sum() / weight_S.sum()), low=low, high=high)


def _judged(
    head: TrainableExitHead,
    sequence: FeatureSequence,
    vocabulary: DraftVocabulary,
    embed: Embed | None,
) -> Judged:
    first = max(sequence.num_prompt - 1, 0)
    hidden_1TD = sequence.hidden[head.exit_layer].unsqueeze(0)
    embedding_1TD = embed(sequence.tokens_T.unsqueeze(0)) if embed is not None else None
    guess_TV = head.training_forward(hidden_1TD, embedding_1TD)[0, first:]
    kept = KeptTargets(
        ids_NK=sequence.top_ids_TK[first:].long(),
        logits_NK=sequence.top_logits_TK[first:],
        lse_N=sequence.lse_T[first:],
    )
    comparison = Comparison(guess_TV, kept, vocabulary)
    return Judged(
        num_positions=guess_TV.shape[0],
        agreed=float(comparison.agrees().sum()),
        overlap=float(comparison.one_minus_tv().sum()),
        is_greedy=sequence.temperature == 0.0,
    )


@torch.no_grad()
def overlap_of(
    head: TrainableExitHead,
    target: FrozenTarget,
    tokens: Sequence[int],
    *,
    num_prompt: int,
    temperature: float,
    embed: Embed | None = None,
) -> Judged:
    """Judges one head on one text that the target generated, with 1 - TV at the text's temperature.

    `embed`: needed if the head reads embeddings.
    """
    tokens_1T = torch.tensor([list(tokens)])
    hidden, logits_1TW = target.forward(tokens_1T, [head.exit_layer])
    embedding_1TD = embed(tokens_1T) if embed is not None and head.reads_embedding else None
    guess_1TV = head.training_forward(hidden[head.exit_layer], embedding_1TD)
    # From the prompt's last token, after which the target generated, to the second to last token.
    written = slice(max(num_prompt - 1, 0), len(tokens) - 1)
    guess_TV, logits_TW = guess_1TV[0, written], logits_1TW[0, written]
    agreed = float(agrees(guess_TV, logits_TW, vocab_ids=head.vocab_ids).sum())
    is_greedy = temperature == 0.0
    overlap = agreed
    if not is_greedy:
        overlap_T = one_minus_tv(
            guess_TV, logits_TW, vocab_ids=head.vocab_ids, temperature=temperature
        )
        overlap = float(overlap_T.sum())
    return Judged(
        num_positions=guess_TV.shape[0], agreed=agreed, overlap=overlap, is_greedy=is_greedy
    )


def one_minus_tv(
    guess_TV: Tensor, target_TW: Tensor, *, vocab_ids: Tensor | None, temperature: float
) -> Tensor:
    """Returns [T], the overlap of the two distributions; tokens that the head lacks count as 0."""
    p_TW = torch.softmax(target_TW.float() / temperature, dim=-1)
    q_TV = torch.softmax(guess_TV.float() / temperature, dim=-1)
    p_TV = p_TW if vocab_ids is None else p_TW[:, vocab_ids]
    return torch.minimum(p_TV, q_TV).sum(dim=-1)


def agrees(guess_TV: Tensor, target_TW: Tensor, *, vocab_ids: Tensor | None) -> Tensor:
    """Returns [T], whether both have the same best token: acceptance at temperature 0."""
    best_T = guess_TV.argmax(dim=-1)
    if vocab_ids is not None:
        best_T = vocab_ids[best_T]
    return best_T == target_TW.argmax(dim=-1)
