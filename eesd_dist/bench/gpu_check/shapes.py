"""The products and attention shapes of the bundled model and of Llama 8B and 70B (TP 8)."""

from collections.abc import Mapping
from dataclasses import dataclass

from eesd_dist.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Sizes of one rank's share of a layer and of the LM head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "Width":
        return cls(
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            vocab=spec.vocab_size,
        )

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Output and input channels of a layer's fused products."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "output": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "lm_head": (self.vocab, self.hidden),
        }

    @property
    def layer_weights(self) -> int:
        return sum(out * into for name, (out, into) in self.products.items() if name != "lm_head")

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden


LLAMA_8B = Width(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128_256)
LLAMA_70B_TP8 = Width(
    hidden=8192, heads=8, kv_heads=1, head_dim=128, intermediate=3584, vocab=16_032
)
LARGE: Mapping[str, Width] = {"Llama 8B": LLAMA_8B, "Llama 70B TP8": LLAMA_70B_TP8}
