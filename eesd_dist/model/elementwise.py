"""Functions of single elements whose bits do not depend on the rows beside a row.

On a CPU torch computes the end of a range by another routine than its middle, which may round
otherwise, and cuts longer ranges among threads. Where the ends and the seams lie in a row must not
depend on its neighbours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Shapes: T rows, I intermediate channels, V vocabulary.
_GRAIN = 16_384
"""Fewer elements than these torch never splits among threads: GELU's bound, the lowest."""


def row_blocks(x: Tensor) -> Iterable[slice]:
    """All rows, in runs that a thread computes alone, or one by one.

    For rows that lie apart in memory, or are combined with something that is repeated: torch then
    computes each row as a range of its own.
    """
    num_rows = x.shape[0]
    is_whole = x.is_cuda or x.requires_grad or torch.get_num_threads() == 1
    if is_whole or x.numel() < _GRAIN:
        return (slice(num_rows),)
    step = max(1, (_GRAIN - 1) // x[0].numel())
    return (slice(first, first + step) for first in range(0, num_rows, step))


@dataclass(frozen=True, slots=True)
class Activation:
    """The function within an MLP."""

    name: str
    """As config.json has it."""
    function: Callable[[Tensor], Tensor]

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Of rows that lie apart in memory."""
        parts = [self.function(x_TI[rows]) for rows in row_blocks(x_TI)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gelu_tanh(x_TI: Tensor) -> Tensor:
    return functional.gelu(x_TI, approximate="tanh")


SILU = Activation("silu", functional.silu)
GELU_TANH = Activation("gelu_pytorch_tanh", _gelu_tanh)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): almost x where x is small, and never beyond the cap."""
    return torch.tanh(x / cap) * cap


def soft_capped_rows(x_TV: Tensor, cap: float) -> Tensor:
    """The same for rows side by side in memory: on a CPU each in a call of its own."""
    if x_TV.is_cuda or x_TV.requires_grad:
        return soft_capped(x_TV, cap)
    capped_TV = torch.empty_like(x_TV)
    for row_V, capped_V in zip(x_TV, capped_TV, strict=True):
        capped_V.copy_(soft_capped(row_V, cap))
    return capped_TV
