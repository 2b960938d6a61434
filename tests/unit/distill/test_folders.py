"""Files and folders of a step: written atomically, by one process at a time."""

from pathlib import Path

import pytest

from eesd_dist.distill.folders import only_one, put_in_place
from eesd_dist.errors import ConfigError


def test_a_folder_has_one_worker_at_a_time_and_its_scraps_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".shard-00001.safetensors.77.partial").write_bytes(b"torn")
    with only_one(tmp_path):
        assert not list(tmp_path.glob(".*.partial"))
        with (
            pytest.raises(ConfigError, match="another process is at work here"),
            only_one(tmp_path),
        ):
            raise AssertionError
    with only_one(tmp_path):
        pass


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    old, new = tmp_path / "head", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / folder.name).write_text("")
    (tmp_path / ".head.old").mkdir()  # as after a kill between the two renames
    put_in_place(new, old)
    assert [path.name for path in old.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
