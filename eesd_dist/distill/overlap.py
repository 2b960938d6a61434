"""How near a head's guesses are to the target's own distribution, exactly and at any temperature.

1 - TV is the chance that rejection sampling accepts a guess (Leviathan et al. 2023, arXiv
2211.17192); under coupled sampling acceptance lies between (1 - TV) / (1 + TV) and 1 - TV (Daliri
et al., arXiv 2408.07978). Whole logits of both are looked at, not the kept best ones. It trains
nothing.
"""

# Shapes: T positions, V draft vocabulary, W target vocabulary.

import torch
from torch import Tensor


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
