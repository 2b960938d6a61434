"""Weight matrices as the compiled product reads them."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.backends.cpu.calls import call_in_threads, threads_for
from eesd_dist.backends.cpu.kernels.products import (
    Kind,
    product_kernel,
)
from eesd_dist.backends.cpu.kernels.tiles import (
    BLOCK,
    host_features,
    in_blocks,
    multiplies_bfloat16,
)
from eesd_dist.model.kv_layout import LANES

_FLOAT_BYTES = 4
_WAY_BYTES = 512
"""Rows at a distance that is a multiple of this compete for few places of the first-level cache."""

PAIRS = np.dtype(np.int32)
_KINDS: Mapping[np.dtype[np.generic], torch.dtype] = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int16): torch.float16,
    np.dtype(np.uint16): torch.bfloat16,
    PAIRS: torch.bfloat16,
}

KIND_NAMES: Mapping[np.dtype[np.generic], str] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.int16): "float16",
    np.dtype(np.uint16): "bfloat16 widened",
    PAIRS: "bfloat16 pairs",
}


def kind_for(dtype: torch.dtype) -> np.dtype[np.generic]:
    """Returns the kind of weights (`tiles`) for weights of this type on this machine."""
    if dtype == torch.bfloat16:
        return PAIRS if multiplies_bfloat16() else np.dtype(np.uint16)
    if dtype == torch.float16 and host_features().get("f16c"):
        return np.dtype(np.int16)
    return np.dtype(np.float32)


def row_bytes(count: int, *, value_bytes: int) -> int:
    """Returns the distance of rows of `count` numbers in memory that only kernels see."""
    distance = in_blocks(count) * value_bytes
    return distance + 64 if distance % _WAY_BYTES == 0 else distance


# Shapes: M rows, I channels in, O channels out, B blocks, S steps (inputs, or pairs of them).
class PackedProduct:
    """x_MI @ weight.T + bias in float32, with the same bits of a row in any call."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, kind: np.dtype[np.generic]
    ) -> None:
        self.kind = kind
        self.num_out, self.num_in = weight_OI.shape
        self.weights = _packed(weight_OI, kind)
        self.bias = None if bias_O is None else padded_vector(bias_O)
        per_step = 2 if kind == PAIRS else 1
        self.num_steps = -(-self.num_in // per_step)
        self.weight_bytes = 2 if kind in (np.int16, np.uint16) else _FLOAT_BYTES
        """Bytes of the weights of one output channel and one step."""
        self.block_bytes = self.num_steps * BLOCK * self.weight_bytes
        self.address = self.weights.data_ptr()
        self.bias_address = 0 if self.bias is None else self.bias.data_ptr()
        self._kind_array = kind_array(kind)
        self._input_bytes = row_bytes(in_blocks(self.num_in), value_bytes=bytes_per_input(kind))

    def __call__(self, x_MI: Tensor) -> Tensor:
        return self.after_norm(x_MI, None, 0.0)

    def after_norm(self, x_MI: Tensor, weight_I: Tensor | None, floor: float) -> Tensor:
        """Returns the product with rows that are normed first; `weight_I`, `floor`: of a
        `RmsNorm`, the weight as a `padded_vector`."""
        num_rows, width = x_MI.shape[0], in_blocks(self.num_in)
        x_MI = x_MI.detach().to(torch.float32)
        if width != self.num_in:
            x_MI = functional.pad(x_MI, (0, width - self.num_in))
        x_MI = x_MI.contiguous()
        inputs = np.empty(num_rows * self._input_bytes, np.uint8)
        num_columns = in_blocks(self.num_out)
        y_MO = torch.empty(num_rows, num_columns)
        call_in_threads(
            product_kernel(),
            threads_for(num_rows * self.num_out * self.num_in),
            self._kind_array,
            x_MI.data_ptr(),
            width,
            0 if weight_I is None else weight_I.data_ptr(),
            np.float32(floor),
            inputs.ctypes.data,
            self._input_bytes,
            self.address,
            self.weight_bytes,
            self.num_steps,
            self.bias_address,
            y_MO.data_ptr(),
            num_columns,
            num_rows,
        )
        return y_MO if num_columns == self.num_out else y_MO.narrow(1, 0, self.num_out)


def padded_vector(x_O: Tensor) -> Tensor:
    """Returns the vector as float32 with zeros up to a whole block."""
    return functional.pad(x_O.detach().float(), (0, in_blocks(len(x_O)) - len(x_O))).contiguous()


def bytes_per_input(kind: np.dtype[np.generic]) -> int:
    return 2 if kind == PAIRS else _FLOAT_BYTES


@cache
def kind_array(kind: np.dtype[np.generic]) -> Kind:
    return np.zeros(0, kind)


def _packed(weight_OI: Tensor, kind: np.dtype[np.generic]) -> Tensor:
    """Returns [B, S, BLOCK] as bytes; in pairs [B, S, BLOCK, 2]; for bfloat16 numbers that are
    widened [B, S, LANES, 2], with the channels of both vectors of a block side by side."""
    num_out, num_in = weight_OI.shape
    weight_OI = weight_OI.detach().to(_KINDS[kind])
    per_step = 2 if kind == PAIRS else 1
    missing_out, missing_in = -num_out % BLOCK, -num_in % per_step
    if missing_out or missing_in:
        weight_OI = functional.pad(weight_OI, (0, missing_in, 0, missing_out))
    if kind == PAIRS:
        weight_OI = weight_OI.contiguous().view(torch.int32)
    blocks_BOS = weight_OI.contiguous().view(-1, BLOCK, weight_OI.shape[1])
    if kind == np.uint16:
        packed = blocks_BOS.view(len(blocks_BOS), 2, LANES, -1).permute(0, 3, 2, 1)
    else:
        packed = blocks_BOS.transpose(1, 2)
    return packed.contiguous().view(-1).view(torch.uint8)
