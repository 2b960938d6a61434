"""The maximum length of a text is the same when computed with and without torch."""

import json
from pathlib import Path

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.max_len import max_model_len_of
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_service import write_tiny_service


def _config(folder: Path, *, num_pages: int = 512, **model: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model": {"path": str(folder), **model}, "cache": {"num_pages": num_pages}}
    )


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("num_pages", [2, 100_000])
def test_positions_and_pages_bound_it(tmp_path: Path, has_key: bool, num_pages: int) -> None:
    folder = write_tiny_service(tmp_path / "tiny")
    file = folder / "config.json"
    written = json.loads(file.read_text())
    positions = written["max_position_embeddings"]
    if not has_key:
        del written["max_position_embeddings"]
        file.write_text(json.dumps(written))
    config = _config(folder, num_pages=num_pages, head=None)
    max_len = max_model_len_of(config)
    if has_key:
        assert max_len == layout_of(config).max_model_len == min(positions, num_pages * 32)
        with pytest.raises(ConfigError, match=f"positions end at {positions}: lower it"):
            max_model_len_of(_config(folder, max_model_len=positions + 1))
    else:
        default = ModelSpec.from_folder(folder).max_position_embeddings
        assert max_len == min(default, num_pages * 32)


def test_a_folder_without_a_configuration_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        max_model_len_of(_config(tmp_path))
