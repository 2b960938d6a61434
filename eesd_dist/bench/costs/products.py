"""Times the products of a layer and of the LM head, each alone, as the engine packs them.

What a rank of a larger group computes is the same products with fewer columns or rows, so that
these times, unlike those of a whole stage, apply to every degree of tensor parallelism.
"""

# Shapes: M rows, I channels in, O channels out.

from collections.abc import Iterator
from functools import partial

import torch

from eesd_dist.bench.costs.calls import usual_call_s
from eesd_dist.bench.costs.form import ProductCost
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import layout_of
from eesd_dist.model.kernels import LinearPacker, pad_rows, padded_rows
from eesd_dist.model.spec import ModelSpec

ROWS = (1, 4, 9, 16, 24, 40, 72)
_REPEATS = 40
_CALLS = 5
"""Calls between two readings of the clock."""


@torch.inference_mode()
def measure_products(config: EngineConfig) -> list[ProductCost]:
    """Times each product at several row counts, in this process."""
    layout = layout_of(config)
    packer = LinearPacker(dtype=layout.dtype, numerics=config.model.numerics, device=layout.device)
    generator = torch.Generator(layout.device).manual_seed(0)
    costs: list[ProductCost] = []
    for num_out, num_in in shapes_of(layout.spec):
        weight_OI = torch.randn(num_out, num_in, generator=generator, device=layout.device)
        product = packer.pack(weight_OI.mul_(0.02).to(packer.weight_dtype))
        for num_rows in ROWS:
            padded = padded_rows(num_rows, numerics=config.model.numerics, device=layout.device)
            x_MI = torch.randn(num_rows, num_in, generator=generator, device=layout.device)
            x_MI = pad_rows(x_MI.to(packer.compute_dtype), padded)
            seconds = usual_call_s(
                [partial(product, x_MI)] * _CALLS, layout.device, repeats=_REPEATS
            )
            costs.append(
                ProductCost(
                    num_in=num_in,
                    num_out=num_out,
                    num_rows=num_rows,
                    seconds=round(seconds, 9),
                )
            )
    return costs


def shapes_of(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """Yields (channels out, channels in) of a layer's four products and of the LM head."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    yield heads, spec.hidden_size
    yield spec.hidden_size, spec.num_heads * spec.head_dim
    yield 2 * spec.intermediate_size, spec.hidden_size
    yield spec.hidden_size, spec.intermediate_size
    yield spec.vocab_size, spec.hidden_size
