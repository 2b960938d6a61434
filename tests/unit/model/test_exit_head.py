"""A head starts as the last layer of the target, is read back unchanged, and rejects another
target."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.heads.head_files import head_folder
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import SingleGroup
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import CPU

EXIT_LAYER = 2
DRAFT_VOCAB = (1, 2, 5, 8, 13, 21, 34, 55, 89)
NUM_TOKENS = 40


def load_span(target: Path, last: int) -> LlamaSpan:
    return LlamaSpan.load(
        target,
        ModelSpec.from_folder(target),
        0,
        last,
        group=SingleGroup(),
        dtype="float32",
        numerics="invariant",
        device=CPU,
        num_pages=4,
        page_size=16,
    )


def make_head(target: Path, kind: HeadKind = "shared") -> TrainableExitHead:
    return TrainableExitHead.from_target(
        target,
        ModelSpec.from_folder(target),
        EXIT_LAYER,
        head=kind,
        draft_vocab=DRAFT_VOCAB if kind == "truncated" else None,
    )


def load_head(folder: Path, target: Path) -> ExitHead:
    return ExitHead.load(
        folder,
        target=ModelSpec.from_folder(target),
        target_path=target,
        dtype="float32",
        numerics="invariant",
        device=CPU,
        num_pages=4,
        page_size=16,
    )


def draft_logits(head: ExitHead, hidden_LD: Tensor, chunks: tuple[int, ...]) -> Tensor:
    logits = []
    start = 0
    for count in chunks:
        rows = RowPlan.build(
            [RowSegment(start, count, (3, 1, 2))],
            page_size=16,
            device=CPU,
            numerics="invariant",
        )
        logits.append(head.logits(head.forward(hidden_LD[start : start + count], rows)))
        start += count
    return torch.cat(logits)


def random_tokens() -> Tensor:
    return torch.randint(0, 96, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
@pytest.mark.parametrize("family", ["llama, tied", "qwen3, biases", "mistral, sliding window"])
def test_a_new_head_on_the_last_but_one_layer_is_the_target(
    tmp_path: Path, family: str, kind: HeadKind
) -> None:
    model = save_tiny_model(tmp_path / "target", family)
    with torch.no_grad():
        expected_BLV = model(random_tokens()).logits
    span = load_span(tmp_path / "target", EXIT_LAYER)
    hidden_BLD = span.forward_full(span.embed(random_tokens()))
    head = make_head(tmp_path / "target", kind)
    head.save(tmp_path / "head", dtype="float32")
    loaded = load_head(tmp_path / "head", tmp_path / "target")
    if kind == "truncated":
        expected_BLV = expected_BLV[..., torch.tensor(DRAFT_VOCAB)]
        assert loaded.vocab_ids is not None
        assert loaded.vocab_ids.tolist() == list(DRAFT_VOCAB)
    else:
        assert loaded.vocab_ids is None

    trained_on_BLV = head.training_forward(hidden_BLD).detach()
    drafted_LV = draft_logits(loaded, hidden_BLD[0], (20, 1, 1, 7, 11))

    assert loaded.exit_layer == EXIT_LAYER
    assert float((trained_on_BLV - expected_BLV).abs().max()) <= 1e-4
    assert float((drafted_LV - expected_BLV[0]).abs().max()) <= 1e-4


@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
def test_stored_tensors_that_a_head_does_not_use_are_listed(
    tmp_path: Path, kind: HeadKind, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path / "target")
    head = make_head(tmp_path / "target", kind)
    head.save(tmp_path / "head", dtype="float32")
    load_head(tmp_path / "head", tmp_path / "target")
    assert "not used" not in caplog.text
    file = tmp_path / "head" / "model.safetensors"
    save_file(load_file(file) | {"fc.weight": torch.ones(2)}, file)
    load_head(tmp_path / "head", tmp_path / "target")
    assert f"not used: folder={tmp_path / 'head'} names=fc.weight: " in caplog.text


@pytest.mark.parametrize("family", ["llama", "qwen3, biases"])
def test_gradients_are_those_of_the_target_s_own_last_layer(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path, family)
    span = load_span(tmp_path, EXIT_LAYER)
    hidden_BLD = span.forward_full(span.embed(random_tokens()))
    head = make_head(tmp_path, "own")
    model(random_tokens()).logits.logsumexp(-1).mean().backward()
    head.training_forward(hidden_BLD).logsumexp(-1).mean().backward()
    for parameter in head.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    gradients = head.layer.checkpoint_tensors("model.layers.2.")
    expected = dict(model.named_parameters())
    for name, gradient in gradients.items():
        grad = expected[name].grad
        assert grad is not None
        assert torch.allclose(gradient, grad, atol=1e-5), name
    assert head.lm_head_VD.grad is not None


def test_the_shared_lm_head_is_never_trained(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    trained = {name for name, p in make_head(tmp_path).named_parameters() if p.requires_grad}
    assert "lm_head_VD" not in trained
    assert "norm_D" in trained


def test_a_head_in_training_can_draft_at_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    span = load_span(tmp_path, EXIT_LAYER)
    hidden_BLD = span.forward_full(span.embed(random_tokens()))
    head = make_head(tmp_path)
    with torch.no_grad():
        head.norm_D.mul_(1.7)
    ready = ExitHead.ready(
        head, dtype="float32", numerics="invariant", device=CPU, num_pages=4, page_size=16
    )
    expected_LV = head.training_forward(hidden_BLD)[0].detach()
    assert torch.allclose(draft_logits(ready, hidden_BLD[0], (40,)), expected_LV, atol=1e-4)


def test_a_head_keeps_its_trained_values_through_its_folder(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "target", "qwen2")
    head = make_head(tmp_path / "target", "truncated")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    head.save(tmp_path / "head", dtype="float32", provenance={"command": "eesd distill"})
    spec = ModelSpec.from_folder(tmp_path / "target")
    read = TrainableExitHead.read(tmp_path / "head", target=spec, target_path=tmp_path / "target")
    for name, parameter in head.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "early_exit"
    assert config["provenance"] == {"command": "eesd distill"}


def edited_config(**changes: object) -> Callable[[Path, Path], None]:
    def spoil(head: Path, target: Path) -> None:
        file = head / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def other_target(head: Path, target: Path) -> None:
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token_id": 7}))


def deeper_target(head: Path, target: Path) -> None:
    save_tiny_model(target, num_hidden_layers=4)


def disagreeing_maps(head: Path, target: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["t2d"][3] = True
    save_file(tensors, head / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (other_target, "hashes of config.json"),
        (deeper_target, "num_hidden_layers 3"),
        (edited_config(speculators_model_type="eagle3"), "eagle3"),
        (edited_config(exit_layer=3), "exit_layer 3"),
        (edited_config(head_type="medusa"), "medusa"),
        (edited_config(draft_vocab_size=97), "draft_vocab_size 97"),
        (edited_config(draft_vocab_size=8), "shape"),
        (edited_config(transformer_layer_config=None), "layer config"),
        (edited_config(reads_embedding=True), "it was removed: train the head again"),
        (disagreeing_maps, "d2t and t2d"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, spoil: Callable[[Path, Path], None], says: str
) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    save_tiny_model(target)
    make_head(target, "truncated").save(head)
    spoil(head, target)
    with pytest.raises(CheckpointError, match=says) as refusal:
        load_head(head, target)
    assert str(head) in str(refusal.value)


def test_a_packaged_head_is_taken_by_the_target_it_was_made_for(tmp_path: Path) -> None:
    target, other, packaged = tmp_path / "target", tmp_path / "other", tmp_path / "heads"
    save_tiny_model(target)
    save_tiny_model(other, num_hidden_layers=4)
    make_head(target, "truncated").save(packaged / "small")
    make_head(other, "shared").save(packaged / "deep")

    assert head_folder(target, packaged=packaged) == packaged / "small"
    assert head_folder(other, packaged=packaged) == packaged / "deep"
    save_tiny_model(tmp_path / "third", num_hidden_layers=5)
    assert head_folder(tmp_path / "third", packaged=packaged) is None
    assert head_folder(target, packaged / "deep", packaged=packaged) == packaged / "deep"

    make_head(target, "shared").save(target / "exit_head")
    assert head_folder(target, packaged=packaged) == target / "exit_head"


def test_a_head_must_leave_layers_to_verify(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="exit layer 3"):
        TrainableExitHead.from_target(tmp_path, spec, 3)


def test_a_truncated_head_needs_tokens_that_exist(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="from 0 to 95"):
        TrainableExitHead.from_target(tmp_path, spec, 2, head="truncated", draft_vocab=[96])
    with pytest.raises(ConfigError, match="needs head 'truncated'"):
        TrainableExitHead.from_target(tmp_path, spec, 2, head="own", draft_vocab=[1])
