"""The models of a run: given folders, and random models that are written.

A random model has an odd shape and random weights; its later layers add so little that an exit
head, which is the target's last layer and LM head with noise, is often but not always right.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eesd_dist.control.calibrator import Calibrator
from eesd_dist.errors import ConfigError
from eesd_dist.model.families import FAMILIES
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.layers.layer import LayerWeights
from eesd_dist.model.parallel import Shard
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import Shapes

_RANDOM = "random"
HEAD_KINDS: tuple[HeadKind, ...] = ("shared", "own", "truncated")


Config = Mapping[str, Any]


def _upper_windows(rng: Random, config: Config) -> dict[str, Any]:
    return {
        "use_sliding_window": rng.random() < 0.5,
        "sliding_window": rng.choice((11, 19, 33)),
        "max_window_layers": rng.randint(0, config["num_hidden_layers"]),
    }


def _part_of_each_head(rng: Random, config: Config) -> dict[str, Any]:
    """Draws a longrope with equal factors for short and long texts, or none."""
    num_pairs = config["head_dim"] // 2
    rotated = rng.randint(-(-num_pairs // 2), num_pairs)
    rope = {"rope_theta": 10_000.0, "partial_rotary_factor": rotated / num_pairs}
    positions = {"original_max_position_embeddings": config["max_position_embeddings"] // 4}
    if rng.random() < 0.5:
        factors = [rng.uniform(1.0, 8.0) for _ in range(rotated)]
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    window = {"sliding_window": rng.choice((None, 9, 21, 40))}
    return {"rope_parameters": rope, **positions, **window}


_OWN_KEYS: Mapping[str, Callable[[Random, Config], dict[str, Any]]] = {
    "llama": lambda rng, config: {
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
    },
    "mistral": lambda rng, config: {"sliding_window": rng.choice((None, 9, 21, 40))},
    "qwen2": _upper_windows,
    "qwen3": lambda rng, config: {
        **_upper_windows(rng, config),
        "attention_bias": rng.random() < 0.3,
    },
    "gemma2": lambda rng, config: {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": rng.choice((9, 21, 40)),
        "query_pre_attn_scalar": rng.choice((4, 24, 144)),
        "attn_logit_softcapping": rng.choice((None, 2.0, 8.0, 50.0)),
        "final_logit_softcapping": rng.choice((None, 5.0, 9.0, 30.0)),
    },
    "gemma3_text": lambda rng, config: {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": rng.choice((9, 21, 40)),
        "sliding_window_pattern": rng.choice((1, 2, 3, 6)),
        "query_pre_attn_scalar": rng.choice((4, 24, 144)),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_theta": 10_000.0},
        },
    },
    "granite": lambda rng, config: {
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
        "attention_multiplier": rng.choice((0.0625, 0.4)),
        "embedding_multiplier": rng.choice((1.0, 3.0, 12.0)),
        "logits_scaling": rng.choice((0.3, 1.0, 2.0)),
        "residual_multiplier": rng.choice((0.22, 0.7, 1.0)),
    },
    "olmo2": lambda rng, config: {"attention_bias": rng.random() < 0.3},
    "phi3": _part_of_each_head,
}
"""Keys of a model's config in addition to those of every family, by `model_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that engines are drawn for."""

    name: str
    """A folder, or `random:SEED:NUMBER`."""
    spec: ModelSpec
    heads: tuple[str | None, ...]
    """Exit heads that it may draft with; None: the head in its folder, if any."""


class ModelShelf:
    """Finds models by name; a random one is written below `scratch` on first use."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def folder(self, name: str) -> Path:
        """Returns a model's folder. Raises ConfigError for an unknown name."""
        if not name.startswith(f"{_RANDOM}:"):
            return Path(name)
        try:
            seed, number = (int(field) for field in name.split(":")[1:])
        except ValueError:
            raise ConfigError(f"{name}: expected a folder, or random:SEED:NUMBER") from None
        folder = self._scratch / f"{_RANDOM}-{seed}-{number}"
        if not (folder / "config.json").exists():
            write_random_model(folder, Random(f"{seed}/model/{number}"))
        return folder

    def named(self, folder: Path, *, head: Path | None) -> KnownModel:
        # Joining a folder with an absolute path gives the absolute path.
        return KnownModel(
            name=str(folder.resolve()),
            spec=ModelSpec.from_folder(folder),
            heads=(None if head is None else str(head.resolve()),),
        )

    def random(self, seed: int, number: int) -> KnownModel:
        name = f"{_RANDOM}:{seed}:{number}"
        folder = self.folder(name)
        return KnownModel(
            name=name,
            spec=ModelSpec.from_folder(folder),
            heads=tuple(f"heads/{kind}" for kind in HEAD_KINDS),
        )


