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
    ("family", "dtype", "size", "heads", "kv_heads"),
    [
        ("llama, biases", "float32", 2, 4, 2),
        ("qwen3", "bfloat16", 2, 4, 2),
        ("mistral, sliding window", "bfloat16", 2, 4, 2),
        # Several ranks hold the same key-value head.
        ("qwen3, biases", "float32", 4, 4, 2),
        ("llama, biases", "bfloat16", 3, 6, 1),
        ("gemma2", "float32", 6, 12, 3),
        ("phi3, longrope in a part of each head", "float32", 4, 4, 2),
    ],
)
def test_processes_compute_the_model_and_keep_the_rows_bits(
    tmp_path: Path, family: str, dtype: DType, size: int, heads: int, kv_heads: int
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = save_tiny_model(tmp_path, family, hidden_size=72, **sizes)
    with torch.no_grad():
        if dtype == "bfloat16":
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        expected_TV = model(tokens()[None]).logits[0]
        # A processor that multiplies bfloat16 rounds the inputs of products: less than the library.
        library_TV = model.bfloat16()(tokens()[None]).logits[0].float()
    chunked_TV, decoded_TV = computed(tmp_path, dtype, size, in_memory=True)
    if dtype == "bfloat16":
        assert rms(chunked_TV - expected_TV) <= rms(library_TV - expected_TV)
    else:
        assert float((chunked_TV - expected_TV).abs().max()) <= 1e-4
    assert torch.equal(decoded_TV, chunked_TV)
    for ours_TV in computed(tmp_path, dtype, size, in_memory=False):
        assert torch.equal(ours_TV, chunked_TV)


def computed(folder: Path, dtype: DType, size: int, *, in_memory: bool) -> list[torch.Tensor]:
    host = StoreHost()
    work = (folder, dtype, size, in_memory)
    with ExitStack() as peers:
        for rank in range(1, size):
            peers.enter_context(peer_process(compute_as_rank, host.at, rank, *work))
        return compute_as_rank(host.at, 0, *work)


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
