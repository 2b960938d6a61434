"""The norm and the LM head after the last layer, of a target or an exit head."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eesd_dist.compiled import can_compile
from eesd_dist.config import Numerics
from eesd_dist.model.elementwise import soft_capped_rows
from eesd_dist.model.kernels import Linear, LinearPacker, pad_rows, padded_rows
from eesd_dist.model.layers.norms import RmsNorm

if TYPE_CHECKING:
    from eesd_dist.model.cpu.packed import PackedProduct
    from eesd_dist.model.cpu.products import LmHead


@dataclass(frozen=True, slots=True)
class NormedProduct:
    """A norm and the LM head as one compiled call."""

    product: "PackedProduct"
    norm_D: Tensor
    """Weight of the norm, padded to a block."""
    floor: float

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.product.after_norm(x_TD, self.norm_D, self.floor)

    @property
    def call(self) -> "LmHead":
        """Arguments with which another kernel runs it; this object owns the memory."""
        from eesd_dist.model.cpu.products import LmHead

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


# Shapes: T rows, D hidden channels, V vocabulary (shard).
class LogitsHead:
    """Final norm and LM head over any number of rows, padded as the product needs."""

    def __init__(
        self,
        norm: RmsNorm,
        linear: Linear,
        *,
        softcap: float | None,
        packer: LinearPacker,
        numerics: Numerics,
    ) -> None:
        self._norm = norm
        self._linear = linear
        self._softcap = softcap
        self._compute_dtype = packer.compute_dtype
        self._numerics: Numerics = numerics
        self._compiled = _compiled_head(norm, linear)

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """Returns logits [T, V] float32; any number of leading axes."""
        is_flat = hidden_TD.dim() == 2
        rows_TD = hidden_TD if is_flat else hidden_TD.reshape(-1, hidden_TD.shape[-1])
        logits_TV = self._after_norm(rows_TD.to(self._compute_dtype))
        if self._softcap is not None:
            logits_TV = soft_capped_rows(logits_TV, self._softcap)
        if is_flat:
            return logits_TV
        return logits_TV.reshape(*hidden_TD.shape[:-1], logits_TV.shape[-1])

    @property
    def compiled(self) -> NormedProduct | None:
        """The whole head as one compiled call; None where there is none."""
        return None if self._softcap is not None else self._compiled

    def _after_norm(self, rows_TD: Tensor) -> Tensor:
        if self._compiled is not None:
            return self._compiled(rows_TD)
        num_rows = rows_TD.shape[0]
        padded = padded_rows(num_rows, numerics=self._numerics, device=rows_TD.device)
        return self._linear(self._norm(pad_rows(rows_TD, padded)))[:num_rows].float()


def _compiled_head(norm: RmsNorm, linear: Linear) -> NormedProduct | None:
    """Returns norm and product as one compiled call, if the product is compiled."""
    if not can_compile():
        return None
    from eesd_dist.model.cpu.packed import PackedProduct, padded_vector

    if not isinstance(linear, PackedProduct):
        return None
    head = NormedProduct(linear, padded_vector(norm.scaled_weight_D), norm.floor)
    head(torch.zeros(1, linear.num_in))  # compiles
    return head
