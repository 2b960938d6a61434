"""Work on rows between the products of a layer, on a GPU: one launch each."""

import triton
from torch import Tensor

from eesd_dist.backends.cuda.kernels.launches import launch_options
from eesd_dist.backends.cuda.kernels.rows import activation_kernel, norm_kernel
from eesd_dist.model.layers.norms import RmsNorm

_BLOCK = 1024


# Shapes: T rows, D hidden channels, I intermediate channels.
def normed(norm: RmsNorm, x_TD: Tensor, addend_TD: Tensor | None) -> Tensor:
    """Adds `addend_TD` to x in place; returns the norm of x, in one launch."""
    assert x_TD.dim() == 2, "rows"
    assert x_TD.is_contiguous(), "the kernel reads one row after the other"
    if addend_TD is not None:
        addend_TD = addend_TD.contiguous()
    normed_TD = x_TD.new_empty(x_TD.shape, dtype=norm.dtype)
    norm_kernel[(x_TD.shape[0],)](
        x_TD,
        x_TD if addend_TD is None else addend_TD,
        norm.scaled_weight_D,
        normed_TD,
        norm.floor,
        WIDTH=x_TD.shape[1],
        HAS_ADDED=addend_TD is not None,
        PADDED_WIDTH=triton.next_power_of_2(x_TD.shape[1]),
        num_warps=8 if x_TD.shape[1] > _BLOCK else 4,
        **launch_options(x_TD.device),
    )
    return normed_TD


def activated(gate_up: Tensor, *, is_silu: bool) -> Tensor:
    """Returns activation(gate) * up [T, I] of rows [T, 2 I]; GELU if it is not SiLU."""
    assert gate_up.is_contiguous(), "the kernel reads one row after the other"
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    activated_TI = gate_up.new_empty(num_rows, width)
    activation_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        gate_up,
        activated_TI,
        WIDTH=width,
        IS_SILU=is_silu,
        BLOCK=_BLOCK,
        **launch_options(gate_up.device),
    )
    return activated_TI
