"""Sampling on a CPU: NumPy's routines, ten times as fast as torch's, and compiled calls."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.backends.torch.sampling import TorchSampling
from eesd_dist.sampling.backend import BestTwo, ChoiceCall
from eesd_dist.sampling.noise import key_words
from eesd_dist.sampling.row_filters import RowFilters

_ELEMENTS_AT_ONCE = 1 << 17


# Shapes: S rows, V columns, B best columns.
class CpuSampling(TorchSampling):
    """NumPy's routines, without Numba."""

    def first_max(self, x_SV: Tensor) -> Tensor:
        return torch.from_numpy(x_SV.detach().numpy().argmax(axis=-1))

    def first_maxima(self, x_SV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        remaining_SV = x_SV.detach().numpy().copy()
        shape = (len(remaining_SV), min(count, x_SV.shape[-1]))
        rows_S, best_SB = np.arange(shape[0]), np.empty(shape, dtype=np.int64)
        values_SB = np.empty(shape, dtype=remaining_SV.dtype)
        for rank in range(shape[1]):
            best_SB[:, rank] = remaining_SV.argmax(axis=-1)
            values_SB[:, rank] = remaining_SV[rows_S, best_SB[:, rank]]
            remaining_SV[rows_S, best_SB[:, rank]] = -np.inf
        return torch.from_numpy(best_SB), torch.from_numpy(values_SB)

    def sorted_rows(self, x_SV: Tensor) -> Tensor:
        return torch.from_numpy(np.sort(x_SV.detach().numpy(), axis=-1)).flip(-1)

    def row_blocks(self, shape: Sequence[int]) -> list[slice]:
        """Returns blocks with intermediate results that stay in the cache: 64 rows of 128k columns
        at once take five times as long as 64 single rows."""
        num_rows, num_columns = shape
        if num_rows * num_columns <= _ELEMENTS_AT_ONCE:
            return [slice(0, num_rows)]
        step = max(1, _ELEMENTS_AT_ONCE // num_columns)
        return [slice(start, start + step) for start in range(0, num_rows, step)]


class CompiledSampling(CpuSampling):
    """Noise and choice in one compiled call each."""

    @property
    def choice_call(self) -> ChoiceCall:
        return self.best_two

    def gumbel(self, keys: Sequence[int], ids_V: Tensor) -> Tensor:
        from eesd_dist.backends.cpu.kernels.choice import gumbel_rows

        return torch.from_numpy(gumbel_rows(key_words(keys), ids_V.to(torch.int32).numpy()))

    def best_two(
        self,
        logits_SV: Tensor,
        divisors: Sequence[float],
        words_S3: npt.NDArray[np.int32],
        vocab_ids: Tensor | None,
        filters: RowFilters | None,
    ) -> BestTwo:
        from eesd_dist.backends.cpu.kernels.best_two import best_two

        ids_V = torch.arange(logits_SV.shape[-1]) if vocab_ids is None else vocab_ids
        columns_S2, scores_S2 = best_two(
            logits_SV.detach().contiguous().numpy(),
            divisors,
            words_S3,
            ids_V.to(torch.int32).numpy(),
            filters,
        )
        return BestTwo(ids_V.to(torch.int64).numpy()[columns_S2], scores_S2)
