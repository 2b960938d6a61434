"""Qwen2 and Qwen2.5: Llama with biases for queries, keys and values."""

from eesd_dist.model.families.family import Family, Traits
from eesd_dist.model.families.windows import window_in_upper_layers

QWEN2 = Family(
    model_types=("qwen2",),
    traits=lambda fields: Traits(qkv_bias=True),
    windows=window_in_upper_layers,
    keys=frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
    defaults={"sliding_window": 4096},
)
