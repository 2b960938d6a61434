"""Tiny GGUF files, written by the `gguf` package: a Llama or Qwen with a byte-level tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.support.tiny_tokenizer import CHAT_TEMPLATE, write_byte_level

SIZES: Mapping[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
"""Rows of 256 channels: a block of Q4_K and Q6_K."""
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_tiny_gguf(
    file: Path,
    type_: str = "F32",
    *,
    model_type: str = "llama",
    tied: bool = True,
    metadata: Mapping[str, int | float | str] | None = None,
    extra_tensors: Mapping[str, torch.Tensor] | None = None,
) -> torch.nn.Module:
    """Writes matrices of this type, and vectors in float32; returns the model in float32."""
    scratch = file.parent / f"{file.stem}.parts"
    tokenizer = json.loads((write_byte_level(scratch) / "tokenizer.json").read_text())
    vocabulary = {**tokenizer["model"]["vocab"]}
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        **{**SIZES, "vocab_size": len(tokens), "tie_word_embeddings": tied}
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    writer = GGUFWriter(file, model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if model_type.startswith("qwen") else "gpt-2")
    writer.add_token_list(tokens)
    specials = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_types([3 if token in specials else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, content in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(content)](key, content)  # type: ignore[operator]
    state = {name: x for name, x in model.state_dict().items() if not (tied and "lm_head" in name)}
    for name, x in state.items():
        stored, stored_type = _stored(_permuted(name, x, config), type_)
        writer.add_tensor(_name(name), stored, raw_dtype=GGMLQuantizationType[stored_type])
    for name, x in (extra_tensors or {}).items():
        writer.add_tensor(name, x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, *path, kind = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(path)]}.{kind}"


def _permuted(name: str, x: torch.Tensor, config: object) -> torch.Tensor:
    """Returns rows of queries and keys as llama.cpp's converter orders those of a Llama."""
    if config.model_type != "llama" or (".q_proj" not in name and ".k_proj" not in name):  # type: ignore[attr-defined]
        return x
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads  # type: ignore[attr-defined]
    return x.reshape(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _stored(x: torch.Tensor, type_: str) -> tuple[np.ndarray, str]:
    """Returns the content in this type, and its name; random blocks where `gguf` has no writer."""
    if x.ndim == 1 or type_ == "F32":
        return x.numpy(), "F32"
    qtype = GGMLQuantizationType[type_]
    if type_ not in ("Q4_K", "Q6_K"):
        return quantize(x.numpy(), qtype), type_
    size, block_bytes = GGML_QUANT_SIZES[qtype]
    rows, columns = x.shape
    blocks = np.random.default_rng(rows).integers(
        0, 256, (rows, columns // size, block_bytes), dtype=np.uint8
    )
    scale = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
    if type_ == "Q4_K":
        blocks[..., :2], blocks[..., 2:4] = scale, scale
    else:
        blocks[..., -2:] = scale
    return blocks.reshape(rows, -1), type_
