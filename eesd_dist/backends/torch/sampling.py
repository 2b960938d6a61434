"""Sampling by torch's operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_dist.sampling.backend import ChoiceCall
from eesd_dist.sampling.noise import gumbel_by_steps


# Shapes: S rows, V columns, B best columns.
class TorchSampling:
    """Implements `SamplingBackend` on any device."""

    @property
    def choice_call(self) -> ChoiceCall | None:
        return None

    def gumbel(self, keys: Sequence[int], ids_V: Tensor) -> Tensor:
        return gumbel_by_steps(keys, ids_V)

    def first_max(self, x_SV: Tensor) -> Tensor:
        return x_SV.argmax(dim=-1)

    def first_maxima(self, x_SV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best_B: list[Tensor] = []
        values_B: list[Tensor] = []
        remaining_SV = x_SV.clone()
        for _ in range(min(count, x_SV.shape[-1])):
            best_S1 = remaining_SV.argmax(dim=-1, keepdim=True)
            best_B.append(best_S1)
            values_B.append(remaining_SV.gather(-1, best_S1))
            remaining_SV.scatter_(-1, best_S1, -torch.inf)
        return torch.cat(best_B, dim=-1), torch.cat(values_B, dim=-1)

    def sorted_rows(self, x_SV: Tensor) -> Tensor:
        return x_SV.sort(dim=-1, descending=True).values

    def log_probabilities(self, x_SV: Tensor) -> Tensor:
        return x_SV.log_softmax(dim=-1)

    def row_blocks(self, shape: Sequence[int]) -> list[slice]:
        return [slice(0, shape[0])]
