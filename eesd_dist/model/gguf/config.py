"""The config.json of a GGUF file, and its tensors by their names in a checkpoint.

What is not computed is refused: other architectures, scaled positions, unknown settings and
tensors. Reads no weights.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import CheckpointError
from eesd_dist.model.gguf.header import Header, StoredTensor

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""Architecture and `model_type` in config.json; Mistral's files are of the first."""
_READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
)
_WITHOUT_EFFECT = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
_MAX_SIZE = 1 << 24
"""Bound of each number of layers, channels, heads, positions and tokens."""
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor under its name in the checkpoint."""

    name: str
    stored: StoredTensor
    num_heads: int | None
    """Number of heads in which neighbouring rows rotate together; None for other tensors. In a
    checkpoint a row and that half a head after it do."""


class _Settings:
    """Settings of the file's architecture."""

    def __init__(self, file: Path, header: Header) -> None:
        self._file = file
        self._metadata = header.metadata
        self.architecture = header.metadata.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise CheckpointError(
                file=file,
                found=f"general.architecture {self.architecture!r:.80}",
                expected=f"one of {', '.join(_ARCHITECTURES)}",
                advice="use the checkpoint in safetensors that it was converted from",
            )
        prefix = f"{self.architecture}."
        for name, content in header.metadata.items():
            key = name.removeprefix(prefix)
            is_computed = key in _READ or _WITHOUT_EFFECT.get(key) == content
            if name.startswith(prefix) and not is_computed and content:
                raise CheckpointError(
                    file=file,
                    found=f"{name} = {content!r:.80}",
                    expected="no such setting: it is not computed",
                    advice="use the checkpoint in safetensors that it was converted from",
                )

    def integer(self, key: str, default: int | None = None) -> int:
        content = self._metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(content, bool) or not isinstance(content, int) or not 0 < content < _MAX_SIZE:
            raise self._error(key, content, expected=f"an integer from 1 to {_MAX_SIZE - 1}")
        return content

    def number(self, key: str, default: float | None = None) -> float:
        content = self._metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(content, float) or not 0.0 < content < math.inf:
            raise self._error(key, content, expected="a positive number")
        return content

    def require_equal(self, key: str, number: int) -> None:
        if (content := self.integer(key, number)) != number:
            raise self._error(key, content, expected=f"{number}")

    def _error(self, key: str, content: object, *, expected: str) -> CheckpointError:
        return CheckpointError(
            file=self._file,
            found=f"{self.architecture}.{key} {content!r:.80}",
            expected=expected,
        )


def config_of(file: Path, header: Header, *, vocab_size: int) -> dict[str, object]:
    """Returns the content of config.json. `vocab_size`: the tokenizer's. Raises CheckpointError for
    an unsupported model."""
    settings = _Settings(file, header)
    hidden_size = settings.integer("embedding_length")
    num_heads = settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", max(hidden_size // num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        settings.require_equal(key, head_dim)
    settings.require_equal("vocab_size", vocab_size)
    architecture, model_type = _ARCHITECTURES[str(settings.architecture)]
    bias = "blk.0.attn_q.bias" in header.tensors
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": settings.integer("feed_forward_length"),
        "num_hidden_layers": settings.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": settings.integer("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": settings.number("rope.freq_base", 10_000.0),
        },
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **({"attention_bias": bias, "mlp_bias": False} if model_type == "llama" else {}),
    }


def named_tensors(file: Path, header: Header, config: Mapping[str, object]) -> list[NamedTensor]:
    """Returns the tensors in the order of the file. Raises CheckpointError for an unknown one."""
    tensors = []
    is_llama = config["model_type"] == "llama"
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    for stored in header.tensors.values():
        outer, _, kind = stored.name.rpartition(".")
        layer = _NAME.fullmatch(stored.name)
        num_heads = None
        if layer is not None and layer[2] in _IN_LAYER:
            name = f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"
            if is_llama and layer[2] in heads:
                num_heads = int(str(config[heads[layer[2]]]))
                if stored.shape[0] % (2 * num_heads):
                    raise CheckpointError(
                        file=file,
                        found=f"{stored.name} of shape {stored.shape}",
                        expected=f"{num_heads} heads of an even number of rows",
                    )
        elif kind == "weight" and outer in _OUTER:
            name = f"{_OUTER[outer]}.weight"
        else:
            raise CheckpointError(
                file=file,
                found=f"a tensor {stored.name:.80}",
                expected="tensors of a dense model with unscaled positions",
                advice="use the checkpoint in safetensors that it was converted from",
            )
        tensors.append(NamedTensor(name=name, stored=stored, num_heads=num_heads))
    return tensors
