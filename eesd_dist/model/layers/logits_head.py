"""The norm and the LM head after the last layer, of a target or an exit head."""

from typing import Protocol

from torch import Tensor

from eesd_dist.config import Numerics
from eesd_dist.devices import backend_of
from eesd_dist.model.elementwise import soft_capped_rows
from eesd_dist.model.kernels import Linear, LinearPacker, pad_rows, padded_rows
from eesd_dist.model.layers.norms import RmsNorm


class LogitsBackend(Protocol):
    """Part of a backend that LM heads use."""

    def normed_product(self, norm: RmsNorm, linear: Linear) -> Linear | None:
        """Returns norm and product as one call, None where there is none."""
        ...


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
        backend: LogitsBackend = backend_of(packer.device).model
        self._fused = backend.normed_product(norm, linear)

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
    def fused(self) -> Linear | None:
        """The whole head as one call; None where there is none."""
        return None if self._softcap is not None else self._fused

    def _after_norm(self, rows_TD: Tensor) -> Tensor:
        if self._fused is not None:
            return self._fused(rows_TD)
        num_rows = rows_TD.shape[0]
        padded = padded_rows(num_rows, numerics=self._numerics, device=rows_TD.device)
        return self._linear(self._norm(pad_rows(rows_TD, padded)))[:num_rows].float()
