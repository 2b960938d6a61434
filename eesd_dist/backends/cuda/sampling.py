"""Sampling on a GPU: noise and choice in few launches."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.backends.cuda.choice import best_two_on_gpu, gumbel_on_gpu
from eesd_dist.backends.torch.sampling import TorchSampling
from eesd_dist.sampling.backend import BestTwo, ChoiceCall
from eesd_dist.sampling.noise import key_words
from eesd_dist.sampling.row_filters import RowFilters

_ALIGNED_COLUMNS = 4
"""Number of float32 columns in one aligned read."""


# Shapes: S rows, V columns.
class CudaSampling(TorchSampling):
    """Implements `SamplingBackend`."""

    @property
    def choice_call(self) -> ChoiceCall:
        return self.best_two

    def gumbel(self, keys: Sequence[int], ids_V: Tensor) -> Tensor:
        return gumbel_on_gpu(key_words(keys), ids_V)

    def best_two(
        self,
        logits_SV: Tensor,
        divisors: Sequence[float],
        words_S3: npt.NDArray[np.int32],
        vocab_ids: Tensor | None,
        filters: RowFilters | None,
    ) -> BestTwo:
        best_S4 = best_two_on_gpu(logits_SV, divisors, words_S3, vocab_ids, filters).cpu().numpy()
        scores_S2 = best_S4[:, 2:].view(np.float32)
        return BestTwo(best_S4[:, :2].astype(np.int64), scores_S2)

    def log_probabilities(self, x_SV: Tensor) -> Tensor:
        """Returns log_softmax. Its order of summation depends on the alignment of a row's first
        element, so that rows of an odd length are padded with tokens of probability 0."""
        missing = -x_SV.shape[-1] % _ALIGNED_COLUMNS
        if not missing:
            return x_SV.log_softmax(dim=-1)
        padded_SV = functional.pad(x_SV, (0, missing), value=-torch.inf)
        return padded_SV.log_softmax(dim=-1).narrow(-1, 0, x_SV.shape[-1])
