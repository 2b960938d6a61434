"""Root-mean-square norms, over whole rows, over each head and over all heads."""

import math
from typing import Protocol, Self

import torch
from torch import Tensor

from eesd_dist.devices import backend_of
from eesd_dist.model.spec import ModelSpec


# Shapes: T rows, D hidden channels, H heads, E channels of a head.
class NormBackend(Protocol):
    """Part of a backend that norms use."""

    def normed(self, norm: "RmsNorm", x_TD: Tensor) -> Tensor:
        """Returns the norm of rows, without gradients."""
        ...


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside.

    Computed as x / sqrt(|x|^2 + D * eps) * (sqrt(D) * weight): the norm of a row is one call that
    does not depend on other rows, and the mean needs no further call.
    """

    def __init__(
        self,
        weight_D: Tensor,
        *,
        eps: float,
        dtype: torch.dtype,
        offset: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """`offset` is added to the weight; `scale` is a factor of the normed rows."""
        width = weight_D.shape[-1]
        factor_D = weight_D.float() + offset if offset else weight_D.float()
        self.scaled_weight_D = factor_D * (math.sqrt(width) * scale)
        self.floor = eps * width
        self._floor_11 = torch.full((1, 1), eps * width, device=weight_D.device)
        self.dtype = dtype

    @classmethod
    def of(
        cls, weight_D: Tensor, spec: ModelSpec, *, dtype: torch.dtype, scale: float = 1.0
    ) -> Self:
        """Returns a norm of this model with the weight in its checkpoint."""
        offset = spec.traits.norms.weight_offset
        return cls(weight_D, eps=spec.rms_norm_eps, dtype=dtype, offset=offset, scale=scale)

    @classmethod
    def before_logits(cls, weight_D: Tensor, spec: ModelSpec, *, dtype: torch.dtype) -> Self:
        """Returns the norm before an LM head, which also scales the logits: the LM head is
        linear and has no bias."""
        return cls.of(weight_D, spec, dtype=dtype, scale=spec.traits.logits_scale)

    def __call__(self, x_TD: Tensor) -> Tensor:
        needs_grad = x_TD.requires_grad or self.scaled_weight_D.requires_grad
        if needs_grad and torch.is_grad_enabled():
            return self.by_steps(x_TD)
        backend: NormBackend = backend_of(x_TD.device).model
        return backend.normed(self, x_TD)

    def by_steps(self, x_TD: Tensor) -> Tensor:
        """Returns the norm by torch's operations, which autograd supports."""
        if self.dtype != torch.float32:
            return self._normed(x_TD.float()).to(self.dtype)
        return self._normed(x_TD)

    def _normed(self, x_TD: Tensor) -> Tensor:
        norm_T1: Tensor = torch.linalg.vector_norm(x_TD, 2, -1, True)
        inverse_T1 = norm_T1.square().add_(self._floor_11).rsqrt_()
        return (x_TD * inverse_T1).mul_(self.scaled_weight_D)


class HeadNorm:
    """Norm of every query and key head, with one weight for queries and one for keys."""

    def __init__(
        self, weight_HE: Tensor, *, eps: float, dtype: torch.dtype, offset: float = 0.0
    ) -> None:
        """`offset` is added to the weight, which then stays float32: rounded to a narrower type,
        the sum would lose most of a small weight."""
        self.weight_HE = weight_HE.float() + offset if offset else weight_HE.to(dtype)
        self.eps = eps

    def __call__(self, heads_THE: Tensor) -> Tensor:
        wide_THE = heads_THE.float()
        scale_TH1 = wide_THE.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        normed_THE = (wide_THE * scale_TH1).to(self.weight_HE.dtype) * self.weight_HE
        return normed_THE.to(heads_THE.dtype)


class JointNorm:
    """Norms over all query heads of a row and over all its key heads."""

    def __init__(
        self,
        weight_HE: Tensor,
        *,
        num_queries: int,
        eps: float,
        dtype: torch.dtype,
        offset: float = 0.0,
    ) -> None:
        """`offset` is added to the weight."""
        self.weight_HE = weight_HE.float() + offset
        self.eps = eps
        self._num_queries = num_queries
        self._queries, self._keys = (
            RmsNorm(weight_HE.flatten(), eps=eps, dtype=dtype)
            for weight_HE in (self.weight_HE[:num_queries], self.weight_HE[num_queries:])
        )

    def __call__(self, heads_THE: Tensor) -> Tensor:
        queries_TD = heads_THE[:, : self._num_queries].flatten(1)
        keys_TD = heads_THE[:, self._num_queries :].flatten(1)
        normed_TD = torch.cat([self._queries(queries_TD), self._keys(keys_TD)], dim=1)
        return normed_TD.view(heads_THE.shape)
