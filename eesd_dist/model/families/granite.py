"""Granite 3: Llama with factors of embedding, attention scores, residual additions and logits."""

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.families.family import Family, Scores, Traits


def _traits(fields: ConfigFields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        scores=Scores(scale=fields.positive("attention_multiplier")),
        embedding_scale=fields.positive("embedding_multiplier"),
        residual_scale=fields.positive("residual_multiplier"),
        logits_scale=1.0 / fields.positive("logits_scaling"),
    )


GRANITE = Family(
    model_types=("granite",),
    traits=_traits,
    keys=frozenset(
        {
            "attention_bias",
            "attention_multiplier",
            "embedding_multiplier",
            "logits_scaling",
            "mlp_bias",
            "residual_multiplier",
        }
    ),
    defaults={
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "max_position_embeddings": 2048,
        "residual_multiplier": 1.0,
    },
)
