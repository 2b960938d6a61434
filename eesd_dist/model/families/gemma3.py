"""Gemma 3, text (arXiv 2503.19786): the norms of Gemma 2, norms of heads, no soft caps. Most layers
have a sliding window and a rope of their own."""

from collections.abc import Mapping

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.elementwise import GELU_TANH
from eesd_dist.model.families.family import Family, Scores, Traits
from eesd_dist.model.families.gemma2 import NORMS
from eesd_dist.model.families.windows import window_in_all_but_every_nth_layer

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _traits(fields: ConfigFields) -> Traits:
    if fields.get("hidden_activation") not in (None, GELU_TANH.name):
        raise fields.error("hidden_activation", expected=GELU_TANH.name)
    ropes = fields.get("rope_parameters")
    if ropes and not (isinstance(ropes, Mapping) and set(ropes) <= {_FULL, _SLIDING}):
        raise fields.error("rope_parameters", expected=f"those of {_FULL} and {_SLIDING}")
    for rope in (
        fields.get("rope_scaling"),
        *(ropes.values() if isinstance(ropes, Mapping) else ()),
    ):
        if isinstance(rope, Mapping) and "long_factor" in rope:
            raise fields.error("rope_parameters", expected="the same factors for all lengths")
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norms=NORMS,
        activation=GELU_TANH,
        scores=Scores(scale=fields.positive("query_pre_attn_scalar") ** -0.5),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
    )


def _rope_keys(config: Mapping[str, object], has_window: bool) -> Mapping[str, object]:
    """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling` of layers without a
    window and `rope_local_base_freq` of the others."""
    ropes = config.get("rope_parameters")
    own = ropes.get(_SLIDING if has_window else _FULL) if isinstance(ropes, Mapping) else None
    scaling = None if has_window else config.get("rope_scaling")
    parameters = {
        **(own if isinstance(own, Mapping) else {}),
        **(scaling if isinstance(scaling, Mapping) else {}),
    }
    key, theta = ("rope_local_base_freq", 1e4) if has_window else ("rope_theta", 1e6)
    return {"rope_parameters": {"rope_theta": config.get(key) or theta, **parameters}}


GEMMA3 = Family(
    model_types=("gemma3_text",),
    traits=_traits,
    windows=window_in_all_but_every_nth_layer,
    rope_keys=_rope_keys,
    keys=frozenset(
        {
            "attention_bias",
            "hidden_activation",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window",
            "sliding_window_pattern",
            # As transformers writes it, next to the `layer_types` that follow from it.
            "_sliding_window_pattern",
        }
    ),
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
)
