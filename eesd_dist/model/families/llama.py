"""Llama, and models of the same architecture: CodeLlama, Vicuna and others."""

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.families.family import Family, Traits


def _traits(fields: ConfigFields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


LLAMA = Family(
    model_types=("llama",),
    traits=_traits,
    keys=frozenset({"attention_bias", "mlp_bias"}),
    defaults={"max_position_embeddings": 2048},
)
