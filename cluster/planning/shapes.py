"""Inputs of the planner: dimensions of a model, its split, the load."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from cluster.planning.presets import SHAPES, ShapeName
from eesd_dist.errors import CheckpointError
from eesd_dist.model.degrees import kv_heads_of
from eesd_dist.model.positions import computed_positions
from eesd_dist.model.rank_memory import kv_bytes_per_token

_LARGEST = 10**8
"""Of a dimension in config.json: above it, the file is wrong."""


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
    num_ropes: int = 1
    """2 where layers with a sliding window rotate by other angles."""
    norms_heads_jointly: bool = False
    """A norm covers all heads of a row, so that one rank must have them."""
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

    @property
    def head_weights(self) -> int:
        """Weights of the LM head, and of the embedding."""
        return self.hidden_size * self.vocab_size

    @property
    def bytes_per_activation(self) -> int:
        """Of one number of a hidden state: the type of keys and values."""
        return self.bytes_per_kv

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
        return self.num_ropes * 8 * self.max_positions * self.head_dim // 2

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

    @property
    def num_ranks(self) -> int:
        return self.draft_tensor_parallel_size + self.verify_tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceAt:
    """The acceptance of a head at one exit layer."""

    exit_layer: int
    acceptance: float

    @classmethod
    def parse(cls, text: str) -> "AcceptanceAt":
        """Parses `4=0.8`. Raises ValueError."""
        layer, _, acceptance = text.partition("=")
        try:
            return cls(exit_layer=int(layer), acceptance=float(acceptance))
        except ValueError:
            raise ValueError(
                f"found {text!r:.40}, expected an exit layer and an acceptance, like 4=0.8"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests that are served at once."""

    num_requests: int = 1
    context_tokens: int = 1024
    acceptance: float = 0.8
    """Probability that a drafted token survives, given that those before it did."""
    survival: tuple[float, ...] = ()
    """Measured probability that the first i + 1 drafted tokens all survive; beyond it, and where it
    is empty, `acceptance` continues it."""
    max_draft_tokens: int = 8

    def expected_tokens(self, *, acceptance: float | None = None) -> tuple[float, ...]:
        """Returns the tokens per request and round for draft lengths 0, 1, ... up to the maximum.

        `acceptance`: replaces the measured survival too.
        """
        known = self.survival[: self.max_draft_tokens] if acceptance is None else ()
        rate = self.acceptance if acceptance is None else acceptance
        last = known[-1] if known else 1.0
        more = accumulate([rate] * (self.max_draft_tokens - len(known)), mul, initial=last)
        survival = [*known, *list(more)[1:]]
        # The verifier's token, and each drafted token times its survival.
        return tuple(accumulate(survival, initial=1.0))


def named_shape(name: ShapeName) -> ModelShape:
    """Returns the dimensions of a well-known model."""
    return _shape_of(SHAPES[name], file=name, on_cpu=False)


def read_shape(config: Path, *, on_cpu: bool = False) -> ModelShape:
    """Reads the config.json of a checkpoint; raises CheckpointError for a field that is missing or
    is no sensible number.

    On a CPU, matrices are as wide as on a GPU (16-bit weights are packed as float16), and keys and
    values are float32.
    """
    try:
        fields = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            file=config, found=str(error), expected="a checkpoint's config.json"
        ) from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            file=config, found=type(fields).__name__, expected="an object with a model's dimensions"
        )
    return _shape_of(fields, file=config, on_cpu=on_cpu)


def _shape_of(fields: Mapping[str, object], *, file: object, on_cpu: bool) -> ModelShape:
    read = _Dimensions(fields, file)
    num_heads, hidden_size = read.count("num_attention_heads"), read.count("hidden_size")
    num_kv_heads = read.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            file=file,
            found=f"{num_heads} attention heads and {num_kv_heads} key-value heads",
            expected="a multiple of the key-value heads",
        )
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            file=file,
            found=f"hidden_size {hidden_size}, {num_heads} attention heads and no head_dim",
            expected="head_dim, or a hidden_size that the heads share evenly",
        )
    wide = _bytes_per_weight(fields)
    return ModelShape(
        num_layers=read.count("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=read.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=read.count("head_dim", default=hidden_size // num_heads),
        vocab_size=read.count("vocab_size"),
        max_positions=computed_positions(fields, read.count("max_position_embeddings", default=0)),
        norms_heads_jointly=fields.get("model_type") == "olmo2",
        num_ropes=2 if fields.get("model_type") == "gemma3_text" else 1,
        bytes_per_weight=wide,
        bytes_per_kv=4 if on_cpu else wide,
    )


@dataclass(frozen=True, slots=True)
class _Dimensions:
    fields: Mapping[str, object]
    file: object

    def count(self, name: str, *, default: int | None = None) -> int:
        found = self.fields.get(name)
        if found is None and default is not None:
            return default
        if found is None:
            raise CheckpointError(
                file=self.file, found=f"no {name}", expected="the fields of a Llama-family decoder"
            )
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= _LARGEST:
            raise CheckpointError(
                file=self.file,
                found=f"{name} {found!r:.60}",
                expected=f"a whole number from 1 to {_LARGEST}",
            )
        return found


def _bytes_per_weight(fields: Mapping[str, object]) -> int:
    """Follows `model.dtype: auto`, if config.json names the type of the checkpoint."""
    said = str(fields.get("dtype") or fields.get("torch_dtype"))
    return 4 if said.removeprefix("torch.") == "float32" else 2
