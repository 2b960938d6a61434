"""Rows of `numerics: invariant` products have the same bits with any other rows in the call.

Independent of the engine's self-check: rows are computed alone, then in runs of many lengths and at
other offsets of a run, with the matrices of full shapes.
"""

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.model.kernels import Linear, LinearPacker, pad_rows, padded_rows
from tests.gpu.conftest import Property
from tests.gpu.shapes import Width

pytestmark = pytest.mark.gpu

_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 64, 65, 96, 128, 129, 200, 256, 320)
_STARTS = (0, 1, 13, 64)
_NUM_SINGLE = 48
"""Number of rows computed alone, spread over all rows."""


# Shapes: M rows, I channels in, O channels out.
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    width: Width, dtype: DType, device: torch.device, is_small: bool, record_property: Property
) -> None:
    differences, holding = {}, defaultdict(list)
    for name, (num_out, num_in) in width.products.items():
        packer = LinearPacker(dtype=dtype, numerics="invariant", device=device)
        generator = torch.Generator(device).manual_seed(20261122)
        weight_OI = torch.randn((num_out, num_in), generator=generator, device=device)
        weight_OI = weight_OI.mul_(num_in**-0.5).to(packer.weight_dtype)
        num_rows = 40 if is_small else 400
        x_MI = torch.randn((num_rows, num_in), generator=generator, device=device)
        x_MI = x_MI.to(packer.compute_dtype)
        for candidate in packer.candidates:
            if first_difference(candidate.pack(weight_OI, None), x_MI) is None:
                holding[candidate.name].append(name)
        if difference := first_difference(packer.pack(weight_OI), x_MI):
            differences[name] = difference
    record_property("the same bits", dict(holding))
    assert not differences


@torch.inference_mode()
def first_difference(product: Linear, x_MI: Tensor) -> str | None:
    """Returns where a row has other bits than alone, or None."""
    num_rows = len(x_MI)
    single_M = torch.arange(0, num_rows, max(1, num_rows // _NUM_SINGLE), device=x_MI.device)
    single_MO = torch.cat([_product(product, x_MI[row : row + 1]) for row in single_M.tolist()])
    for count in _COUNTS:
        for start in _STARTS:
            is_inside_M = (single_M >= start) & (single_M < start + count)
            if start + count > num_rows or not is_inside_M.any():
                continue
            batch_MO = _product(product, x_MI[start : start + count])
            if not torch.equal(batch_MO[single_M[is_inside_M] - start], single_MO[is_inside_M]):
                return f"in rows [{start}, {start + count})"
    return None


def _product(product: Linear, x_MI: Tensor) -> Tensor:
    """Multiplies like the layers: padded to a row count that the self-check covers."""
    count = padded_rows(len(x_MI), numerics="invariant", device=x_MI.device)
    return product(pad_rows(x_MI, count))[: len(x_MI)]
