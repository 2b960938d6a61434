"""Checkpoints of unusual content generate the tokens of transformers, and what is odd about them is
in the log."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import Stages

PROMPT = (5, 17, 3, 80)
NUM_TOKENS = 24

Tensors = dict[str, Tensor]


def greedy_tokens(logits_of: Callable[[Tensor], Tensor]) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        tokens.append(int(logits_of(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


def our_tokens(folder: Path) -> list[int]:
    return greedy_tokens(Stages.load(folder).run_without_pages)


def their_tokens(source: Path | PreTrainedModel) -> list[int]:
    model = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        if isinstance(source, Path)
        else source
    )
    with torch.no_grad():
        return greedy_tokens(lambda tokens_BL: model(tokens_BL).logits)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Replaces the stored tensors of a folder with one safetensors file."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns our messages; transformers logs too."""
    ours = (record for record in caplog.records if record.name.startswith("eesd_dist."))
    return [record.getMessage() for record in ours]


def random_head() -> Tensor:
    return 0.15 * torch.randn(96, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", ["llama, tied", "gemma2"])
def test_a_tied_checkpoint_with_another_lm_head_is_computed_with_it(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    tied = their_tokens(save_tiny_model(tmp_path, family))
    rewrite(tmp_path, lambda stored: stored | {"lm_head.weight": random_head()})
    tokens = our_tokens(tmp_path)
    assert tokens == their_tokens(tmp_path)
    assert tokens != tied
    (message,) = logged(caplog)
    assert message.startswith(f"the stored lm_head.weight is used: folder={tmp_path}")


def test_a_tied_checkpoint_with_two_equal_copies_is_loaded_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path, "llama, tied")
    copy = model.lm_head.weight.detach().clone()
    rewrite(tmp_path, lambda stored: stored | {"lm_head.weight": copy})
    assert our_tokens(tmp_path) == their_tokens(model)
    assert logged(caplog) == []


def test_a_tied_checkpoint_may_store_its_embedding_as_the_lm_head(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama, tied")

    def renamed(stored: Tensors) -> Tensors:
        return stored | {"lm_head.weight": stored.pop("model.embed_tokens.weight")}

    rewrite(tmp_path, renamed)
    assert our_tokens(tmp_path) == their_tokens(tmp_path) == their_tokens(model)


def test_stored_tensors_that_are_not_used_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path)
    extra = {f"model.layers.{at}.self_attn.q_proj.bias": torch.ones(64) for at in range(3)}
    extra |= {f"score.{at}.weight": torch.ones(2) for at in range(7)}
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(tmp_path, lambda stored: stored | extra | computed)
    assert our_tokens(tmp_path) == their_tokens(tmp_path) == their_tokens(model)
    (message,) = logged(caplog)
    assert f"not used: folder={tmp_path} names=model.layers.0.self_attn.q_proj.bias, " in message
    assert "score.4.weight and 2 more: " in message
    assert "inv_freq" not in message
