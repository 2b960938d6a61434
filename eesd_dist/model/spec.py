"""What a checkpoint's config.json says the model is.

Decides which architectures we run and how their differences are named; refuses, with file, found
and expected, whatever we would compute wrongly. Reads no weights and knows no ranks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import CheckpointError
from eesd_dist.model.config_keys import refuse_unread_keys
from eesd_dist.model.rope import RopeConfig, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where one architecture differs from the next; defaults as in transformers."""

    model_types: tuple[str, ...]
    """What `model_type` may be: transformers chooses the class by it."""
    qkv_bias: bool | None = None
    """None: the config's `attention_bias` decides."""
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    num_kv_heads: int | None = None
    """When the config does not say; None means as many as query heads."""
    head_dim: int | None = None
    max_position_embeddings: int = 32_768
    sliding_window: int | None = None
    """When the config does not say."""
    window_is_optional: bool = False
    """`use_sliding_window` switches it on, `max_window_layers` says from which layer."""


_MISTRAL = Family(
    model_types=("mistral", "ministral"),
    qkv_bias=False,
    output_bias=False,
    num_kv_heads=8,
    max_position_embeddings=131_072,
    sliding_window=4096,
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(model_types=("llama",), mlp_bias=None, max_position_embeddings=2048),
    "MistralForCausalLM": _MISTRAL,
    # The same arithmetic. transformers reads `layer_types` in this class only; checkpoints of it
    # name either.
    "MinistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": Family(
        model_types=("qwen2",),
        qkv_bias=True,
        output_bias=False,
        sliding_window=4096,
        window_is_optional=True,
    ),
    "Qwen3ForCausalLM": Family(
        model_types=("qwen3",),
        qk_norm=True,
        head_dim=128,
        sliding_window=4096,
        window_is_optional=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the Llama family, as far as its arithmetic goes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many of the last positions a row may see, itself included; None: all."""
    rope: RopeSpec
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From generation_config.json when it names any, else from config.json."""

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_folder(cls, path: Path) -> "ModelSpec":
        """Raises CheckpointError when this is not a model we compute correctly."""
        config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        generation_config = read_json(generation) if generation.exists() else {}
        return cls.from_config(config, file=path / "config.json", generation=generation_config)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        *,
        file: Path,
        generation: Mapping[str, object] | None = None,
    ) -> "ModelSpec":
        architecture, family = _family(config, file)
        fields = _Fields(config, file)
        _refuse_what_we_do_not_compute(fields)
        refuse_unread_keys(config, architecture=architecture, file=file)
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", family.num_kv_heads or num_heads)
        hidden_size = fields.integer("hidden_size")
        head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise CheckpointError(
                file=file,
                found=f"{num_heads} heads, {num_kv_heads} key-value heads, head_dim {head_dim}",
                expected="heads a multiple of key-value heads, and an even head_dim",
            )
        max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
        num_layers = fields.integer("num_hidden_layers")
        attention_bias = fields.flag("attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=fields.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(fields, family, num_layers),
            rope=RopeConfig.read(
                config, head_dim=head_dim, max_positions=max_positions, file=file
            ).spec(),
            bos_token_id=fields.optional_integer("bos_token_id"),
            eos_token_ids=_token_ids((generation or {}).get("eos_token_id"))
            or _token_ids(config.get("eos_token_id")),
        )


def read_json(file: Path) -> dict[str, object]:
    """One JSON object, or a CheckpointError that names the file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(file=file, found="no such file", expected="a JSON object") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(file=file, found=str(error), expected="a JSON object") from error
    if not isinstance(found, dict):
        raise CheckpointError(file=file, found=type(found).__name__, expected="a JSON object")
    return found


class _Fields:
    """Typed reading of one config; a null counts as absent."""

    def __init__(self, config: Mapping[str, object], file: Path) -> None:
        self._config = config
        self.file = file

    def get(self, key: str) -> object:
        return self._config.get(key)

    def says_null(self, key: str) -> bool:
        return key in self._config and self._config[key] is None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, expected="a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self._config.get(key)
        return value if isinstance(value, int) else None

    def number(self, key: str, default: float) -> float:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise self.error(key, expected="a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key) or False
        if not isinstance(value, bool):
            raise self.error(key, expected="true or false")
        return value

    def error(self, key: str, *, expected: str) -> CheckpointError:
        return CheckpointError(
            file=self.file, found=f"{key} = {self._config.get(key)!r}", expected=expected
        )


def _family(config: Mapping[str, object], file: Path) -> tuple[str, Family]:
    listed = config.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    name = next((name for name in names if name in FAMILIES), None)
    if name is None:
        raise CheckpointError(
            file=file,
            found=f"architectures {names}",
            expected=f"one of {', '.join(FAMILIES)}",
        )
    family, model_type = FAMILIES[name], config.get("model_type")
    if model_type is not None and model_type not in family.model_types:
        raise CheckpointError(
            file=file,
            found=f"model_type = {model_type!r} beside architecture {name}",
            expected=f"{' or '.join(family.model_types)}, or another architecture",
        )
    return name, family


def _refuse_what_we_do_not_compute(fields: _Fields) -> None:
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", expected="silu")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", expected="plain float weights")


def _sliding_windows(fields: _Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = _window(fields, family)
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        return _windows_by_type(fields, layer_types, window, num_layers)
    first = 0
    if family.window_is_optional:
        given = fields.optional_integer("max_window_layers")
        first = 28 if given is None else given
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _window(fields: _Fields, family: Family) -> int | None:
    if family.sliding_window is None or fields.says_null("sliding_window"):
        return None
    if family.window_is_optional and not fields.flag("use_sliding_window"):
        return None
    return fields.integer("sliding_window", family.sliding_window)


def _windows_by_type(
    fields: _Fields, layer_types: object, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """`attention` is an older word for full attention."""
    known = {"full_attention": None, "attention": None, "sliding_attention": window}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or not all(isinstance(kind, str) and kind in known for kind in layer_types)
    ):
        raise fields.error(
            "layer_types", expected=f"{num_layers} of full_attention, sliding_attention"
        )
    if window is None and "sliding_attention" in layer_types:
        raise fields.error("layer_types", expected="full_attention alone, for want of a window")
    return tuple(known[str(kind)] for kind in layer_types)


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(int(token) for token in value)
    return ()
