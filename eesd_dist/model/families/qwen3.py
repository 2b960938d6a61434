"""Qwen3: Llama with a norm over every query and key head."""

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.families.family import Family, Traits
from eesd_dist.model.families.windows import window_in_upper_layers


def _traits(fields: ConfigFields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(qkv_bias=bias, output_bias=bias, qk_norm=True)


QWEN3 = Family(
    model_types=("qwen3",),
    traits=_traits,
    windows=window_in_upper_layers,
    keys=frozenset({"attention_bias", "sliding_window", "use_sliding_window", "max_window_layers"}),
    defaults={"head_dim": 128, "sliding_window": 4096},
)
