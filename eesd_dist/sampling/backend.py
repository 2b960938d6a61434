"""Protocol of what sampling needs of a device.

Shapes: S rows, V columns of the logits, B best columns.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.devices import backend_of
from eesd_dist.sampling.row_filters import RowFilters


class BestTwo(NamedTuple):
    """The tokens of each row's two best scores, of equal ones the first column's, on the host."""

    tokens_S2: npt.NDArray[np.int64]
    scores_S2: npt.NDArray[np.float32]


class ChoiceCall(Protocol):
    """The choice of a device after all rows."""

    def __call__(
        self,
        logits_SV: Tensor,
        divisors: Sequence[float],
        words_S3: npt.NDArray[np.int32],
        vocab_ids: Tensor | None,
        filters: RowFilters | None,
    ) -> BestTwo:
        """Returns the best of what the filters leave of logits with noise, in one call. There
        must be two columns. The first score of a row is NaN where the call could not decide.

        `divisors`: temperature of each row, 0 for one without noise; `words_S3`: key words of the
        noise; `vocab_ids` [V]: tokens of the columns, None for 0, 1, 2, ...; `filters`: None if no
        row has any.
        """
        ...


class SamplingBackend(Protocol):
    """Operations of sampling on one type of device. Results do not depend on the other rows of a
    call, and have the same bits on every device, but for `log_probabilities`."""

    @property
    def choice_call(self) -> ChoiceCall | None:
        """Returns the choice among all tokens in one call; None where the device has none."""
        ...

    def gumbel(self, keys: Sequence[int], ids_V: Tensor) -> Tensor:
        """Returns the draws [S, V] of `noise.gumbel`."""
        ...

    def first_max(self, x_SV: Tensor) -> Tensor:
        """Returns the first column [S] of each row's maximum."""
        ...

    def first_maxima(self, x_SV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns columns and values [S, B] of each row's largest, best first, ties by column."""
        ...

    def sorted_rows(self, x_SV: Tensor) -> Tensor:
        """Returns the numbers of each row in descending order."""
        ...

    def log_probabilities(self, x_SV: Tensor) -> Tensor:
        """Returns log_softmax of each row."""
        ...

    def row_blocks(self, shape: Sequence[int]) -> list[slice]:
        """Returns consecutive slices of the rows of a matrix, to be processed one by one."""
        ...


def sampling_on(device: torch.device) -> SamplingBackend:
    """Returns the operations of a device."""
    backend: SamplingBackend = backend_of(device).sampling
    return backend
