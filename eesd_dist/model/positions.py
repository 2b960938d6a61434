"""Reads from config.json how many positions are computed. Imports no torch: an ingress asks it."""

from collections.abc import Mapping


def computed_positions(fields: Mapping[str, object], max_positions: int) -> int:
    """Returns how many of a config.json's `max_positions` are computed.

    A longrope with other factors for long texts ends where it would change to them: keys that are
    already written would have to be rotated again.
    """
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("short_factor") == rope.get("long_factor"):
        return max_positions
    key = "original_max_position_embeddings"
    trained = fields.get(key, rope.get(key))
    return min(max_positions, int(trained)) if isinstance(trained, int | float) else max_positions
