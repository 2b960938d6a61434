"""Losses between a head's and the target's distributions, per position.

The target's distribution is given as its K best logits and the exact log-sum-exp over its whole
vocabulary. The K tokens are compared exactly; the rest, the tail, is compared as one outcome: its
mass under the target, `1 - sum(p)`, against its mass under the head. Merging outcomes never
increases the distance of two distributions, so that

    merged KL <= exact KL = merged KL + tail mass * KL(target | tail, head | tail)
    sum over the K tokens of min(p, q) <= 1 - TV <= the same plus min(tail of p, tail of q)

With K the whole vocabulary there is no tail and both are exact. Does not depend on models, batches
or optimizers.
"""

# Shapes: N positions, K best tokens of the target, B = K tokens and the tail (if there is one),
# V draft vocabulary, W target vocabulary.

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from eesd_dist.errors import ConfigError

Divergence = Literal["forward_kl", "reverse_kl", "tv"]

_NOTHING = -1e4
"""Log of probability 0; finite, so that 0 times it is 0."""
LEAST_TAIL = 1e-7
"""Precision of a sum of float32 probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """`(1 - soft) CE(y, q) + soft T^2 D(p^T, q^T)` per position, y the target's best token.

    D is forward KL(p || q) as in Kangaroo (arXiv 2404.18911), reverse KL(q || p), or total
    variation TV(p, q), where 1 - TV is rejection sampling's acceptance (OSD, arXiv 2310.07177, and
    DistillSpec, arXiv 2310.08461, compare them). p^T is p's K + 1 outcomes to the power 1 / T,
    normalized to sum to one.
    """

    soft: Annotated[float, "share of the divergence in the loss"] = 0.7
    temperature: Annotated[float, "--loss-temperature: of both distributions in a KL"] = 1.0
    divergence: Annotated[Divergence, "between the target and the head"] = "forward_kl"

    def __post_init__(self) -> None:
        if not 0.0 <= self.soft <= 1.0:
            raise ConfigError(f"soft is {self.soft}: expected a share of the loss, from 0 to 1")
        if self.temperature <= 0.0:
            raise ConfigError(f"the loss's temperature is {self.temperature}: it must be above 0")
        if self.divergence not in ("forward_kl", "reverse_kl", "tv"):
            raise ConfigError(
                f"divergence is {self.divergence!r}: expected one of forward_kl, reverse_kl, tv"
            )
        if self.divergence == "tv" and self.temperature != 1.0:
            raise ConfigError(
                f"divergence tv at temperature {self.temperature}: total variation is acceptance "
                "at temperature 1 only; leave the temperature at 1 or use a KL"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTargets:
    """Stored part of the target's distribution at N positions."""

    ids_NK: Tensor
    """Target tokens, unique within a row."""
    logits_NK: Tensor
    lse_N: Tensor
    """Exact log-sum-exp over the whole vocabulary."""

    @classmethod
    def whole(cls, logits_NW: Tensor) -> Self:
        """Builds targets of the whole vocabulary, without a tail."""
        ids_W = torch.arange(logits_NW.shape[-1], device=logits_NW.device)
        return cls(
            ids_NK=ids_W.expand_as(logits_NW),
            logits_NK=logits_NW,
            lse_N=logits_NW.float().logsumexp(dim=-1),
        )


