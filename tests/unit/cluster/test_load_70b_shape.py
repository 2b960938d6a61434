"""The planner's memory of a rank is what a process that has loaded the rank holds."""

from pathlib import Path

import pytest

from tests.support import load_70b_shape


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_of_16_ranks_of_either_stage_holds_what_the_planner_says(tmp_path: Path) -> None:
    report = load_70b_shape.compare(tmp_path)
    assert float(str(report["largest_error"])) < 0.05
    on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*.safetensors"))
    assert on_disk < 2**20, "the files are holes"


def test_a_tensor_of_the_sparse_checkpoint_has_its_full_size_and_no_room_on_disk(
    tmp_path: Path,
) -> None:
    size = load_70b_shape.write(tmp_path)
    # Four layers of 856 million weights, embedding, LM head and norm, two bytes each.
    layer = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672) + 2 * 8192
    assert size == pytest.approx(2 * (4 * layer + 2 * 128_256 * 8192 + 8192), rel=1e-5)
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*.safetensors")) < 2**20
