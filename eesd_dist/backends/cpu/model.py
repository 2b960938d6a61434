"""Layers on a CPU without Numba: one after the other, for `numerics: fast` alone.

Activations between products and hidden states are float32, except for `fast` with bfloat16
instructions. Keys and values are float32 unless the setting says bfloat16.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.torch.model import TorchModel
from eesd_dist.config import DType, KvCacheDType, Numerics
from eesd_dist.errors import ConfigError
from eesd_dist.model.attention.pages import Attention
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.elementwise import soft_capped
from eesd_dist.model.kernels import TORCH_DTYPES, Candidate, Linear, plain_linear

logger = logging.getLogger(__name__)

_GRAIN = 16_384
"""torch never splits fewer elements than this among threads: GELU's threshold, the lowest."""
_FEWEST_ROWS = 4
"""The library multiplies single rows with another routine (gemv)."""


# Shapes: M rows, I channels in, O channels out, T rows, V vocabulary.
class CpuModel(TorchModel):
    """Implements the protocols of `model` by libraries."""

    clears_pages = False
    """Nothing is computed before its rows are there, and clearing would touch all memory."""
    caches_answers = True

    def candidates(
        self, dtype: DType, numerics: Numerics
    ) -> tuple[Sequence[Candidate], torch.dtype]:
        if numerics == "fast" and dtype == "bfloat16" and _has_onednn_bfloat16():
            return (_ONEDNN_BFLOAT16,), torch.bfloat16
        if numerics == "fast":
            return (_LIBRARY,), torch.float32
        raise ConfigError(
            "invariant numerics on a CPU need numba, which is not installed: install it"
        )

    def padded_rows(self, num_rows: int) -> int:
        return max(num_rows, _FEWEST_ROWS)

    def row_blocks(self, x: Tensor) -> Iterable[slice]:
        num_rows = x.shape[0]
        if torch.get_num_threads() == 1 or x.numel() < _GRAIN:
            return (slice(num_rows),)
        step = max(1, (_GRAIN - 1) // x[0].numel())
        return (slice(first, first + step) for first in range(0, num_rows, step))

    def soft_capped_rows(self, x_TV: Tensor, cap: float) -> Tensor:
        capped_TV = torch.empty_like(x_TV)
        for row_V, capped_V in zip(x_TV, capped_TV, strict=True):
            capped_V.copy_(soft_capped(row_V, cap))
        return capped_TV

    def kv_dtype(self, setting: KvCacheDType, *, compute_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if setting == "auto" else TORCH_DTYPES[setting]

    def zeros(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros that the system makes when a page is first used: torch would write them all
        now."""
        integers = np.int32 if dtype.itemsize == 4 else np.int16  # NumPy has no bfloat16
        return torch.from_numpy(np.zeros(shape, integers)).view(dtype)

    def attention(self, pages_PKX: Tensor, shape: AttentionShape) -> Attention:
        _warn_of_slow_attention()
        return super().attention(pages_PKX, shape)


@cache
def _warn_of_slow_attention() -> None:
    """Logs it once, not for every layer."""
    logger.warning("attention_is_slow reason=numba is not installed rows=one by one")


def _upcast_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    return plain_linear(weight_OI.float(), None if bias_O is None else bias_O.float())


def _onednn_pack(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight_OI.bfloat16().contiguous(), 8)
    bias = None if bias_O is None else bias_O.bfloat16()

    def multiply(x_MI: Tensor) -> Tensor:
        product: Tensor = ops._linear_pointwise(x_MI, packed, bias, "none", [], "")
        return product

    return multiply


def _has_onednn_bfloat16() -> bool:
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private, may be missing
    is_wide = has_onednn and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return is_wide and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_LIBRARY = Candidate("library float32", _upcast_linear)
_ONEDNN_BFLOAT16 = Candidate("onednn packed bfloat16", _onednn_pack)
