"""Model families: one module per family for its differences, and the registry."""

from collections.abc import Mapping
from pathlib import Path

from eesd_dist.errors import CheckpointError
from eesd_dist.model.families.family import Family
from eesd_dist.model.families.gemma2 import GEMMA2
from eesd_dist.model.families.gemma3 import GEMMA3
from eesd_dist.model.families.granite import GRANITE
from eesd_dist.model.families.llama import LLAMA
from eesd_dist.model.families.mistral import MISTRAL
from eesd_dist.model.families.mixtures import mixture_of_experts
from eesd_dist.model.families.olmo2 import OLMO2
from eesd_dist.model.families.phi3 import PHI3
from eesd_dist.model.families.qwen2 import QWEN2
from eesd_dist.model.families.qwen3 import QWEN3

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MinistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "GraniteForCausalLM": GRANITE,
    "Olmo2ForCausalLM": OLMO2,
    "Phi3ForCausalLM": PHI3,
}


def family_of(config: Mapping[str, object], file: Path) -> tuple[str, Family]:
    """Returns the architecture in config.json and its family.

    Raises CheckpointError for an unknown architecture, a mixture of experts by name, or a
    `model_type` of another family.
    """
    listed = config.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    name = next((name for name in names if name in FAMILIES), None)
    if name is None:
        mixture = mixture_of_experts(names, config)
        if mixture is not None:
            raise CheckpointError(
                file=file,
                found=f"{mixture}, which is a mixture of experts",
                expected=f"a dense model, one of {', '.join(FAMILIES)}",
                advice="choose a dense model: routers and experts are not computed",
            )
        raise CheckpointError(
            file=file,
            found=f"architectures {names}",
            expected=f"one of {', '.join(FAMILIES)}",
        )
    family, model_type = FAMILIES[name], config.get("model_type")
    if model_type is not None and model_type not in family.model_types:
        raise CheckpointError(
            file=file,
            found=f"model_type = {model_type!r} with architecture {name}",
            expected=f"{' or '.join(family.model_types)}, or another architecture",
        )
    return name, family
