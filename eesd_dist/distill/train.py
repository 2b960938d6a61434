"""Trains exit heads to say what the frozen target will say.

Several heads at once, one per exit layer: the target's forward pass is the dear part, and it is
shared. Same layer code as serving. It knows nothing of files of features, of DeepSpeed or of Ray.
"""

# Shapes: B sequences, T positions, D hidden size, V (draft) vocabulary.

import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.distill.target import FrozenTarget
from eesd_dist.model.exit_head import TrainableExitHead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """How a head is trained. The loss is that of the self-distillation literature (Kangaroo,
    arXiv 2404.18911; OSD, arXiv 2310.07177): `(1 - soft) CE(target's best) + soft KL(p || q)`."""

    seconds: float
    rows: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    soft: float = 0.7
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillStep:
    """One step's figures, per exit layer."""

    step: int
    spent_s: float
    loss: dict[int, float]
    agreement: dict[int, float]
    """Share of positions where head and target put the same token first."""
    overlap: dict[int, float]
    """1 - TV: what rejection sampling would accept at temperature 1."""


def train_heads(
    target: FrozenTarget,
    heads: Sequence[TrainableExitHead],
    sequences: Sequence[Sequence[int]],
    options: DistillOptions,
) -> Iterator[DistillStep]:
    """Trains in place until the time is spent; yields figures every 20 steps.

    The learning rate follows the share of the time that is spent: up for 2 %, then a cosine.
    """
    stream = torch.tensor([token for sequence in sequences for token in sequence])
    rng = random.Random(options.seed)
    parameters = [p for head in heads for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    exits = sorted({head.exit_layer for head in heads})
    step, began = 0, time.monotonic()
    while (spent_s := time.monotonic() - began) < options.seconds:
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _rate_at(spent_s / options.seconds)
        batch_BT = _crops(stream, rng, rows=options.rows, length=options.length)
        hidden, logits_BTV = target.forward(batch_BT, exits)
        losses: dict[int, Tensor] = {}
        for head in heads:
            guess_BTV = head.training_forward(hidden[head.exit_layer])
            losses[head.exit_layer] = distillation_loss(
                guess_BTV, logits_BTV, vocab_ids=head.vocab_ids, soft=options.soft
            )
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(torch.stack(list(losses.values())).sum())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            yield _figures(step, spent_s, heads, hidden, logits_BTV, losses)


def distillation_loss(
    guess_BTV: Tensor, target_BTV: Tensor, *, vocab_ids: Tensor | None, soft: float
) -> Tensor:
    """Mean over positions, in nats. A truncated head is held against the target's distribution
    over the tokens it has, and learns nothing from positions whose best token it lacks."""
    best_BT = target_BTV.argmax(dim=-1)
    if vocab_ids is None:
        seen_BTV, label_BT = target_BTV, best_BT
        known_BT = torch.ones_like(best_BT, dtype=torch.bool)
    else:
        seen_BTV = target_BTV[..., vocab_ids]
        label_BT = seen_BTV.argmax(dim=-1)
        known_BT = vocab_ids[label_BT] == best_BT
    log_q_BTV = functional.log_softmax(guess_BTV, dim=-1)
    log_p_BTV = functional.log_softmax(seen_BTV, dim=-1)
    kl_BT = (log_p_BTV.exp() * (log_p_BTV - log_q_BTV)).sum(dim=-1)
    ce_BT = -log_q_BTV.gather(-1, label_BT.unsqueeze(-1)).squeeze(-1)
    loss_BT = (1.0 - soft) * ce_BT + soft * kl_BT
    return (loss_BT * known_BT).sum() / known_BT.sum().clamp(min=1)


def frequent_tokens(sequences: Sequence[Sequence[int]], *, count: int, vocab_size: int) -> Tensor:
    """The `count` tokens the target writes most often, ascending: a truncated draft vocabulary."""
    stream = torch.tensor([token for sequence in sequences for token in sequence])
    counts = torch.bincount(stream, minlength=vocab_size)
    return counts.topk(min(count, vocab_size)).indices.sort().values


def _rate_at(share: float) -> float:
    if share < 0.02:
        return share / 0.02
    return 0.03 + 0.97 * 0.5 * (1.0 + math.cos(math.pi * share))


def _crops(stream: Tensor, rng: random.Random, *, rows: int, length: int) -> Tensor:
    starts = [rng.randrange(len(stream) - length) for _ in range(rows)]
    return torch.stack([stream[at : at + length] for at in starts])


@torch.no_grad()
def _figures(
    step: int,
    spent_s: float,
    heads: Sequence[TrainableExitHead],
    hidden: dict[int, Tensor],
    logits_BTV: Tensor,
    losses: dict[int, Tensor],
) -> DistillStep:
    agreement: dict[int, float] = {}
    overlap: dict[int, float] = {}
    best_BT, p_BTV = logits_BTV.argmax(dim=-1), logits_BTV.softmax(dim=-1)
    for head in heads:
        guess_BTV = head.training_forward(hidden[head.exit_layer])
        top_BT, q_BTV = guess_BTV.argmax(dim=-1), guess_BTV.softmax(dim=-1)
        shared_BTV = p_BTV
        if head.vocab_ids is not None:
            top_BT = head.vocab_ids[top_BT]
            shared_BTV = p_BTV[..., head.vocab_ids]
        agreement[head.exit_layer] = float((top_BT == best_BT).float().mean())
        overlap[head.exit_layer] = float(torch.minimum(shared_BTV, q_BTV).sum(dim=-1).mean())
    return DistillStep(
        step=step,
        spent_s=spent_s,
        loss={layer: float(loss) for layer, loss in losses.items()},
        agreement=agreement,
        overlap=overlap,
    )
