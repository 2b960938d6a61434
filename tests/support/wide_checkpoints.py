"""Random sharded Llama checkpoints of any size, written quickly."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_wide_checkpoint(
    folder: Path,
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_heads: int = 16,
    num_kv_heads: int = 8,
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
    outer = {
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
    for at, shapes in enumerate([*files, outer]):
        file = f"model-{at + 1:05}-of-{num_layers + 1:05}.safetensors"
        tensors = {f"{name}.weight": _random(shape) for name, shape in shapes.items()}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        size_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size_bytes


def _random(shape: tuple[int, ...]) -> Tensor:
    """Returns repeated random bits: fast to make, and without holes in the file."""
    count = torch.Size(shape).numel()
    run = torch.randn(min(count, 1 << 16)).mul_(0.02).bfloat16()
    return run.repeat(-(-count // run.numel()))[:count].reshape(shape)
