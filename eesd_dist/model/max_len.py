"""Reads the maximum length of a model's text from config.json, without torch.

An ingress needs only this number of the model; importing torch would cost it 390 MiB.
"""

import json

from eesd_dist.config import EngineConfig
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.checkpoint_folder import require_checkpoint
from eesd_dist.model.positions import num_positions
from eesd_dist.schedule.kv_pages import require_length


def max_model_len_of(config: EngineConfig) -> int:
    """Returns the maximum of prompt plus answer, in tokens.

    Raises the errors of `engine.layout.layout_of`.
    """
    require_checkpoint(config.model.path)
    file = config.model.path / "config.json"
    try:
        fields = json.loads(file.read_text())
        stated = fields.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            file=file, found=f"no configuration ({error})", expected="a JSON object"
        ) from error
    if isinstance(stated, int):
        return within(config, num_positions(fields, max_position_embeddings=stated, file=file))
    # The family's default applies; reading it imports torch.
    from eesd_dist.model.spec import ModelSpec

    model = config.model
    spec = ModelSpec.from_folder(model.path, ignored_keys=model.ignore_config_keys)
    return within(config, spec.max_position_embeddings)


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
