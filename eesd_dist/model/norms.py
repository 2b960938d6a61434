"""Root-mean-square norms, over whole rows and over each head."""

import math

import torch
from torch import Tensor


# Shapes: T rows, D hidden channels, H heads, E channels of a head.
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside.

    Computed as x / sqrt(|x|^2 + D * eps) * (sqrt(D) * weight): the norm of a row is one call and
    does not depend on the rows beside it, and no call is spent on the mean.
    """

    def __init__(self, weight_D: Tensor, *, eps: float, dtype: torch.dtype) -> None:
        width = weight_D.shape[-1]
        self._scaled_weight_D = weight_D.float() * math.sqrt(width)
        self._floor_11 = torch.full((1, 1), eps * width, device=weight_D.device)
        self._dtype = dtype

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self._dtype != torch.float32:
            return self._normed(x_TD.float()).to(self._dtype)
        return self._normed(x_TD)

    def _normed(self, x_TD: Tensor) -> Tensor:
        norm_T1: Tensor = torch.linalg.vector_norm(x_TD, 2, -1, True)
        inverse_T1 = norm_T1.square().add_(self._floor_11).rsqrt_()
        return (x_TD * inverse_T1).mul_(self._scaled_weight_D)


class HeadNorm:
    """The same over every query and key head, with one weight for queries and one for keys."""

    def __init__(self, weight_HE: Tensor, *, eps: float, dtype: torch.dtype) -> None:
        self._weight_HE = weight_HE.to(dtype)
        self._eps = eps

    def __call__(self, heads_THE: Tensor) -> Tensor:
        wide_THE = heads_THE.float()
        scale_TH1 = wide_THE.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (wide_THE * scale_TH1).to(heads_THE.dtype) * self._weight_HE
