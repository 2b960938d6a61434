"""A checkpoint with the dimensions of Llama 3.1 70B, few layers and no bytes on disk.

The files are holes after their headers: they have the full size and take no room. A hole reads as
zeros, and a rank copies and packs zeros into as much memory as other weights.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

HIDDEN, INTERMEDIATE, VOCABULARY = 8192, 28672, 128_256
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 8, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
_LAYER = {
    "self_attn.q_proj.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
    "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def write_70b_shape(folder: Path, *, num_layers: int) -> int:
    """Writes the checkpoint; returns the size of its files, which take no room."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    files = [
        {f"model.layers.{at}.{name}": shape for name, shape in _LAYER.items()}
        for at in range(num_layers)
    ]
    ends = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    files += [{name: shape} for name, shape in ends.items()] + [{"model.norm.weight": (HIDDEN,)}]
    weight_map, size = {}, 0
    for at, tensors in enumerate(files, start=1):
        name = f"model-{at:05}-of-{len(files):05}.safetensors"
        size += _write_sparse(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def write_head_of(folder: Path, config: Mapping[str, object]) -> None:
    """Writes an exit head of the same dimensions, with the target's LM head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    layer = {f"layers.0.{name}": shape for name, shape in _LAYER.items()}
    _write_sparse(folder / "model.safetensors", {**layer, "norm.weight": (HIDDEN,)})


def _write_sparse(file: Path, tensors: Mapping[str, tuple[int, ...]]) -> int:
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(content).to_bytes(8, "little") + content)
        opened.truncate(8 + len(content) + end)
    return file.stat().st_size
