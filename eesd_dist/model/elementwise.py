"""Elementwise functions with results that do not depend, bit for bit, on neighbouring rows.

On a CPU torch computes the end of a range with another routine than its middle, which may round
differently, and splits longer ranges among threads. The ends and the splits within a row must not
depend on other rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Shapes: T rows, I intermediate channels, V vocabulary.
_GRAIN = 16_384
"""torch never splits fewer elements than this among threads: GELU's threshold, the lowest."""


def row_blocks(x: Tensor) -> Iterable[slice]:
    """Splits all rows into runs that one thread computes, at least one row each.

    For rows that are not contiguous in memory, or that are combined with a broadcast operand: torch
    then computes each row as a separate range.
    """
    num_rows = x.shape[0]
    is_whole = x.is_cuda or x.requires_grad or torch.get_num_threads() == 1
    if is_whole or x.numel() < _GRAIN:
        return (slice(num_rows),)
    step = max(1, (_GRAIN - 1) // x[0].numel())
    return (slice(first, first + step) for first in range(0, num_rows, step))


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation function of an MLP."""

    name: str
    """The name in config.json."""
    function: Callable[[Tensor], Tensor]

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Applies the function to rows that are not contiguous in memory."""
        blocks = [self.function(x_TI[rows]) for rows in row_blocks(x_TI)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _gelu_tanh(x_TI: Tensor) -> Tensor:
    return functional.gelu(x_TI, approximate="tanh")


SILU = Activation("silu", functional.silu)
GELU_TANH = Activation("gelu_pytorch_tanh", _gelu_tanh)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(x / cap): almost x for small x, and never beyond the cap."""
    return torch.tanh(x / cap) * cap


def soft_capped_rows(x_TV: Tensor, cap: float) -> Tensor:
    """Caps rows that are contiguous in memory; on a CPU with one call per row."""
    if x_TV.is_cuda or x_TV.requires_grad:
        return soft_capped(x_TV, cap)
    capped_TV = torch.empty_like(x_TV)
    for row_V, capped_V in zip(x_TV, capped_TV, strict=True):
        capped_V.copy_(soft_capped(row_V, cap))
    return capped_TV
