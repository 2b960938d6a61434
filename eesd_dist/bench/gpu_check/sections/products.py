"""Checks that a product's rows have the same bits with any other rows in the call, on full shapes.

Independent of the engine's self-check: each row is computed alone, then in runs of many lengths and
at other places of a run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.errors import ConfigError
from eesd_dist.model.kernels import Linear, LinearPacker, pad_rows, padded_rows

_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 64, 65, 96, 128, 129, 200, 256, 320)
_STARTS = (0, 1, 13, 64)
_CHECKED_ALONE = 48
"""Number of rows computed alone, spread over all rows."""


# Shapes: M rows, I channels in, O channels out.
@dataclass(frozen=True, slots=True, kw_only=True)
class ProductFinding:
    """Results of one shape's candidates."""

    holding: tuple[str, ...]
    failing: tuple[str, ...]
    taken_holds: bool
    """True if rows of the product that the engine takes are independent; False if it takes none."""
    reason: str = ""


def examine(
    num_out: int, num_in: int, *, dtype: DType, device: torch.device, num_rows: int
) -> ProductFinding:
    packer = LinearPacker(dtype=dtype, numerics="invariant", device=device)
    generator = torch.Generator(device).manual_seed(20261122)
    shape = (num_out, num_in)
    weight_OI = torch.randn(shape, generator=generator, device=device).mul_(num_in**-0.5)
    weight_OI = weight_OI.to(packer.weight_dtype)
    x_MI = torch.randn((num_rows, num_in), generator=generator, device=device)
    x_MI = x_MI.to(packer.compute_dtype)
    holding, failing = [], []
    for candidate in packer.candidates:
        at = first_difference(candidate.pack(weight_OI, None), x_MI)
        if at is None:
            holding.append(candidate.name)
        else:
            failing.append(f"{candidate.name} differs {at}")
    try:
        taken = packer.pack(weight_OI)
    except ConfigError as error:
        return ProductFinding(
            holding=tuple(holding), failing=tuple(failing), taken_holds=False, reason=str(error)
        )
    at = first_difference(taken, x_MI)
    return ProductFinding(
        holding=tuple(holding),
        failing=tuple(failing),
        taken_holds=at is None,
        reason="" if at is None else f"the engine takes a product that differs {at}",
    )


@torch.inference_mode()
def first_difference(product: Linear, x_MI: Tensor) -> str | None:
    """Returns where a row has other bits than alone, or None."""
    num_rows, device = len(x_MI), x_MI.device
    step = max(1, num_rows // _CHECKED_ALONE)
    checked = list(range(0, num_rows, step))
    alone_MO = torch.cat([_product(product, x_MI[at : at + 1]) for at in checked])
    for count in _COUNTS:
        for start in _STARTS:
            if start + count > num_rows:
                continue
            places = [i for i, at in enumerate(checked) if start <= at < start + count]
            if not places:
                continue
            found_MO = _product(product, x_MI[start : start + count])
            rows = torch.tensor([checked[i] - start for i in places], device=device)
            if not torch.equal(
                found_MO.index_select(0, rows), alone_MO[places[0] : places[-1] + 1]
            ):
                return f"in rows [{start}, {start + count})"
    return None


def _product(product: Linear, x_MI: Tensor) -> Tensor:
    """Multiplies like the layers: padded to a row count that the self-check covers."""
    count = padded_rows(len(x_MI), numerics="invariant", device=x_MI.device)
    return product(pad_rows(x_MI, count))[: len(x_MI)]
