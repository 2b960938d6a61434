"""The longest text that a model takes, read from config.json without a tensor.

An ingress needs this number and nothing else of the model; torch would take it 390 MiB.
"""

import json

from eesd_dist.config import EngineConfig
from eesd_dist.errors import CheckpointError, ConfigError


def max_model_len_of(config: EngineConfig) -> int:
    """Returns prompt plus answer in tokens. Raises what `engine.build.layout_of` raises."""
    file = config.model.path / "config.json"
    try:
        limit = json.loads(file.read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            file=file, found=f"no configuration ({error})", expected="a JSON object"
        ) from error
    if not isinstance(limit, int):  # its family has a default, which takes torch to read
        from eesd_dist.model.spec import ModelSpec

        limit = ModelSpec.from_folder(config.model.path).max_position_embeddings
    return within(config, limit)


def within(config: EngineConfig, limit: int) -> int:
    """Returns the configured length, which neither the positions nor the pages may exceed.

    Raises ConfigError when `max_model_len` is more than the model's positions.
    """
    wished = config.model.max_model_len or limit
    if wished > limit:
        raise ConfigError(
            f"model.max_model_len is {wished}, the checkpoint's positions end at {limit}: lower it"
        )
    return min(wished, config.cache.num_pages * config.cache.page_size)
