"""What a model family declares: the traits its layers are built from, and how config.json says so.

A family is one module that fills in these tables; layers, spans and exit heads read traits and
know no architecture by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eesd_dist.model.config_fields import ConfigFields
from eesd_dist.model.elementwise import SILU, Activation
from eesd_dist.model.families.windows import Windows, no_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The norms of a layer, by their names in a checkpoint."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    """Over what attention adds to a row; None: added as it is."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    weight_offset: float = 0.0
    """Added to every norm's weight, the final one's too: 1 where checkpoints hold what a weight
    differs from 1."""

    def names(self) -> dict[str, str]:
        """Part of a layer's parameters to name in the checkpoint."""
        names = {
            "attention_norm": self.before_attention,
            "attention_post_norm": self.after_attention,
            "mlp_norm": self.before_mlp,
            "mlp_post_norm": self.after_mlp,
        }
        return {part: name for part, name in names.items() if name is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What becomes of the product of a query and a key before the softmax."""

    scale: float | None = None
    """None: 1 / sqrt(channels of a head)."""
    softcap: float | None = None
    """Scores are squeezed between this and its negative; None: they are not."""


PLAIN_SCORES = Scores()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a model computes, where families differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether every query and key head is normed."""
    norms: Norms = field(default_factory=Norms)
    activation: Activation = SILU
    scores: Scores = PLAIN_SCORES
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    """The same for logits, the target's and an exit head's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, or several of the same arithmetic."""

    model_types: tuple[str, ...]
    """What `model_type` may be: transformers chooses the class by it."""
    traits: Callable[[ConfigFields], Traits]
    windows: Windows = no_windows
    keys: frozenset[str] = frozenset()
    """Keys of config.json beyond those of every family. In the others they are unknown:
    transformers ignores an `attention_bias` in a Mistral, other engines may not."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Of keys that config.json does not name, as in transformers."""
