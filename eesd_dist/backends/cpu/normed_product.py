"""A norm and the LM head after it as one compiled call."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.cpu.kernels.products import LmHead
from eesd_dist.backends.cpu.packed import PackedProduct, padded_vector
from eesd_dist.model.layers.norms import RmsNorm


# Shapes: T rows, D hidden channels.
@dataclass(frozen=True, slots=True)
class NormedProduct:
    """Returns logits [T, V] of hidden states [T, D]."""

    product: PackedProduct
    norm_D: Tensor
    """Weight of the norm, padded to a block."""
    floor: float

    @classmethod
    def of(cls, norm: RmsNorm, product: PackedProduct) -> Self:
        head = cls(product, padded_vector(norm.scaled_weight_D), norm.floor)
        head(torch.zeros(1, product.num_in))  # compiles
        return head

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.product.after_norm(x_TD, self.norm_D, self.floor)

    @property
    def call(self) -> LmHead:
        """Arguments with which another kernel runs it; this object owns the memory."""
        product = self.product
        return LmHead(
            norm_at=self.norm_D.data_ptr(),
            floor=np.float32(self.floor),
            weights=product.address,
            block_bytes=product.block_bytes,
            num_steps=product.num_steps,
            bias=product.bias_address,
            width=len(self.norm_D),
        )
