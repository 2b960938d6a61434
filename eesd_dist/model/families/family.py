"""Declarations of a model family: traits of its layers, and how config.json expresses them.

A family is one module that fills in these tables; layers, spans and exit heads read traits and do
not refer to architectures by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.elementwise import SILU, Activation
from eesd_dist.model.families.windows import Windows, no_windows

RopeKeys = Callable[[Mapping[str, object], bool], Mapping[str, object]]
"""The file, and True for layers with a sliding window -> the keys about the rope of these layers,
as a file with one rope has them."""


def one_rope(config: Mapping[str, object], has_window: bool) -> Mapping[str, object]:
    """Gives all layers the rope of the file."""
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The norms of a layer, by their names in a checkpoint."""

    before_attention: str | None = "input_layernorm"
    """Norm of attention's input; None: not normed."""
    after_attention: str | None = None
    """Norm of attention's output before it is added to the row; None: not normed."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    weight_offset: float = 0.0
    """Added to every norm's weight, including the final norm's and those of heads: 1 where
    checkpoints store the difference from 1."""

    def names(self) -> dict[str, str]:
        """Maps the part of a layer's parameters to its name in the checkpoint."""
        names = {
            "attention_norm": self.before_attention,
            "attention_post_norm": self.after_attention,
            "mlp_norm": self.before_mlp,
            "mlp_post_norm": self.after_mlp,
        }
        return {parameter: name for parameter, name in names.items() if name is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Transformation of attention scores before the softmax."""

    scale: float | None = None
    """None: 1 / sqrt(channels of a head)."""
    softcap: float | None = None
    """Soft cap: scores are limited to (-softcap, softcap) by tanh; None: no cap."""


PLAIN_SCORES = Scores()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Differences between families in what a layer computes."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if every query and key head is normed."""
    joint_qk_norm: bool = False
    """True if, with `qk_norm`, all query heads are normed together, and so are all key heads."""
    norms: Norms = field(default_factory=Norms)
    activation: Activation = SILU
    scores: Scores = PLAIN_SCORES
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to a row."""
    logits_scale: float = 1.0
    """Factor of logits, the target's and an exit head's, before their soft cap."""
    logit_softcap: float | None = None
    """Soft cap of logits, the target's and an exit head's; None: no cap."""
    fused_projections: bool = False
    """A checkpoint has the rows of queries, keys and values in one matrix, `qkv_proj`, and those of
    gate and up in another, `gate_up_proj`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture, or several of the same arithmetic."""

    model_types: tuple[str, ...]
    """Allowed values of `model_type`: transformers chooses the class by it."""
    traits: Callable[[ConfigFields], Traits]
    windows: Windows = no_windows
    rope_keys: RopeKeys = one_rope
    keys: frozenset[str] = frozenset()
    """Keys of config.json in addition to those of every family. In other families they are unknown:
    transformers ignores an `attention_bias` in a Mistral, other engines may not."""
    has_partial_rotary: bool = False
    """`partial_rotary_factor` is computed: only the first channels of a head are rotated."""
    published_code: str | None = None
    """Class in `auto_map` of published checkpoints, which transformers has adopted since."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that config.json does not have, as in transformers."""
