"""Products and attention of the checked model, and of Llama 8B and 70B (TP 8)."""

from dataclasses import dataclass
from pathlib import Path

from eesd_dist.model.heads.head_config import HeadConfig
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
    draft_vocab: int | None = None
    """Rows of the exit head's LM head, where it has one."""

    @classmethod
    def of(cls, model: Path) -> "Width":
        spec = ModelSpec.from_folder(model)
        draft_vocab = None
        if (folder := model / "exit_head").is_dir():
            draft_vocab = HeadConfig.read(folder, target=spec, target_path=model).draft_vocab_size
        return cls(
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            vocab=spec.vocab_size,
            draft_vocab=draft_vocab,
        )

    @property
    def layer_products(self) -> dict[str, tuple[int, int]]:
        """Output and input channels of a layer's fused products."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "output": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        heads = {"lm_head": self.vocab} | (
            {"draft_head": self.draft_vocab} if self.draft_vocab else {}
        )
        return self.layer_products | {name: (rows, self.hidden) for name, rows in heads.items()}

    @property
    def layer_weights(self) -> int:
        return sum(num_out * num_in for num_out, num_in in self.layer_products.values())


LLAMA_8B = Width(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128_256)
LLAMA_70B_TP8 = Width(
    hidden=8192, heads=8, kv_heads=1, head_dim=128, intermediate=3584, vocab=16_032
)
