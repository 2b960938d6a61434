"""Times the products of a layer and of the LM head, and the attention of a layer, each alone.

What a rank of a larger group computes is the same products with fewer columns or rows, and the same
attention with fewer heads, so that these times, unlike those of a whole stage, apply to every
degree of tensor parallelism.
"""

# Shapes: M rows, I channels in, O channels out, T rows, H heads, E channels of a head.

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch

from eesd_dist.bench.costs.form import AttentionCost, ProductCost
from eesd_dist.config import EngineConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.model.attention.pages import LayerPages, pages_on
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.kernels import LinearPacker, pad_rows, padded_rows
from eesd_dist.model.spec import ModelSpec
from eesd_dist.page_table import PageTable
from eesd_dist.statistics import usual_s


def usual_call_s(
    calls: Sequence[Callable[[], object]], device: torch.device, *, repeats: int
) -> float:
    """Returns the usual time of one call: they run one after the other between two readings of the
    clock."""
    times: list[float] = []
    for _ in range(repeats):
        _synchronize(device)
        started_s = time.perf_counter()
        for call in calls:
            call()
        _synchronize(device)
        times.append((time.perf_counter() - started_s) / len(calls))
    return usual_s(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Shapes: M rows, I channels in, O channels out.


PRODUCT_ROWS = (1, 4, 9, 16, 24, 40, 72)
_PRODUCT_REPEATS = 40
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
        packed = packer.pack(weight_OI.mul_(0.02).to(packer.weight_dtype))
        for num_rows in PRODUCT_ROWS:
            padded = padded_rows(num_rows, numerics=config.model.numerics, device=layout.device)
            x_MI = torch.randn(num_rows, num_in, generator=generator, device=layout.device)
            x_MI = pad_rows(x_MI.to(packer.compute_dtype), padded)
            seconds = usual_call_s(
                [partial(packed, x_MI)] * _CALLS, layout.device, repeats=_PRODUCT_REPEATS
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


REQUESTS = (1, 8)
ROWS_EACH = (1, 3, 9)
CONTEXTS = (64, 256)
_LAYERS = 8
"""Layers with pages of their own that are timed in turn: a single one would stay in the caches."""
_ATTENTION_REPEATS = 30


@torch.inference_mode()
def measure_attention(config: EngineConfig) -> list[AttentionCost]:
    """Times all heads of a layer, in this process."""
    layout = layout_of(config)
    spec, page_size = layout.spec, config.cache.page_size
    pages_per_request = -(-(max(CONTEXTS) + max(ROWS_EACH)) // page_size)
    packer = LinearPacker(dtype=layout.dtype, numerics=config.model.numerics, device=layout.device)
    kv_dtype = pages_on(layout.device).kv_dtype(
        layout.kv_cache_dtype, compute_dtype=packer.compute_dtype
    )
    layers = [
        LayerPages(
            num_pages=pages_per_request * max(REQUESTS),
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            queries_per_kv=spec.num_heads // spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=kv_dtype,
            device=layout.device,
            scores=spec.traits.scores,
        )
        for _ in range(_LAYERS)
    ]
    costs = []
    for requests, rows_per_request, context in product(REQUESTS, ROWS_EACH, CONTEXTS):
        rows = RowPlan.build(
            [
                RowSegment(
                    start=context,
                    num_rows=rows_per_request,
                    pages=PageTable(range(at * pages_per_request, (at + 1) * pages_per_request)),
                )
                for at in range(requests)
            ],
            page_size=page_size,
            device=layout.device,
            numerics=config.model.numerics,
        )
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        heads_THE = torch.randn(rows.num_padded, num_heads, spec.head_dim, device=layout.device).to(
            packer.compute_dtype
        )
        seconds = usual_call_s(
            [partial(layer.attend, rows, heads_THE) for layer in layers],
            layout.device,
            repeats=_ATTENTION_REPEATS,
        )
        costs.append(
            AttentionCost(
                num_heads=spec.num_heads,
                num_requests=requests,
                rows_each=rows_per_request,
                context_tokens=context,
                seconds=round(seconds, 9),
            )
        )
    return costs
