"""Shared by the sampling tests: short rules, and a chi-square test without SciPy."""

import torch
from torch import Tensor

from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.types import SamplingParams

NUM_DRAWS = 200_000
NUM_AT_ONCE = 2_000
"""Rows in one call: more of them do not fit in the cache."""


PLAIN = SamplingParams()


def rule(
    params: SamplingParams = PLAIN,
    *,
    position: int = 0,
    num_prompt: int = 0,
    history: tuple[int, ...] = (),
) -> RowRule:
    return RowRule.of(params, position=position, num_prompt=num_prompt, history=history)


def with_one_percent_moved(probs_V: Tensor) -> Tensor:
    """Adds a deliberate bias: moves 1% of all mass to a token of medium probability."""
    token = int(probs_V.argsort()[len(probs_V) // 2])
    biased_V = 0.99 * probs_V
    biased_V[token] += 0.01
    return biased_V


def chi_square_p_value(counts_V: Tensor, probs_V: Tensor) -> float:
    """Returns the probability that a fair sampler is at least this uneven (Pearson 1900)."""
    assert bool((counts_V[probs_V == 0] == 0).all()), "a token of probability 0 was drawn"
    possible = probs_V > 0
    counts, probs = counts_V[possible].double(), probs_V[possible].double()
    expected = counts.sum() * probs / probs.sum()
    assert float(expected.min()) >= 5, "too few draws for the chi-square approximation"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(probs) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def counts_of(tokens: Tensor, *, vocab_size: int) -> Tensor:
    return torch.bincount(tokens.long(), minlength=vocab_size)


def total_variation(p_V: Tensor, q_V: Tensor) -> float:
    return float((p_V - q_V).abs().sum() / 2)
