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

# Shapes: T rows, I intermediate channels.
_GRAIN = 32768
"""Fewer elements than these torch never splits among threads."""


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


SILU = Activation("silu", functional.silu)
