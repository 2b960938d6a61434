"""Writes random checkpoints: small ones of every family, and a stack of wide layers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_SMALL: Mapping[str, object] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama 3 rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_theta": 500_000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral, window": {"model_type": "mistral", "sliding_window": 37},
    "qwen2, window above": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 29,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "sliding_window": 37},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 37,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
    },
    "olmo2": {"model_type": "olmo2"},
    "phi3, part of each head": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "sliding_window": 37,
        "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    },
}


Draw = Callable[[tuple[int, ...]], Tensor]
"""Shape -> weight, bfloat16, on the CPU."""


def write_small(folder: Path, family: str) -> Path:
    """Writes a bfloat16 model with transformers, with biases other than zero and norms other than
    one."""
    fields = {**_SMALL, **FAMILIES[family]}
    config = CONFIG_MAPPING[str(fields.pop("model_type"))](**fields)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw_biases_and_norms(model)
    model.bfloat16().save_pretrained(folder)
    return folder


@torch.no_grad()
def draw_biases_and_norms(model: nn.Module) -> None:
    """Randomizes biases and norms, which an initialised model has as zeros and ones."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.3)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)


def write_stack(
    folder: Path,
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_heads: int,
    num_kv_heads: int,
    draw: Draw,
) -> int:
    """Writes a bfloat16 Llama of any width, one file per layer and one for the other weights, so
    that it is never in memory as a whole. Returns its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    width_kv = hidden_size // num_heads * num_kv_heads
    layer = {
        "self_attn.q_proj": (hidden_size, hidden_size),
        "self_attn.k_proj": (width_kv, hidden_size),
        "self_attn.v_proj": (width_kv, hidden_size),
        "self_attn.o_proj": (hidden_size, hidden_size),
        "mlp.gate_proj": (intermediate_size, hidden_size),
        "mlp.up_proj": (intermediate_size, hidden_size),
        "mlp.down_proj": (hidden_size, intermediate_size),
        "input_layernorm": (hidden_size,),
        "post_attention_layernorm": (hidden_size,),
    }
    around = {
        "model.embed_tokens": (vocab_size, hidden_size),
        "model.norm": (hidden_size,),
        "lm_head": (vocab_size, hidden_size),
    }
    files: list[dict[str, tuple[int, ...]]] = [
        {f"model.layers.{at}.{name}": shape for name, shape in layer.items()}
        for at in range(num_layers)
    ]
    weight_map: dict[str, str] = {}
    size_bytes = 0
    for at, shapes in enumerate([*files, around]):
        file = f"model-{at + 1:05}-of-{num_layers + 1:05}.safetensors"
        tensors = {f"{name}.weight": draw(shape) for name, shape in shapes.items()}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        size_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size_bytes


def drawn_on(device: torch.device) -> Draw:
    """Draws norms of one, and matrices that keep the magnitude of their input."""
    generator = torch.Generator(device).manual_seed(20261122)

    def draw(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.mul_(shape[1] ** -0.5).cpu()

    return draw
