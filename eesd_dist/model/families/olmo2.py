"""OLMo 2 (arXiv 2501.00656): norms of what attention and MLP add, none of their inputs, and norms
over all query heads and over all key heads."""

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.families.family import Family, Norms, Traits

_NORMS = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def _traits(fields: ConfigFields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(qkv_bias=bias, output_bias=bias, qk_norm=True, joint_qk_norm=True, norms=_NORMS)


OLMO2 = Family(
    model_types=("olmo2",),
    traits=_traits,
    keys=frozenset({"attention_bias"}),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
