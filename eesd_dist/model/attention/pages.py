"""Keys and values of one layer in pages, and attention over them for all rows of a pass at once.

The rows say which keys they see (`RowPlan`); one call of a kernel stores the rows' keys and values
and attends every row.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eesd_dist.config import KvCacheDType
from eesd_dist.devices import backend_of
from eesd_dist.model.attention.page_views import keys_in, values_in
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.families.family import PLAIN_SCORES, Scores
from eesd_dist.model.kv_layout import PageForm, count_kv_numbers


class Attention(Protocol):
    """A kernel with its pages and geometry."""

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor: ...


PROFILED_POSITIONS = 1088
"""Maximum number of positions that the start-up profile reads, in the first pages."""


class PagesBackend(Protocol):
    """Part of a backend that pages use."""

    page_form: PageForm

    def kv_dtype(self, setting: KvCacheDType, *, compute_dtype: torch.dtype) -> torch.dtype:
        """Returns the type of stored keys and values of layers that compute in `compute_dtype`.
        Raises ConfigError for a type that this device does not store."""
        ...

    def zeros(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros."""
        ...

    def attention(self, pages_PKX: Tensor, shape: AttentionShape) -> Attention:
        """Returns the kernel over pages of one layer."""
        ...


def pages_on(device: torch.device) -> PagesBackend:
    """Returns what the pages of a device are like."""
    backend: PagesBackend = backend_of(device).model
    return backend


# Shapes: T rows, H heads of all kinds (query heads as (query within group, KV head), then keys,
# then values), K KV heads, E channels of a head, D channels of all query heads, P pages, S slots of
# a page, X numbers of a page's part, M slots that move. In content_B, B is bytes.
class LayerPages:
    """Keys and values of one layer, indexed by page, and attention over them.

    Initialized to zero: a slot that was never written is finite, and a weight of 0 makes it 0.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        queries_per_kv: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> None:
        """`dtype`: type of keys and values; `window`: how many of the last positions a row may see,
        None: all."""
        self._page_size = page_size
        backend = pages_on(device)
        kv_numbers = count_kv_numbers(head_dim=head_dim, page_size=page_size)
        shape = (num_pages, num_kv_heads, kv_numbers)
        self.pages_PKX = backend.zeros(shape, dtype=dtype, device=device)
        # Memory that was never written is one page of zeros for a CPU, which is read too fast.
        self.pages_PKX[: -(-PROFILED_POSITIONS // page_size)].zero_()
        self.keys_PKES = keys_in(
            self.pages_PKX,
            head_dim=head_dim,
            page_size=page_size,
            form=backend.page_form,
        )
        self.values_PKSE = values_in(self.pages_PKX, head_dim=head_dim, page_size=page_size)
        self.shape = AttentionShape(
            num_kv_heads=num_kv_heads,
            queries_per_kv=queries_per_kv,
            head_dim=head_dim,
            page_size=page_size,
            window=window,
            scores=scores,
        )
        self.attention = backend.attention(self.pages_PKX, self.shape)

    def attend(self, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        """Stores the rows' keys and values, then attends every row to its keys.

        Returns [T, D]; padding rows have no meaning.
        """
        return self.attention.attend(rows, heads_THE)

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        """Copies keys and values between slots; reads all sources before it writes any target."""
        size = self._page_size
        (from_M, at_M), (to_M, within_M) = (
            (slots_M // size, slots_M % size) for slots_M in (sources_M, targets_M)
        )
        self.keys_PKES[to_M, :, :, within_M] = self.keys_PKES[from_M, :, :, at_M]
        self.values_PKSE[to_M, :, within_M] = self.values_PKSE[from_M, :, at_M]

    def clear(self) -> None:
        """Resets all pages to zero: an aborted round may have left values that are not finite."""
        self.pages_PKX.zero_()

    @property
    def page_bytes(self) -> int:
        return self.pages_PKX[0].nbytes

    def read(self, pages: Sequence[int]) -> Tensor:
        """Returns a copy of the pages' contents, as bytes on their device."""
        return self.pages_PKX.index_select(0, self._index(pages)).view(-1).view(torch.uint8)

    def write(self, pages: Sequence[int], content_B: Tensor) -> None:
        """Writes bytes from `read` to pages that no round reads or writes."""
        content = content_B.to(self.pages_PKX.device).view(self.pages_PKX.dtype)
        content_PKX = content.view(-1, *self.pages_PKX.shape[1:])
        self.pages_PKX.index_copy_(0, self._index(pages), content_PKX)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, device=self.pages_PKX.device)
