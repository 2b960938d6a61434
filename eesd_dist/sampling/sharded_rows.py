"""Rows of scores of which each rank holds consecutive columns, and work on some of the rows.

Shapes: R rows, U some of them, V columns of this rank's shard, G ranks, N any number of columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.transport.contracts import TensorGroup


@dataclass(frozen=True, slots=True)
class ShardedRows:
    """A rank's part of the rows. Ranks are in the order of their columns' token ids."""

    scores_RV: Tensor
    """Float32."""
    rules: Sequence[RowRule]
    group: TensorGroup | None
    """The ranks that hold the other columns; None when this one has all."""

    @property
    def num_columns(self) -> int:
        return self.scores_RV.shape[-1]

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    def gathered(self, x: Tensor) -> Tensor:
        """Returns every rank's x, [G, *x.shape]."""
        return x.unsqueeze(0) if self.group is None else torch.stack(self.group.all_gather(x))

    def select(self, rows: Sequence[int]) -> "ShardedRows":
        if len(rows) == len(self.rules):
            return self
        rules = [self.rules[row] for row in rows]
        return ShardedRows(select(self.scores_RV, rows), rules, self.group)


def rows_where(claim_R1: Tensor) -> list[int]:
    """Returns the rows for which a claim holds. On a GPU the host waits for the answer."""
    return [row for row, (holds,) in enumerate(claim_R1.tolist()) if holds]


def select(x_RN: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns some rows, or all of them without a copy. `rows` are in ascending order."""
    if len(rows) == x_RN.shape[0]:
        return x_RN
    return x_RN.index_select(0, torch.tensor(rows, device=x_RN.device))


def replace(x_RN: Tensor, rows: Sequence[int], new_UN: Tensor) -> Tensor:
    """Returns x with other values in some rows. `rows` are in ascending order."""
    if len(rows) == x_RN.shape[0]:
        return new_UN
    return x_RN.index_copy(0, torch.tensor(rows, device=x_RN.device), new_UN)


def column(values: Sequence[float], *, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns one number for each row, [R, 1]."""
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(-1)
