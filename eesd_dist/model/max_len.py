"""Reads the maximum length of a model's text from config.json, without torch.

An ingress needs only this number of the model; importing torch would cost it 390 MiB.
"""

import json

from eesd_dist.config import EngineConfig
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.positions import computed_positions
from eesd_dist.schedule.kv_pages import require_length


def max_model_len_of(config: EngineConfig) -> int:
    """Returns the maximum of prompt plus answer, in tokens.

    Raises the errors of `engine.build.layout_of`.
    """
    file = config.model.path / "config.json"
    try:
        fields = json.loads(file.read_text())
        limit = fields.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            file=file, found=f"no configuration ({error})", expected="a JSON object"
        ) from error
    if not isinstance(limit, int):  # the family's default applies; reading it imports torch
        from eesd_dist.model.spec import ModelSpec

        limit = ModelSpec.from_folder(config.model.path).max_position_embeddings
    return within(config, computed_positions(fields, limit))


def within(config: EngineConfig, limit: int) -> int:
    """Returns the configured length, limited to the model's positions and to a configured number
    of pages. Pages that are sized from memory limit it further, once the ranks have loaded.

    Raises ConfigError when `max_model_len` is more than either.
    """
    length = config.model.max_model_len or limit
    if length > limit:
        raise ConfigError(
            f"model.max_model_len is {length}, the checkpoint's positions end at {limit}: lower it"
        )
    num_pages = config.cache.num_pages
    if num_pages is None:
        return length
    require_length(config, num_pages=num_pages, what="cache.num_pages")
    return min(length, num_pages * config.cache.page_size)
