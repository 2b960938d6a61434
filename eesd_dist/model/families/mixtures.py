"""Recognizes mixtures of experts, which are refused by name: routers are not computed."""

from collections.abc import Mapping, Sequence

_NAMED = frozenset(
    {
        "DbrxForCausalLM",
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "MixtralForCausalLM",
        "Qwen3NextForCausalLM",
    }
)
"""Mixtures without `moe` in their names."""

_COUNTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")


def mixture_of_experts(names: Sequence[str], config: Mapping[str, object]) -> str | None:
    """Returns the first of the architectures that is a mixture of experts, by its name or by the
    number of experts in config.json; None if there is none."""
    counts = [config.get(key) for key in _COUNTS]
    has_experts = any(isinstance(count, int) and count > 1 for count in counts)
    return next(
        (name for name in names if has_experts or name in _NAMED or "moe" in name.lower()), None
    )