def write_random_model(folder: Path, rng: Random) -> None:
    """Writes a checkpoint of one of the families, with an exit head of each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    config = random_config(rng)
    file = folder / "config.json"
    spec = ModelSpec.from_config(config, file=file)
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    deep_scale, first_deep = rng.uniform(0.05, 0.5), rng.randint(1, spec.num_layers - 1)
    tensors = _weights(spec, generator, deep_scale=deep_scale, first_deep=first_deep)
    stored = rng.choice((torch.float32, torch.bfloat16))
    save_file(
        {name: x.to(stored).contiguous() for name, x in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    file.write_text(json.dumps(config, indent=1))
    for kind in HEAD_KINDS:
        _write_head(folder, spec, kind, rng, generator, first_deep=first_deep)


def random_config(rng: Random) -> dict[str, Any]:
    """Draws a config.json that `ModelSpec` supports."""
    model_type = rng.choice(tuple(_OWN_KEYS))
    kv_heads = rng.choice((1, 2, 2, 3, 4, 4))
    positions = rng.choice((96, 131, 200, 256, 384))
    config: dict[str, Any] = {
        "architectures": [_architecture_of(model_type)],
        "model_type": model_type,
        "num_hidden_layers": rng.choice((2, 3, 4, 5, 7)),
        "hidden_size": rng.choice((24, 40, 52, 64, 72, 90)),
        # Often a multiple of the possible numbers of ranks.
        "intermediate_size": rng.choice((12, 12, 12, 1)) * rng.randint(3, 9),
        "num_attention_heads": kv_heads * rng.choice((1, 1, 2, 3, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((4, 6, 8, 10, 14, 16, 24, 32)),
        "vocab_size": rng.choice((67, 96, 101, 131, 200, 257, 331)),
        "max_position_embeddings": positions,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "hidden_act": "silu",
        "tie_word_embeddings": rng.random() < 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": _rope(rng, positions=positions),
    }
    return config | _OWN_KEYS[model_type](rng, config)


def _architecture_of(model_type: str) -> str:
    return next(name for name, family in FAMILIES.items() if model_type in family.model_types)


def _rope(rng: Random, *, positions: int) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice((10_000.0, 500_000.0))}
    kind = rng.choice(("default", "default", "linear", "llama3", "yarn"))
    original = {"original_max_position_embeddings": positions // 4}
    match kind:
        case "linear":
            return theta | {"rope_type": kind, "factor": 2.5}
        case "llama3":
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return theta | original | bounds | {"rope_type": kind, "factor": 8.0}
        case "yarn":
            return theta | original | {"rope_type": kind, "factor": 4.0}
        case _:
            return theta | {"rope_type": kind}


def _weights(
    spec: ModelSpec, generator: torch.Generator, *, deep_scale: float, first_deep: int
) -> dict[str, Tensor]:
    """Draws weights by their names in a Hugging Face checkpoint, with biases other than zero and
    norms other than one."""

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    norms = spec.traits.norms

    def norm(size: int, *, scale: float = 1.0) -> Tensor:
        return (torch.rand(size, generator=generator) + 0.5) * scale - norms.weight_offset

    width, std = spec.hidden_size, 1.2 / math.sqrt(spec.hidden_size)
    layer = _tensors_of_a_layer(spec)
    last = {norms.after_attention or "self_attn.o_proj", norms.after_mlp or "mlp.down_proj"}
    tensors = {
        "model.embed_tokens.weight": normal(spec.vocab_size, width, std=std),
        "model.norm.weight": norm(width),
    }
    if not spec.tie_word_embeddings:
        tensors["lm_head.weight"] = normal(spec.vocab_size, width, std=std)
    for at in range(spec.num_layers):
        for name, shape in layer.items():
            module = name.rpartition(".")[0]
            scale = deep_scale if module in last and at >= first_deep else 1.0
            if "norm" in name:
                drawn = norm(*shape, scale=scale)
            else:
                drawn = normal(*shape, std=scale * (0.3 if name.endswith("bias") else std))
            tensors[f"model.layers.{at}.{name}"] = drawn
    return tensors


def _tensors_of_a_layer(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes by name: each matrix and its bias, then the norms."""
    shapes = Shapes()
    LayerWeights.read(shapes, "", spec, Shard.of(spec, rank=0, size=1), torch.float32)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in shapes.of))
    names = sorted(
        shapes.of, key=lambda name: ("norm" in name, modules.index(name.rpartition(".")[0]))
    )
    return {name: shapes.of[name] for name in names}


def _write_head(
    folder: Path,
    spec: ModelSpec,
    kind: HeadKind,
    rng: Random,
    generator: torch.Generator,
    *,
    first_deep: int,
) -> None:
    num_tokens = max(8, int(spec.vocab_size * rng.uniform(0.3, 0.95)))
    head = TrainableExitHead.from_target(
        folder,
        spec,
        first_deep,
        head=kind,
        draft_vocab=rng.sample(range(spec.vocab_size), num_tokens) if kind == "truncated" else None,
    )
    with torch.no_grad():
        if kind != "shared":
            noise = torch.randn(head.lm_head_VD.shape, generator=generator)
            head.lm_head_VD.add_(rng.uniform(0.0, 0.6) * head.lm_head_VD.std() * noise)
    head.save(folder / "heads" / kind, dtype="float32")
    own_rng = Random(f"{kind}/{num_tokens}/{first_deep}")
    if own_rng.random() < 0.6:  # controllers decide in advance by calibrated heads
        _random_calibrator(own_rng).save(folder / "heads" / kind)


def _random_calibrator(rng: Random) -> Calibrator:
    return Calibrator(
        log_gap=rng.uniform(0.5, 2.0),
        depth=rng.uniform(-0.2, 0.0),
        temperature=rng.uniform(-0.5, 0.2),
        bias=rng.uniform(-2.0, 1.0),
        logit_top1=0.0,
        num_judged=1,
    )
