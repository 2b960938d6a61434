"""The number of positions that a config.json gives a model, derived as vLLM derives it.

The least of the keys that mean a length, times the factor of a rope type that extends the positions
with it. Reads no files and imports no torch: an ingress needs this number.
"""

from collections.abc import Mapping

from eesd_dist.errors import CheckpointError

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""`model_max_length` overrides the others. In tokenizer_config.json it bounds nothing: there it
often belongs to the base model, and vLLM reads it for embedding models only."""

_TRAINED = "original_max_position_embeddings"


def num_positions(
    config: Mapping[str, object], *, max_position_embeddings: int, file: object
) -> int:
    """Returns the number of positions that can be computed with.

    `max_position_embeddings`: the key's value, or the family's default. Raises CheckpointError for
    a length that is no positive integer.
    """
    stated = {key: config[key] for key in LENGTH_KEYS if config.get(key) is not None}
    lengths = {key: _length(key, value, file) for key, value in stated.items()}
    lengths.setdefault("max_position_embeddings", max_position_embeddings)
    length = lengths.get("model_max_length") or min(lengths.values())
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return length
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    original = config.get(_TRAINED) or rope.get(_TRAINED)
    trained = max_position_embeddings if original is None else _length(_TRAINED, original, file)
    # Past them, dynamic and longrope would rotate keys that are already written.
    if kind == "dynamic":
        return min(length, max_position_embeddings)
    if kind in ("longrope", "su") and rope.get("short_factor") != rope.get("long_factor"):
        return min(length, trained)
    is_stated = str(config.get("model_type")).startswith("gemma3")
    if kind not in ("linear", "yarn") or is_stated or not isinstance(factor, int | float):
        return length
    return int((trained if kind == "yarn" else length) * factor)


def _length(key: str, value: object, file: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            file=file, found=f"{key} = {value!r:.60}", expected="a positive integer"
        )
    return value
