"""Inputs of the planner: dimensions of a model, its split, the load and the machine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd_dist.errors import CheckpointError
from eesd_dist.model.degrees import kv_heads_of
from eesd_dist.model.rank_memory import kv_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a Llama-family decoder that determine the bytes per token."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 0
    bytes_per_weight: int = 2
    bytes_per_kv: int = 2
    """Of one number of a key or a value: as of weights on a GPU, 4 on a CPU."""

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer: q, k, v, o and the three matrices of the gated MLP."""
        return self.layer_weights_of(1)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in one layer."""
        return self.kv_bytes_per_token_of(1)

    def layer_weights_of(self, num_ranks: int) -> int:
        """Weights of one decoder layer in each of so many ranks, which may share a KV head."""
        shared = 2 * self.num_heads * self.head_dim + 3 * self.intermediate_size
        own = 2 * self.head_dim * self._kv_heads_of(num_ranks)
        return self.hidden_size * (shared // num_ranks + own)

    def kv_bytes_per_token_of(self, num_ranks: int) -> int:
        """Keys and values of one position in one layer in each of so many ranks."""
        return kv_bytes_per_token(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_ranks=num_ranks,
            bytes_per_value=self.bytes_per_kv,
        )

    @property
    def table_bytes(self) -> int:
        """The rotations of all positions, complex64; each rank has them once for its layers and
        once for an exit head."""
        return 8 * self.max_positions * self.head_dim // 2

    def _kv_heads_of(self, num_ranks: int) -> int:
        return len(kv_heads_of(0, num_ranks, num_kv_heads=self.num_kv_heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The exit layer, and the number of ranks of each stage."""

    exit_layer: int
    draft_tensor_parallel_size: int = 1
    verify_tensor_parallel_size: int = 1
    draft_vocab_size: int | None = None
    """Rows in the LM head of a truncated exit head; None: the full vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests that are served at once."""

    num_requests: int = 1
    context_tokens: int = 1024
    acceptance: float = 0.8
    """Probability that a drafted token survives, given that those before it did."""
    max_draft_tokens: int = 8

    @property
    def num_microbatches(self) -> int:
        """Two as soon as there are two requests."""
        return min(2, self.num_requests)

    @property
    def microbatch_size(self) -> int:
        return -(-self.num_requests // self.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU and its links."""

    memory_bytes_per_s: float = 3.35e12
    flops_per_s: float = 9.9e14
    efficiency: float = 1.0
    """Share of both peaks that kernels reach."""
    link_latency_s: float = 20e-6
    """One way, draft stage to verify stage."""
    link_bytes_per_s: float = 25e9
    draft_all_reduce_s: float = 0.0
    """One all-reduce of a few rows among the draft ranks; there are two in a layer."""
    verify_all_reduce_s: float = 0.0
    """The same among the verify ranks; slow when they are on several nodes."""


def read_shape(config: Path, *, on_cpu: bool = False) -> ModelShape:
    """Reads the config.json of a checkpoint; raises CheckpointError if a field is missing.

    On a CPU, matrices are as wide as on a GPU (16-bit weights are packed as float16), and keys and
    values are float32.
    """
    try:
        fields: dict[str, Any] = json.loads(config.read_text())
        num_heads = int(fields["num_attention_heads"])
        hidden_size = int(fields["hidden_size"])
        return ModelShape(
            num_layers=int(fields["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(fields["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or num_heads),
            head_dim=int(fields.get("head_dim") or hidden_size // num_heads),
            vocab_size=int(fields["vocab_size"]),
            max_positions=int(fields.get("max_position_embeddings") or 0),
            bytes_per_weight=_bytes_per_weight(fields),
            bytes_per_kv=4 if on_cpu else _bytes_per_weight(fields),
        )
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            file=config, found=str(error), expected="a checkpoint's config.json"
        ) from error
    except KeyError as error:
        raise CheckpointError(
            file=config, found=f"no {error}", expected="the fields of a Llama-family decoder"
        ) from error


def _bytes_per_weight(fields: dict[str, Any]) -> int:
    """Follows `model.dtype: auto`, if config.json names the type of the checkpoint."""
    said = str(fields.get("dtype") or fields.get("torch_dtype"))
    return 4 if said.removeprefix("torch.") == "float32" else 2
