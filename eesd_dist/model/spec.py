"""Reads a model's specification from a checkpoint's config.json.

Refuses models that would be computed wrongly, with file, found and expected. Differences between
architectures are in `families`. Reads no weights and does not depend on ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import CheckpointError
from eesd_dist.model.checkpoint_folder import quantized, require_checkpoint
from eesd_dist.model.config_fields import ConfigFields, read_json
from eesd_dist.model.config_keys import refuse_unread_keys
from eesd_dist.model.families import family_of
from eesd_dist.model.families.family import Traits
from eesd_dist.model.positions import num_positions
from eesd_dist.model.rope import RopeConfig, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Specification of one model's arithmetic."""

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
    """Positions that can be computed with: more than the key of this name where rope extends it."""
    tie_word_embeddings: bool
    traits: Traits
    """Differences of its family's layers from those of other families."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many of the last positions a row may see, including itself; None: all."""
    ropes: tuple[RopeSpec, ...]
    """Per layer. Layers rotate the same channels, by different angles."""
    eos_token_ids: tuple[int, ...]
    """End tokens from generation_config.json when it names any in the vocabulary, else from
    config.json."""

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_folder(cls, path: Path, *, ignored_keys: Collection[str] = ()) -> "ModelSpec":
        """Reads a folder. `ignored_keys` of config.json are not refused although they are unknown.
        Raises CheckpointError when the model is not supported."""
        require_checkpoint(path)
        config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        generation_config = read_json(generation) if generation.exists() else {}
        return cls.from_config(
            config,
            file=path / "config.json",
            generation=generation_config,
            ignored_keys=ignored_keys,
        )

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        *,
        file: Path,
        generation: Mapping[str, object] | None = None,
        ignored_keys: Collection[str] = (),
    ) -> "ModelSpec":
        architecture, family = family_of(config, file)
        fields = ConfigFields(config, file=file, defaults=family.defaults)
        traits = family.traits(fields)
        _refuse_what_we_do_not_compute(fields, traits)
        refuse_unread_keys(
            config,
            own=family.keys,
            published_code=family.published_code,
            what=architecture,
            file=file,
            ignored=ignored_keys,
        )
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        hidden_size = fields.integer("hidden_size")
        head_dim = fields.integer("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise CheckpointError(
                file=file,
                found=f"{num_heads} heads, {num_kv_heads} key-value heads, head_dim {head_dim}",
                expected="heads a multiple of key-value heads, and an even head_dim",
            )
        max_positions = fields.integer("max_position_embeddings", 32_768)
        num_layers = fields.integer("num_hidden_layers")
        vocab_size = fields.integer("vocab_size")
        windows = family.windows(fields, num_layers)
        ropes = {
            has_window: RopeConfig.read(
                family.rope_keys(config, has_window),
                head_dim=head_dim,
                max_positions=max_positions,
                may_be_partial=family.has_partial_rotary,
                file=file,
                ignored=ignored_keys,
            ).spec()
            for has_window in {window is not None for window in windows}
        }
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=num_positions(
                config, max_position_embeddings=max_positions, file=file
            ),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            traits=traits,
            sliding_windows=windows,
            ropes=tuple(ropes[window is not None] for window in windows),
            eos_token_ids=_token_ids((generation or {}).get("eos_token_id"), below=vocab_size)
            or _token_ids(config.get("eos_token_id"), below=vocab_size),
        )


def _refuse_what_we_do_not_compute(fields: ConfigFields, traits: Traits) -> None:
    if fields.get("hidden_act") not in (None, traits.activation.name):
        raise fields.error("hidden_act", expected=traits.activation.name)
    if (quantization := fields.get("quantization_config")) is not None:
        raise quantized(fields.file, quantization)


def _token_ids(value: object, *, below: int) -> tuple[int, ...]:
    """Returns the ids in the vocabulary; a tokenizer that is loaded reports the others."""
    ids = value if isinstance(value, list) else [value]
    return tuple(id_ for id_ in ids if isinstance(id_, int) and 0 <= id_ < below)
