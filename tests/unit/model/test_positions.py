"""Lengths that a config.json gives, besides those of the checkpoints in test_odd_checkpoints."""

import pytest

from eesd_dist.model.positions import num_positions

_LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # A Gemma 3 states the length that it has with the factor.
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}, 1000),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 8.0}}, 8000),
        ({"rope_scaling": _LONGROPE, "original_max_position_embeddings": 250}, 250),
        ({"rope_scaling": {**_LONGROPE, "type": "su"}, "max_seq_len": 200}, 200),
        ({"rope_scaling": {**_LONGROPE, "short_factor": [4.0]}}, 1000),
    ],
)
def test_a_length_depends_on_the_rope(config: dict[str, object], expected: int) -> None:
    config["max_position_embeddings"] = 1000
    length = num_positions(config, max_position_embeddings=1000, file="config.json")
    assert length == expected
