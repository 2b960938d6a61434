"""Layers on a CPU as compiled calls: products, attention, whole passes, LM heads.

Activations between products and hidden states are float32. With bfloat16 instructions the inputs of
a product with bfloat16 weights are rounded to bfloat16, and summed in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_dist.backends.cpu.attention import CpuAttention
from eesd_dist.backends.cpu.layers import CompiledLayers
from eesd_dist.backends.cpu.model import CpuModel
from eesd_dist.backends.cpu.normed_product import NormedProduct
from eesd_dist.backends.cpu.packed import KIND_NAMES, PackedProduct, kind_for
from eesd_dist.config import DType, Numerics
from eesd_dist.model.attention.pages import Attention
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.kernels import TORCH_DTYPES, Candidate, Linear
from eesd_dist.model.layers.norms import RmsNorm
from eesd_dist.model.layers.paged_layers import LayerStack


class CompiledModel(CpuModel):
    """Implements the protocols of `model` by Numba's kernels."""

    def candidates(
        self, dtype: DType, numerics: Numerics
    ) -> tuple[Sequence[Candidate], torch.dtype]:
        candidates, compute_dtype = (
            super().candidates(dtype, numerics) if numerics == "fast" else ((), torch.float32)
        )
        if compute_dtype == torch.bfloat16:
            return candidates, compute_dtype
        return (compiled_candidate(TORCH_DTYPES[dtype]),), torch.float32

    def attention(self, pages_PKX: Tensor, shape: AttentionShape) -> Attention:
        return CpuAttention(pages_PKX, shape)

    def fused_layers(self, stack: LayerStack) -> CompiledLayers | None:
        return CompiledLayers.of(stack.layers, stack.pages, stack.rotations)

    def normed_product(self, norm: RmsNorm, linear: Linear) -> NormedProduct | None:
        return NormedProduct.of(norm, linear) if isinstance(linear, PackedProduct) else None


def compiled_candidate(dtype: torch.dtype) -> Candidate:
    """Returns the compiled product for weights of this type. Its rows are independent of one
    another by construction."""
    kind = kind_for(dtype)
    return Candidate(
        f"compiled {KIND_NAMES[kind]}",
        lambda weight_OI, bias_O: PackedProduct(weight_OI, bias_O, kind),
        is_independent=True,
    )
