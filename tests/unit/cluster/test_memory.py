from dataclasses import replace

import pytest

from cluster.planning.memory import memory_of, render_memory, with_fallbacks
from cluster.planning.shapes import Load, Split, on_cpu
from eesd_dist.errors import ConfigError
from tests.unit.cluster.test_planner import LLAMA_70B

LLAMA_3_70B = replace(LLAMA_70B, vocab_size=128256)


def test_a_ranks_memory_is_its_share_of_the_weights_and_of_the_keys_and_values() -> None:
    split = Split(exit_layer=4, verify_tensor_parallel_size=8)
    draft, verify = memory_of(
        LLAMA_3_70B, split=split, load=Load(num_requests=16, context_tokens=4096)
    )
    # Llama 3 70B has 70.55e9 parameters; the exit head adds a layer and an LM head.
    head = 8192 * 128256
    exit_head = LLAMA_3_70B.layer_weights + head
    parameters = (draft.weights_bytes + 8 * verify.weights_bytes) / 2 - exit_head
    assert parameters == pytest.approx(70.55e9, rel=0.001)
    # 320 KiB of keys and values for a token in all 80 layers, known of this model.
    assert 8 * verify.kv_bytes == 16 * 4096 * 320 * 1024 * 76 // 80
    assert verify.weights_bytes < verify.loading_bytes < 1.5 * verify.weights_bytes
    assert "verify,   8 ranks" in render_memory([draft, verify])


def test_a_fallback_costs_the_layers_before_the_exit_and_the_embedding() -> None:
    split = Split(exit_layer=8, draft_tensor_parallel_size=2, verify_tensor_parallel_size=8)
    load = Load(num_requests=16, context_tokens=4096)
    draft, verify, both = with_fallbacks(LLAMA_3_70B, split=split, load=load)
    assert (draft.num_ranks, verify.num_ranks, both.num_ranks) == (2, 6, 2)
    weights = 8 * LLAMA_3_70B.layer_weights // 2 + 8192 * 128256
    assert both.weights_bytes - verify.weights_bytes == 2 * weights
    assert both.kv_bytes - verify.kv_bytes == 8 * 16 * 4096 * LLAMA_3_70B.kv_bytes_per_token // 2
    assert both.loading_bytes > both.weights_bytes
    table = render_memory([draft, verify, both])
    assert "verify with fallback,   2 ranks" in table
    assert len({len(line) for line in table.splitlines()}) == 1
    narrow = Split(exit_layer=8, draft_tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="raise --verify-tp or lower --draft-tp"):
        with_fallbacks(LLAMA_3_70B, split=narrow, load=load)
    with pytest.raises(ConfigError, match="would die with the drafting actor"):
        with_fallbacks(LLAMA_3_70B, split=replace(split, shares_gpu=True), load=load)


def test_a_rank_has_a_table_of_rotations_for_its_layers_and_one_for_its_exit_head() -> None:
    split, load = Split(exit_layer=4, verify_tensor_parallel_size=8), Load()
    longer = replace(LLAMA_3_70B, max_positions=131_072)
    table = 131_072 * 64 * 8  # complex64 for each pair of channels
    for short, tall, tables in zip(
        memory_of(LLAMA_3_70B, split=split, load=load),
        memory_of(longer, split=split, load=load),
        (2, 1),
        strict=True,
    ):
        assert tall.weights_bytes - short.weights_bytes == tables * table


def test_a_cpu_keeps_keys_and_values_in_float32_and_weights_as_a_gpu_does() -> None:
    split, load = Split(exit_layer=4, verify_tensor_parallel_size=8), Load()
    gpu = memory_of(LLAMA_3_70B, split=split, load=load)
    cpu = memory_of(on_cpu(LLAMA_3_70B), split=split, load=load)
    assert [row.kv_bytes for row in cpu] == [2 * row.kv_bytes for row in gpu]
    assert [row.weights_bytes for row in cpu] == [row.weights_bytes for row in gpu]
