"""Random checkpoints of every family, written by transformers: real files, nothing downloaded."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SIZES: Mapping[str, object] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
THETA = {"rope_theta": 10_000.0}

FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama": {"model_type": "llama"},
    "llama, one KV head per head": {"model_type": "llama", "num_key_value_heads": 4},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, linear rope": {
        "model_type": "llama",
        "rope_parameters": {**THETA, "rope_type": "linear", "factor": 2.5},
    },
    "llama, dynamic rope": {
        "model_type": "llama",
        "rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 2.0},
    },
    "llama 3": {
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
    "llama, yarn": {
        "model_type": "llama",
        "rope_parameters": {
            **THETA,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3, yarn with its own scaling": {
        "model_type": "qwen3",
        "rope_parameters": {
            **THETA,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 21},
    "ministral, a window in some layers": {
        "model_type": "ministral",
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, window in the upper layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 19,
        "max_window_layers": 2,
    },
    "qwen2, a window in some layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 19,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3, window in the upper layers": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 19,
        "max_window_layers": 1,
    },
    "qwen3, a window in some layers": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 19,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 21,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 1.6,
        "residual_multiplier": 0.7,
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 21},
    "phi3, longrope in a part of each head": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            **THETA,
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 3.1],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0],
        },
    },
    "llama, longrope": {
        "model_type": "llama",
        "rope_parameters": {
            **THETA,
            "rope_type": "longrope",
            "factor": 2.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.2, 3.1],
            "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 7.0, 9.0],
        },
    },
}


def tiny_model(family: str, **sizes: object) -> PreTrainedModel:
    """Returns a random float32 model in which no bias is zero and no norm is one."""
    fields = {**SIZES, **FAMILIES[family], **sizes}
    config = CONFIG_MAPPING[str(fields.pop("model_type"))](**fields)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw_biases_and_norms(model)
    return model


@torch.no_grad()
def draw_biases_and_norms(model: nn.Module) -> None:
    """Randomizes biases and norms, which an initialised model has as zeros and ones."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.3)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)


def save_tiny_model(
    folder: Path, family: str = "llama", *, max_shard_size: str = "5GB", **sizes: object
) -> PreTrainedModel:
    model = tiny_model(family, **sizes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