class DraftVocabulary:
    """Maps target tokens to a head's draft vocabulary."""

    def __init__(
        self, ids_V: Tensor | None, *, vocab_size: int, device: torch.device | None = None
    ) -> None:
        """`ids_V`: the target token of each draft index; None: the target's own vocabulary."""
        self.vocab_size = vocab_size
        chosen_V = torch.arange(vocab_size) if ids_V is None else ids_V.cpu()
        index_W = torch.zeros(vocab_size, dtype=torch.long)
        index_W[chosen_V] = torch.arange(len(chosen_V))
        has_W = torch.zeros(vocab_size, dtype=torch.bool)
        has_W[chosen_V] = True
        self._index_W = index_W.to(device)
        self._has_W = has_W.to(device)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the draft index of each token, and whether the head has it (if not, index 0)."""
        return self._index_W[ids], self._has_W[ids]


class Comparison:
    """Compares one head's logits with the target's, over the tokens that both have."""

    def __init__(
        self, logits_NV: Tensor, targets: KeptTargets, vocabulary: DraftVocabulary
    ) -> None:
        self._guess_NV = logits_NV.float()
        index_NK, shared_NK = vocabulary.find(targets.ids_NK)
        # A single gather: its gradient is as large as the logits.
        log_q_NK = self._guess_NV.log_softmax(dim=-1).gather(-1, index_NK)
        log_q_NK = log_q_NK.masked_fill(~shared_NK, _NOTHING)
        log_p_NK = targets.logits_NK.float() - targets.lse_N.float().unsqueeze(-1)
        tail_p_N1 = _tail(log_p_NK)
        best_at_N1 = log_p_NK.argmax(dim=-1, keepdim=True)
        log_p_NK = log_p_NK.masked_fill(~shared_NK, _NOTHING)
        self._best_N = index_NK.gather(-1, best_at_N1).squeeze(-1)
        self._knows_best_N = shared_NK.gather(-1, best_at_N1).squeeze(-1)
        self._log_best_q_N = log_q_NK.gather(-1, best_at_N1).squeeze(-1)
        self._log_p_NK, self._log_q_NK = log_p_NK, log_q_NK
        self._log_p_NB, self._log_q_NB = log_p_NK, log_q_NK
        if targets.ids_NK.shape[-1] < vocabulary.vocab_size:
            self._log_p_NB = torch.cat([log_p_NK, tail_p_N1.log()], dim=-1)
            self._log_q_NB = torch.cat([log_q_NK, _tail(log_q_NK).log()], dim=-1)

    def loss(self, options: LossOptions) -> Tensor:
        """Returns the loss in nats. Tokens that a truncated head lacks are left out: the
        cross-entropy skips positions where the best token is one of them; for the divergence the
        target is normalized over the head's tokens and the tail, and each position is weighted by
        their mass."""
        hard_N = -self._log_best_q_N * self._knows_best_N
        return (1.0 - options.soft) * hard_N + options.soft * self._divergence(options)

    def agrees(self) -> Tensor:
        """Returns whether head and target have the same best token."""
        top_N: Tensor = self._guess_NV.argmax(dim=-1)
        return (top_N == self._best_N) & self._knows_best_N

    def one_minus_tv(self) -> Tensor:
        """Returns a lower bound of rejection sampling's acceptance at temperature 1: no tail."""
        return torch.minimum(self._log_p_NK, self._log_q_NK).exp().sum(dim=-1)

    def _divergence(self, options: LossOptions) -> Tensor:
        if options.divergence == "tv":
            return 1.0 - torch.minimum(self._log_p_NB.exp(), self._log_q_NB.exp()).sum(dim=-1)
        temperature = options.temperature
        log_mass_N1 = self._log_p_NB.logsumexp(dim=-1, keepdim=True)
        log_p_NB = _tempered(self._log_p_NB - log_mass_N1, temperature)
        log_q_NB = _tempered(self._log_q_NB, temperature)
        if options.divergence == "reverse_kl":
            log_p_NB, log_q_NB = log_q_NB, log_p_NB
        divergence_N = (log_p_NB.exp() * (log_p_NB - log_q_NB)).sum(dim=-1)
        return temperature**2 * log_mass_N1.exp().squeeze(-1) * divergence_N


def _tail(log_probs_NK: Tensor) -> Tensor:
    """Returns [N, 1], the remaining probability."""
    return (1.0 - log_probs_NK.exp().sum(dim=-1, keepdim=True)).clamp(min=LEAST_TAIL)


def _tempered(log_probs_NB: Tensor, temperature: float) -> Tensor:
    if temperature == 1.0:
        return log_probs_NB
    return (log_probs_NB / temperature).log_softmax(dim=-1)
