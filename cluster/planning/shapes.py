"""Inputs of the planner: dimensions of a model, its split, the load, the acceptance of drafts."""

from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from cluster.planning.presets import SHAPES, ShapeName
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
    num_ropes: int = 1
    """2 where layers with a sliding window rotate by other angles."""
    norms_heads_jointly: bool = False
    """A norm covers all heads of a row, so that one rank must have them."""
    bytes_per_weight: int = 2
    bytes_per_kv: int = 2
    """Bytes of one number of a key or a value: as of weights on a GPU, by a setting on a CPU."""
    bytes_per_activation: int = 2
    """Bytes of one number of a hidden state: as of weights on a GPU, 4 on a CPU."""

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

    shares_gpu: bool = False
    """The drafting actor holds verify rank 0 too: `placement.mode: shared`."""

    @property
    def num_gpus(self) -> int:
        num_ranks = self.draft_tensor_parallel_size + self.verify_tensor_parallel_size
        return num_ranks - self.shares_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests that are served at once."""

    num_requests: int = 1
    context_tokens: int = 1024
    max_draft_tokens: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Probability that the drafted tokens of one exit head are accepted."""

    rate: float
    """Probability that a drafted token survives, given that those before it did."""
    survival: tuple[float, ...] = ()
    """Measured probability that the first i + 1 drafted tokens all survive; beyond it, and where it
    is empty, `rate` continues it."""
    is_measured: bool = False

    def expected_tokens(self, max_draft_tokens: int) -> tuple[float, ...]:
        """Returns the tokens per request and round for draft lengths from 0 to the maximum."""
        measured = self.survival[:max_draft_tokens]
        last = measured[-1] if measured else 1.0
        more = accumulate([self.rate] * (max_draft_tokens - len(measured)), mul, initial=last)
        survival = [*measured, *list(more)[1:]]
        # The verifier's token, and each drafted token times its survival.
        return tuple(accumulate(survival, initial=1.0))


def named_shape(name: ShapeName) -> ModelShape:
    """Returns the dimensions of a well-known model."""
    return ModelShape(**SHAPES[name])


def on_cpu(shape: ModelShape, *, kv_bytes: int = 4) -> ModelShape:
    """Returns the shape on a CPU: hidden states are float32, and `kv_bytes` are those of one number
    of a key or a value."""
    return replace(shape, bytes_per_kv=kv_bytes, bytes_per_activation=4)
