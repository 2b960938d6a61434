"""Elementwise functions with results that do not depend, bit for bit, on neighbouring rows.

On a CPU torch computes the end of a range with another routine than its middle, which may round
differently, and splits longer ranges among threads. The ends and the splits within a row must not
depend on other rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.devices import backend_of


# Shapes: T rows, I intermediate channels, V vocabulary.
class RowsBackend(Protocol):
    """Part of a backend that elementwise functions use."""

    def row_blocks(self, x: Tensor) -> Iterable[slice]:
        """Returns `row_blocks`, of rows without gradients."""
        ...

    def soft_capped_rows(self, x_TV: Tensor, cap: float) -> Tensor:
        """Returns `soft_capped_rows`, of rows without gradients."""
        ...


def _rows_on(device: torch.device) -> RowsBackend:
    backend: RowsBackend = backend_of(device).model
    return backend


def row_blocks(x: Tensor) -> Iterable[slice]:
    """Splits all rows into runs that one thread computes, at least one row each.

    For rows that are not contiguous in memory, or that are combined with a broadcast operand: torch
    then computes each row as a separate range.
    """
    return (slice(x.shape[0]),) if x.requires_grad else _rows_on(x.device).row_blocks(x)


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
    """Caps rows that are contiguous in memory."""
    if x_TV.requires_grad:
        return soft_capped(x_TV, cap)
    return _rows_on(x_TV.device).soft_capped_rows(x_TV, cap)
