"""How often the target would accept a head's guesses, on text it did not learn from, and whether
another head does better.

A sequence counts as it would in service: written greedily, a guess is accepted when head and target
put the same token first; written by sampling, with probability 1 - TV of the two distributions
(rejection sampling's acceptance; the tail beyond the kept logits adds nothing, so it is a lower
bound, the same for both heads). Only positions after which the target wrote are judged. It trains
nothing and knows no engine.
"""

# Shapes: T positions, D hidden size, V draft vocabulary, S sequences, R resamples.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.distill.features import FeatureSequence
from eesd_dist.distill.train.losses import Comparison, DraftVocabulary, KeptTargets
from eesd_dist.errors import ConfigError
from eesd_dist.model.exit_head import TrainableExitHead

Embed = Callable[[Tensor], Tensor]
"""Token ids to the target's embeddings."""

_RESAMPLES = 4000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One head on one sequence: sums over its judged positions."""

    num_positions: int
    agreed: float
    overlap: float
    """1 - TV, summed."""
    is_greedy: bool

    @property
    def accepted(self) -> float:
        return self.agreed if self.is_greedy else self.overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFigures:
    """One head on all sequences: means over positions."""

    num_positions: int
    agreement: float
    one_minus_tv: float
    acceptance: float
    """Agreement where the text is greedy, 1 - TV where it was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Another head's mean less the first one's, with a bootstrap interval over sequences."""

    mean: float
    low: float
    high: float
    confidence: float = _CONFIDENCE

    @property
    def rises(self) -> bool:
        """Beyond what drawing other sequences would explain."""
        return self.low > 0.0


@torch.no_grad()
def judge(
    head: TrainableExitHead, sequences: Iterable[FeatureSequence], *, embed: Embed | None = None
) -> list[Judged]:
    """In order; `embed` is asked only for heads that read the embedding."""
    vocabulary = DraftVocabulary(head.vocab_ids, vocab_size=head.config.verifier.vocab_size)
    return [_judged(head, sequence, vocabulary, embed) for sequence in sequences]


def figures(judged: Sequence[Judged]) -> HeldOutFigures:
    """Raises ConfigError when there was nothing to judge."""
    positions = sum(one.num_positions for one in judged)
    if not positions:
        raise ConfigError("held-out text has no position after which the target wrote: add text")
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
    """`of` the new head less `of` the old one per position, both on the same sequences.

    The interval is a paired percentile bootstrap (Efron and Tibshirani 1993, chapter 13) over whole
    sequences, since the tokens of one text resemble each other.
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
