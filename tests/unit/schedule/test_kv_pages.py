"""The number of KV pages follows from memory, and the rank with the least room decides it."""

import subprocess
import sys
from random import Random
from typing import Any

import pytest

from eesd_dist.backends.cuda import layers as cuda_layers
from eesd_dist.backends.cuda import tiles
from eesd_dist.config import EngineConfig
from eesd_dist.errors import ConfigError
from eesd_dist.model.rank_memory import (
    GRAPH_ROWS,
    SPLIT_ROWS,
    activation_bytes,
    gpu_budget_bytes,
    held_bytes,
    kv_bytes_per_token,
)
from eesd_dist.schedule.kv_pages import KvRoom, num_pages_of, require_room
from eesd_dist.transport.symmetric import sums

GB = 10**9


def _config(*, max_model_len: int | None = None, **cache: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"path": "m", "max_model_len": max_model_len},
            "cache": {"page_size": 16, **cache},
        }
    )


def _rooms(*num_pages: int, page_bytes: int = 100) -> dict[str, KvRoom]:
    """Returns rooms for so many pages, of which a few bytes are left over."""
    return {
        f"verify rank {at}": KvRoom(budget_bytes=num * page_bytes + at, page_bytes=page_bytes)
        for at, num in enumerate(num_pages)
    }


def test_a_token_of_llama_70b_takes_320_kib_in_80_layers_however_they_are_split() -> None:
    dimensions = {"num_kv_heads": 8, "head_dim": 128, "bytes_per_value": 2}
    assert kv_bytes_per_token(num_layers=80, num_ranks=1, **dimensions) == 320 * 1024
    assert kv_bytes_per_token(num_layers=80, num_ranks=8, **dimensions) == 40 * 1024
    # Two ranks share a head, and each keeps it.
    assert kv_bytes_per_token(num_layers=80, num_ranks=16, **dimensions) == 40 * 1024


def test_the_rank_with_the_least_room_decides_whatever_its_place() -> None:
    rng = Random(0)
    for _ in range(200):
        counts = [rng.randint(1, 10_000) for _ in range(rng.randint(1, 16))]
        assert num_pages_of(_config(), _rooms(*counts)) == min(counts)
    layers = {
        "drafting actor": KvRoom(budget_bytes=10_000, page_bytes=10),
        "verify rank 0": KvRoom(budget_bytes=90_000, page_bytes=310),
    }
    assert num_pages_of(_config(), layers) == 90_000 // 310


def test_a_configured_number_needs_no_room() -> None:
    assert num_pages_of(_config(num_pages=7), _rooms(3, 900)) == 7
    require_room(_config(num_pages=7), "verify rank 0", _rooms(3)["verify rank 0"], num_pages=7)


def test_a_length_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    rooms = _rooms(100, 90)
    assert num_pages_of(_config(max_model_len=90 * 16), rooms) == 90
    with pytest.raises(
        ConfigError,
        match=r"max_model_len is 1441, and the KV pages of verify rank 1 hold 1440 tokens: lower "
        r"it to 1440, or raise cache\.kv_cache_bytes, or on GPUs cache\.gpu_memory_utilization",
    ):
        num_pages_of(_config(max_model_len=1441), rooms)
    with pytest.raises(ConfigError, match=r"cache\.num_pages hold 64 tokens.*raise cache\.num_p"):
        num_pages_of(_config(max_model_len=65, num_pages=4), rooms)


def test_a_rank_without_room_for_a_page_is_named_with_the_bytes_it_needs() -> None:
    with pytest.raises(
        ConfigError,
        match="verify rank 1 has 1 bytes for KV pages, and a page of 16 tokens takes 100",
    ):
        num_pages_of(_config(), _rooms(5, 0))


def test_a_replacement_that_cannot_hold_the_pages_is_refused() -> None:
    room = _rooms(80)["verify rank 0"]
    require_room(_config(), "verify rank 0", room, num_pages=80)
    with pytest.raises(
        ConfigError,
        match=r"verify rank 0 can hold 80 KV pages \(8000 bytes\), and the other ranks of its "
        r"pipeline have 81 \(8100 bytes here\).* or set cache\.num_pages to 80",
    ):
        require_room(_config(), "verify rank 0", room, num_pages=81)


def test_a_gpu_gives_what_weights_and_activations_leave_of_the_share_and_no_more_than_is_free() -> (
    None
):
    card = {"total_bytes": 80 * GB, "own_bytes": 17 * GB, "reserved_bytes": 2 * GB}
    assert gpu_budget_bytes(**card, free_bytes=62 * GB, utilization=0.9) == 53 * GB
    assert gpu_budget_bytes(**card, free_bytes=62 * GB, utilization=0.45) == 17 * GB
    assert gpu_budget_bytes(**card, free_bytes=40 * GB, utilization=0.9) == 38 * GB
    assert gpu_budget_bytes(**card, free_bytes=62 * GB, utilization=0.2) == 0


def test_activations_grow_with_rows_and_shrink_with_ranks() -> None:
    sizes = {
        "num_sampled": 288,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "bytes_per_value": 2,
    }
    eight = activation_bytes(num_rows=800, num_ranks=8, **sizes)
    assert 0.5 * GB < eight < 1.0 * GB
    assert eight < activation_bytes(num_rows=800, num_ranks=1, **sizes)
    assert eight < activation_bytes(num_rows=1600, num_ranks=8, **sizes)


def test_groups_and_graphs_hold_memory_of_a_gpu() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "bytes_per_value": 2}
    group = 512 << 20
    assert 0 < held_bytes(num_ranks=8, **sizes) - group < held_bytes(num_ranks=1, **sizes) < 2 * GB
    assert max(cuda_layers.GRAPH_ROWS) == GRAPH_ROWS
    assert tiles._MOST_SPLIT_ROWS == SPLIT_ROWS
    assert group > 20 * sums.MEMORY_BYTES


def test_the_arithmetic_imports_no_torch() -> None:
    check = (
        "import sys, eesd_dist.schedule.kv_pages, cluster.planning.memory; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
