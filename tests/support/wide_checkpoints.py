"""Random sharded Llama checkpoints of any size, written quickly."""

from pathlib import Path

import torch
from torch import Tensor

from eesd_dist.bench.gpu_check.checkpoints import write_stack


def write_wide_checkpoint(
    folder: Path, *, num_layers: int, hidden_size: int, intermediate_size: int, vocab_size: int
) -> int:
    """Writes a checkpoint with 16 heads; returns the bytes of its files."""
    return write_stack(
        folder,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        num_heads=16,
        num_kv_heads=8,
        draw=_random,
    )


def _random(shape: tuple[int, ...]) -> Tensor:
    """Returns repeated random bits: fast to make, and without holes in the file."""
    count = torch.Size(shape).numel()
    run = torch.randn(min(count, 1 << 16)).mul_(0.02).bfloat16()
    return run.repeat(-(-count // run.numel()))[:count].reshape(shape)
