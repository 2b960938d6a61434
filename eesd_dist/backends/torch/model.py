"""Layers by torch's operations, one after the other."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from eesd_dist.backends.torch.attention import RowByRowAttention
from eesd_dist.config import DType, KvCacheDType, Numerics
from eesd_dist.errors import ConfigError
from eesd_dist.model.attention.pages import Attention
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.elementwise import soft_capped
from eesd_dist.model.kernels import TORCH_DTYPES, Candidate, Linear, dtype_name, plain_linear
from eesd_dist.model.kv_layout import PageForm
from eesd_dist.model.layers.norms import RmsNorm
from eesd_dist.model.layers.paged_layers import FusedLayers, LayerStack


# Shapes: T rows, D hidden channels, V vocabulary.
class TorchModel:
    """Implements the protocols of `model` on any device, for `numerics: fast` alone."""

    page_form: PageForm = "keys by channel"
    clears_pages = True
    caches_answers = False
    """False, as on a GPU: a check takes milliseconds, and drivers change under one torch build."""

    def candidates(
        self, dtype: DType, numerics: Numerics
    ) -> tuple[Sequence[Candidate], torch.dtype]:
        if numerics != "fast":
            raise ConfigError("torch's products compute no rows independently: set numerics: fast")
        return (Candidate("library", plain_linear),), TORCH_DTYPES[dtype]

    def padded_rows(self, num_rows: int) -> int:
        return num_rows

    def row_blocks(self, x: Tensor) -> Iterable[slice]:
        return (slice(x.shape[0]),)

    def soft_capped_rows(self, x_TV: Tensor, cap: float) -> Tensor:
        return soft_capped(x_TV, cap)

    def normed(self, norm: RmsNorm, x_TD: Tensor) -> Tensor:
        return norm.by_steps(x_TD)

    def kv_dtype(self, setting: KvCacheDType, *, compute_dtype: torch.dtype) -> torch.dtype:
        if setting not in ("auto", dtype_name(compute_dtype)):
            raise ConfigError(
                f"cache.kv_cache_dtype is {setting}, and the model computes in "
                f"{dtype_name(compute_dtype)} on a GPU, which stores keys and values in that type: "
                f"set it to auto, or model.dtype to {setting}"
            )
        return compute_dtype

    def zeros(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def attention(self, pages_PKX: Tensor, shape: AttentionShape) -> Attention:
        return RowByRowAttention(pages_PKX, shape)

    def fused_layers(self, stack: LayerStack) -> FusedLayers | None:
        return None

    def normed_product(self, norm: RmsNorm, linear: Linear) -> Callable[[Tensor], Tensor] | None:
        return None

    def settle(self, device: torch.device) -> None:
        """Does nothing: writes are done when the call returns."""
