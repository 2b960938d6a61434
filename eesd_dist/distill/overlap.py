"""How near a head's guesses are to the target's own distribution, exactly and at any temperature.

1 - TV is the chance that rejection sampling accepts a guess (Leviathan et al. 2023, arXiv
2211.17192); under coupled sampling acceptance lies between (1 - TV) / (1 + TV) and 1 - TV (Daliri
et al., arXiv 2408.07978). Whole logits of both are looked at, not the kept best ones. It trains
nothing.
"""

# Shapes: T positions, V draft vocabulary, W target vocabulary.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.distill.target import FrozenTarget
from eesd_dist.model.exit_head import TrainableExitHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One head on one text: sums over the positions after which the target wrote."""

    num_positions: int
    agreed: float
    shared: float
    """1 - TV at the text's own temperature; at 0 that is agreement."""


@torch.no_grad()
def overlap_of(
    head: TrainableExitHead,
    target: FrozenTarget,
    tokens: Sequence[int],
    *,
    num_prompt: int,
    temperature: float,
    embed: Callable[[Tensor], Tensor] | None = None,
) -> Overlap:
    """`embed` is asked only by a head that reads the embedding."""
    tokens_1T = torch.tensor([list(tokens)])
    hidden, logits_1TW = target.forward(tokens_1T, [head.exit_layer])
    embedding_1TD = embed(tokens_1T) if embed is not None and head.reads_embedding else None
    guess_1TV = head.training_forward(hidden[head.exit_layer], embedding_1TD)
    # From the prompt's last token, after which the target wrote, to the last one but one.
    written = slice(max(num_prompt - 1, 0), len(tokens) - 1)
    guess_TV, logits_TW = guess_1TV[0, written], logits_1TW[0, written]
    agreed = float(agrees(guess_TV, logits_TW, vocab_ids=head.vocab_ids).sum())
    shared = agreed
    if temperature > 0.0:
        shared_T = one_minus_tv(
            guess_TV, logits_TW, vocab_ids=head.vocab_ids, temperature=temperature
        )
        shared = float(shared_T.sum())
    return Overlap(num_positions=guess_TV.shape[0], agreed=agreed, shared=shared)


def one_minus_tv(
    guess_TV: Tensor, target_TW: Tensor, *, vocab_ids: Tensor | None, temperature: float
) -> Tensor:
    """[T] shared mass of the two distributions; tokens that the head lacks it gives nothing."""
    p_TW = torch.softmax(target_TW.float() / temperature, dim=-1)
    q_TV = torch.softmax(guess_TV.float() / temperature, dim=-1)
    p_TV = p_TW if vocab_ids is None else p_TW[:, vocab_ids]
    return torch.minimum(p_TV, q_TV).sum(dim=-1)


def agrees(guess_TV: Tensor, target_TW: Tensor, *, vocab_ids: Tensor | None) -> Tensor:
    """[T] whether both put the same token first: acceptance at temperature 0."""
    best_T = guess_TV.argmax(dim=-1)
    if vocab_ids is not None:
        best_T = vocab_ids[best_T]
    return best_T == target_TW.argmax(dim=-1)
