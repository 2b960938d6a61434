"""The seed of self-distillation: what the target wrote, kept whole, and a head that learns it."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eesd_dist.distill.collect import collect, read_sequences
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.distill.train import (
    DistillOptions,
    distillation_loss,
    frequent_tokens,
    train_heads,
)
from eesd_dist.engine.llm import Generation
from eesd_dist.model.exit_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import Request, TokenId
from tests.support.drafters import EXIT_LAYER, save_target
from tests.support.tiny_checkpoints import tiny_model


class Parrot:
    """Writes the prompt's last token three times; counts how often it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.num_asked += len(requests)
        return [Generation(request_id=r.request_id, tokens=[r.prompt[-1]] * 3) for r in requests]


def test_collecting_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    prompts = [(TokenId(i), TokenId(i + 1)) for i in range(40)]
    file = tmp_path / "sequences.jsonl"
    file.write_text(json.dumps([0, 1, 1, 1, 1]) + "\n" + "[1, 2, 2")  # torn by a kill
    parrot = Parrot()
    for _ in collect(parrot, prompts, file, max_tokens=3, stop_token_ids=()):
        pass
    assert read_sequences(file) == [[i, i + 1, i + 1, i + 1, i + 1] for i in range(40)]
    assert parrot.num_asked == 39


def test_a_head_that_says_what_the_target_says_has_no_divergence() -> None:
    logits = torch.randn(2, 5, 11)
    certain = torch.nn.functional.one_hot(logits.argmax(-1), 11).float() * 50
    assert distillation_loss(logits, logits, vocab_ids=None, soft=1.0).item() == pytest.approx(0)
    assert distillation_loss(certain, logits, vocab_ids=None, soft=0.0).item() < 1e-6
    assert distillation_loss(-logits, logits, vocab_ids=None, soft=1.0).item() > 0.1


def test_a_truncated_head_is_not_blamed_for_tokens_it_lacks() -> None:
    target = torch.full((1, 2, 4), -9.0)
    target[0, 0, 3] = 9.0  # the head has no token 3
    target[0, 1, 2] = 9.0
    vocab_ids = torch.tensor([0, 2])
    right = torch.tensor([[[9.0, -9.0], [-9.0, 9.0]]])
    assert distillation_loss(right, target, vocab_ids=vocab_ids, soft=0.5).item() < 1e-3


def test_the_draft_vocabulary_is_what_the_target_writes_most() -> None:
    sequences = [[5, 5, 5, 2, 2, 9], [5, 2, 7]]
    assert frequent_tokens(sequences, count=2, vocab_size=12).tolist() == [2, 5]


def test_training_raises_agreement_with_the_target(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_model("llama", num_hidden_layers=4, vocab_size=96)
    model.save_pretrained(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    head = TrainableExitHead.from_target(tmp_path, spec, EXIT_LAYER, head="own")
    rng = random.Random(0)
    sequences = [[rng.randrange(3, 96) for _ in range(64)] for _ in range(40)]
    target = FrozenTarget(tmp_path, spec, [EXIT_LAYER])
    options = DistillOptions(seconds=8.0, rows=8, length=32, learning_rate=5e-3)
    steps = list(train_heads(target, [head], sequences, options))
    assert len(steps) >= 2
    first, last = steps[0], steps[-1]
    assert last.loss[EXIT_LAYER] < first.loss[EXIT_LAYER]
    assert last.agreement[EXIT_LAYER] > first.agreement[EXIT_LAYER]


def test_a_head_whose_target_does_nothing_after_the_exit_agrees_from_the_start(
    tmp_path: Path,
) -> None:
    target_folder = save_target(tmp_path)
    spec = ModelSpec.from_folder(target_folder)
    head = TrainableExitHead.from_target(target_folder, spec, EXIT_LAYER, head="own")
    hidden, logits = FrozenTarget(target_folder, spec, [EXIT_LAYER]).forward(
        torch.randint(3, 96, (2, 12)), [EXIT_LAYER]
    )
    with torch.no_grad():
        guess = head.training_forward(hidden[EXIT_LAYER])
    torch.testing.assert_close(guess, logits, atol=1e-4, rtol=1e-4)
