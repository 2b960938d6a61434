"""Which degrees of tensor parallelism a model allows, and what each rank holds then."""

from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from eesd_dist.model.degrees import kv_heads_of, require_degree, tensor_parallel_degrees
from eesd_dist.model.parallel import Shard
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_checkpoints import save_tiny_model


@pytest.mark.parametrize(
    ("heads", "kv_heads", "channels", "expected"),
    [
        (64, 8, 28_672, (1, 2, 4, 8, 16, 32, 64)),  # Llama 3 70B
        (40, 8, 27_648, (1, 2, 4, 8)),  # Qwen 2.5 32B
        (28, 4, 18_944, (1, 2, 4)),  # Qwen 2.5 7B: 28 ranks cannot share the channels
        (12, 2, 24, (1, 2, 4, 6, 12)),
        (6, 3, 12, (1, 3, 6)),
        (5, 5, 12, (1,)),
    ],
)
def test_degrees_share_query_heads_evenly_and_key_value_heads_evenly_or_each_among_as_many(
    heads: int, kv_heads: int, channels: int, expected: tuple[int, ...]
) -> None:
    degrees = tensor_parallel_degrees(num_heads=heads, num_kv_heads=kv_heads, num_channels=channels)
    assert degrees == expected


def test_a_degree_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"16 .* 40 attention .*: choose one of 1, 2, 4, 8$"):
        require_degree(16, model="Qwen", num_heads=40, num_kv_heads=8, num_channels=27_648)


@pytest.mark.parametrize("size", [1, 2, 4, 6, 12])
def test_every_query_head_is_on_one_rank_together_with_its_key_value_head(
    size: int, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 24}
    save_tiny_model(tmp_path, "llama", hidden_size=72, head_dim=16, **sizes)
    spec = ModelSpec.from_folder(tmp_path)
    shards = [Shard.of(spec, rank=rank, size=size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads] == list(range(12))
    for shard in shards:
        assert {head // spec.queries_per_kv for head in shard.heads} == set(shard.kv_heads)
        assert len(shard.heads) == shard.queries_per_kv * len(shard.kv_heads)


def test_ranks_beyond_the_key_value_heads_hold_one_each() -> None:
    assert [list(kv_heads_of(rank, 8, num_kv_heads=2)) for rank in range(8)] == [[0]] * 4 + [
        [1]
    ] * 4
    assert [list(kv_heads_of(rank, 2, num_kv_heads=4)) for rank in range(2)] == [[0, 1], [2, 3]]
