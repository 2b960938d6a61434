"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused projections, longrope, rotations of a part
of each head, and a sliding window."""

from collections.abc import Mapping

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.families.family import Family, Traits
from eesd_dist.model.families.windows import window_in_every_layer_if_set

_ROPE_TYPES = (None, "default", "longrope", "su")


def _traits(fields: ConfigFields) -> Traits:
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.get(key)
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
        if kind not in _ROPE_TYPES:
            raise fields.error(key, expected="rope type default or longrope")
        if kind in ("longrope", "su"):
            fields.integer("original_max_position_embeddings")
    return Traits(fused_projections=True)


PHI3 = Family(
    model_types=("phi3",),
    traits=_traits,
    windows=window_in_every_layer_if_set,
    keys=frozenset({"sliding_window"}),
    has_partial_rotary=True,
    published_code="modeling_phi3.Phi3ForCausalLM",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
