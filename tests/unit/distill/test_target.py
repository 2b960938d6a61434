"""The frozen target equals the model of transformers, layer by layer and token by token."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eesd_dist.distill import target as target_module
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from tests.support.drafters import EXIT_LAYER, save_target
from tests.support.tiny_checkpoints import tiny_model

EXITS = (1, 3)
LENGTHS = (5, 23, 1, 64)


@pytest.fixture(scope="module", params=["llama", "qwen2, window in the upper layers"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tiny_model(request.param, num_hidden_layers=4).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in LENGTHS]


def test_hidden_states_logits_and_their_sum_are_those_of_transformers(
    folder: Path, sequences: list[list[int]]
) -> None:
    frozen = FrozenTarget(folder, ModelSpec.from_folder(folder), EXITS)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    views = frozen.view(sequences, top_k=7)
    for sequence, view in zip(sequences, views, strict=True):
        with torch.no_grad():
            out = theirs(torch.tensor([sequence]), output_hidden_states=True)
        assert tuple(view.hidden) == EXITS
        for at in EXITS:
            torch.testing.assert_close(
                view.hidden[at], out.hidden_states[at][0], atol=1e-4, rtol=1e-4
            )
        logits_TV = out.logits[0]
        best = logits_TV.topk(7, dim=-1)
        assert torch.equal(view.top_ids_TK.long(), best.indices)
        torch.testing.assert_close(view.top_logits_TK, best.values, atol=1e-4, rtol=1e-4)
        exact_T = logits_TV.double().exp().sum(dim=-1).log().float()
        torch.testing.assert_close(view.lse_T, exact_T, atol=1e-4, rtol=1e-5)


def test_other_sequences_of_a_batch_do_not_change_a_sequence(
    folder: Path, sequences: list[list[int]]
) -> None:
    frozen = FrozenTarget(folder, ModelSpec.from_folder(folder), EXITS)
    batched = frozen.view(sequences, top_k=3)
    for sequence, view in zip(sequences, batched, strict=True):
        (single,) = frozen.view([sequence], top_k=3)
        torch.testing.assert_close(view.lse_T, single.lse_T, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(view.hidden[3], single.hidden[3], atol=1e-5, rtol=1e-4)


def test_logits_made_block_by_block_are_the_same(
    folder: Path, sequences: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = FrozenTarget(folder, ModelSpec.from_folder(folder), EXITS)
    at_once = frozen.view(sequences, top_k=3)
    monkeypatch.setattr(target_module, "_LOGITS_BYTES", 4 * 96 * 10)
    in_blocks = frozen.view(sequences, top_k=3)
    for view, other in zip(at_once, in_blocks, strict=True):
        assert torch.equal(view.top_ids_TK, other.top_ids_TK)
        torch.testing.assert_close(view.lse_T, other.lse_T, atol=1e-5, rtol=1e-5)


def test_more_logits_than_tokens_are_as_many_as_tokens(folder: Path) -> None:
    frozen = FrozenTarget(folder, ModelSpec.from_folder(folder), EXITS)
    (view,) = frozen.view([[5, 6, 7]], top_k=500)
    assert view.top_ids_TK.shape == (3, 96)
    torch.testing.assert_close(view.top_logits_TK.logsumexp(dim=-1), view.lse_T)


def test_a_head_of_a_target_that_does_nothing_after_the_exit_agrees_from_the_start(
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
