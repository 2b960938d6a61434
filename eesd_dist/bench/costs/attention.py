"""Times the attention of one layer by requests, rows and context.

Like a product it is shared by tensor-parallel ranks: each has a part of the heads.
"""

from functools import partial
from itertools import product

import torch

from eesd_dist.bench.costs.calls import usual_call_s
from eesd_dist.bench.costs.form import AttentionCost
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import layout_of
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.kernels import LinearPacker
from eesd_dist.page_table import PageTable

REQUESTS = (1, 8)
ROWS_EACH = (1, 3, 9)
CONTEXTS = (64, 256)
_LAYERS = 8
"""Layers with pages of their own that are timed in turn: a single one would stay in the caches."""
_REPEATS = 30


@torch.inference_mode()
def measure_attention(config: EngineConfig) -> list[AttentionCost]:
    """Times all heads of a layer, in this process."""
    layout = layout_of(config)
    spec, page_size = layout.spec, config.cache.page_size
    pages_per_request = -(-(max(CONTEXTS) + max(ROWS_EACH)) // page_size)
    packer = LinearPacker(dtype=layout.dtype, numerics=config.model.numerics, device=layout.device)
    layers = [
        LayerPages(
            num_pages=pages_per_request * max(REQUESTS),
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            queries_per_kv=spec.num_heads // spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=packer.compute_dtype,
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
            repeats=_REPEATS,
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
