"""Agreement and 1 - TV, against what their definitions say one position at a time."""

from pathlib import Path

import pytest
import torch

from eesd_dist.distill.overlap import agrees, one_minus_tv, overlap_of
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.model.exit_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from tests.support.drafters import EXIT_LAYER, save_head, save_target


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab_ids", [None, [0, 3, 4, 9]])
def test_one_minus_tv_is_one_less_half_the_distance(
    temperature: float, vocab_ids: list[int] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    target = 3.0 * torch.randn(6, 12, generator=generator)
    ids = None if vocab_ids is None else torch.tensor(vocab_ids)
    guess = 3.0 * torch.randn(6, 12 if ids is None else len(ids), generator=generator)
    found = one_minus_tv(guess, target, vocab_ids=ids, temperature=temperature)
    for row in range(6):
        p = (target[row] / temperature).softmax(dim=0)
        q = torch.zeros(12)
        q[torch.arange(12) if ids is None else ids] = (guess[row] / temperature).softmax(dim=0)
        assert found[row].item() == pytest.approx(1.0 - 0.5 * (p - q).abs().sum().item(), abs=1e-5)


def test_agreement_speaks_of_the_targets_tokens_not_of_the_drafts() -> None:
    target = torch.eye(10)[[3, 9, 5]]
    guess = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    vocab_ids = torch.tensor([0, 3, 9])
    assert agrees(guess, target, vocab_ids=vocab_ids).tolist() == [True, True, False]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("agreement", "share"), [("always", 1.0), ("never", 0.0)])
def test_heads_that_always_and_never_agree_are_told_apart(
    target_folder: Path, tmp_path: Path, agreement: str, share: float
) -> None:
    spec = ModelSpec.from_folder(target_folder)
    folder = save_head(target_folder, tmp_path, agreement)  # type: ignore[arg-type]
    head = TrainableExitHead.read(folder, target=spec, target_path=target_folder)
    frozen = FrozenTarget(target_folder, spec, [EXIT_LAYER])
    tokens = list(range(3, 23))
    greedy = overlap_of(head, frozen, tokens, num_prompt=5, temperature=0.0)
    # The last prompt token and each written one but the last are judged.
    assert greedy.num_positions == 20 - 5
    assert greedy.agreed == greedy.shared == share * 15
    sampled = overlap_of(head, frozen, tokens, num_prompt=5, temperature=1.0)
    assert sampled.agreed == greedy.agreed
    if share:
        assert sampled.shared == pytest.approx(15.0, abs=1e-2)
    else:
        assert 0.0 < sampled.shared < 12.0
