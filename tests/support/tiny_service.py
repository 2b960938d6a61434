"""A model small enough to be served in a test: random weights, a real tokenizer, and a drafter that
is right about half of the time."""

from pathlib import Path

import torch

from tests.support.drafters import EXIT_LAYER, save_head
from tests.support.tiny_checkpoints import tiny_model
from tests.support.tiny_tokenizer import write_byte_level

VOCAB_SIZE = 320


def write_tiny_service(folder: Path) -> Path:
    """Enough positions for a stream that is still running when a process is killed."""
    write_byte_level(folder)
    model = tiny_model(
        "llama", num_hidden_layers=4, vocab_size=VOCAB_SIZE, max_position_embeddings=4096
    )
    with torch.no_grad():
        for layer in model.model.layers[EXIT_LAYER:]:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    model.save_pretrained(folder)
    save_head(folder, folder / "exit_head", "sometimes")
    return folder
