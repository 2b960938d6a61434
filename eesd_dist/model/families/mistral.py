"""Mistral and Ministral: Llama without biases, with sliding windows.

Both compute the same. transformers reads `layer_types` in Ministral's class only; Ministral
checkpoints name either class.
"""

from eesd_dist.model.families.family import Family, Traits
from eesd_dist.model.families.windows import window_in_every_layer

MISTRAL = Family(
    model_types=("mistral", "ministral"),
    traits=lambda fields: Traits(),
    windows=window_in_every_layer,
    keys=frozenset({"sliding_window"}),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
)
