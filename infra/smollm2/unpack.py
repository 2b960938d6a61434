"""Writes the checkpoint folder of SmolLM2's GGUF file, with config and tokenizer from FOLDER.

python infra/smollm2/unpack.py FILE.gguf FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "embed_tokens", "output_norm": "norm"}


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in GGUFReader(source).tensors:
        x = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        path = tensor.name.removesuffix(".weight").split(".")
        if path[0] != "blk":
            weights[f"model.{OTHERS[path[0]]}.weight"] = x.bfloat16()
            continue
        if (count := heads.get(path[2])) is not None:
            # llama.cpp rotates neighbouring channels, and Hugging Face the two halves of a head.
            x = x.view(count, -1, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)
        weights[f"model.layers.{path[1]}.{NAMES[path[2]]}.weight"] = x.bfloat16().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
