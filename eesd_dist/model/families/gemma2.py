"""Gemma 2 (arXiv 2408.00118): four norms a layer, GELU, soft caps of scores and logits, a scaled
and tied embedding, a sliding window in every other layer."""

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.elementwise import GELU_TANH
from eesd_dist.model.families.family import Family, Norms, Scores, Traits
from eesd_dist.model.families.windows import window_in_every_other_layer

NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    weight_offset=1.0,
)


def _traits(fields: ConfigFields) -> Traits:
    if fields.get("hidden_activation") not in (None, GELU_TANH.name):
        raise fields.error("hidden_activation", expected=GELU_TANH.name)
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        norms=NORMS,
        activation=GELU_TANH,
        scores=Scores(
            scale=fields.positive("query_pre_attn_scalar") ** -0.5,
            softcap=fields.positive_or_null("attn_logit_softcapping"),
        ),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=fields.positive_or_null("final_logit_softcapping"),
    )


GEMMA2 = Family(
    model_types=("gemma2",),
    traits=_traits,
    windows=window_in_every_other_layer,
    keys=frozenset(
        {
            "attention_bias",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "hidden_activation",
            "query_pre_attn_scalar",
            "sliding_window",
            # In published files next to `sliding_window`; transformers never reads it.
            "sliding_window_size",
        }
    ),
    defaults={
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
)
