"""Processes that share the heads of a model compute the same as one process."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from eesd_dist.config import DType
from eesd_dist.transport.authentication.key_store import StoreHost
from tests.dist.span_ranks import compute_as_rank, tokens
from tests.dist.transport.peers import peer_process
from tests.support.tiny_checkpoints import save_tiny_model

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama, biases", "float32"),
        ("qwen3", "bfloat16"),
        ("mistral, sliding window", "bfloat16"),
    ],
)
def test_two_processes_compute_the_model_and_keep_the_rows_bits(
    tmp_path: Path, family: str, dtype: DType
) -> None:
    model = save_tiny_model(tmp_path, family)
    with torch.no_grad():
        if dtype == "bfloat16":
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        expected_TV = model(tokens()[None]).logits[0]
    host = StoreHost()
    with peer_process(compute_as_rank, host.at, 1, tmp_path, dtype):
        chunked_TV, decoded_TV = compute_as_rank(host.at, 0, tmp_path, dtype)
    assert float((chunked_TV - expected_TV).abs().max()) <= 1e-4
    assert torch.equal(decoded_TV, chunked_TV)


@pytest.mark.parametrize(
    ("family", "dtype", "size", "heads"),
    [
        ("qwen3, biases", "float32", 4, {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ("llama, biases", "bfloat16", 3, {"num_attention_heads": 6, "num_key_value_heads": 1}),
        ("gemma2", "float32", 6, {"num_attention_heads": 12, "num_key_value_heads": 3}),
    ],
)
def test_processes_that_hold_the_same_key_value_heads_compute_the_model_and_keep_the_rows_bits(
    tmp_path: Path, family: str, dtype: DType, size: int, heads: dict[str, int]
) -> None:
    model = save_tiny_model(tmp_path, family, hidden_size=72, head_dim=16, **heads)
    with torch.no_grad():
        if dtype == "bfloat16":
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        expected_TV = model(tokens()[None]).logits[0]
    host = StoreHost()
    with ExitStack() as peers:
        for rank in range(1, size):
            peers.enter_context(peer_process(compute_as_rank, host.at, rank, tmp_path, dtype, size))
        chunked_TV, decoded_TV = compute_as_rank(host.at, 0, tmp_path, dtype, size)
    assert float((chunked_TV - expected_TV).abs().max()) <= 1e-4
    assert torch.equal(decoded_TV, chunked_TV)
