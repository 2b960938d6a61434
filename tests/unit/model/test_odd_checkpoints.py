"""Checkpoints of unusual content generate the tokens of transformers, and what is odd about them is
in the log."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cluster.planning.checkpoint import read_shape
from eesd_dist import LLM, EngineConfig, SamplingParams
from eesd_dist.errors import CheckpointError, RequestError
from eesd_dist.model.max_len import max_model_len_of
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_checkpoints import save_tiny_model
from tests.support.tiny_service import write_tiny_service
from tests.unit.model.paged_stages import Stages

PROMPT = (5, 17, 3, 80)
NUM_TOKENS = 24
LONG_PROMPT = tuple(range(3, 90))

Tensors = dict[str, Tensor]


def greedy_tokens(
    logits_of: Callable[[Tensor], Tensor], prompt: Sequence[int] = PROMPT
) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(logits_of(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


def our_tokens(folder: Path, prompt: Sequence[int] = PROMPT) -> list[int]:
    return greedy_tokens(Stages.load(folder).run_without_pages, prompt)


def their_tokens(source: Path | PreTrainedModel, prompt: Sequence[int] = PROMPT) -> list[int]:
    model = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        if isinstance(source, Path)
        else source
    )
    with torch.no_grad():
        return greedy_tokens(lambda tokens_BL: model(tokens_BL).logits, prompt)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Replaces the stored tensors of a folder with one safetensors file."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns our warnings; transformers logs too, and other tests may have lowered the level."""
    ours = (record for record in caplog.records if record.name.startswith("eesd_dist."))
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


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


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_checkpoint_with_unknown_keys_generates_the_tokens_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = without_head(write_tiny_service(tmp_path / "tiny"))
    edit_config(folder, _model_name_or_path="example/base", padding_side="left", revision=3)
    config = EngineConfig.model_validate(
        {"model": {"path": str(folder), "ignore_config_keys": ["revision"]}}
    )
    assert generated(config, "the cat") == expected_of(folder, "the cat")
    assert "_model_name_or_path = 'example/base', padding_side = 'left'" in caplog.text


def test_a_checkpoint_with_a_larger_tokenizer_generates_the_tokens_of_transformers(
    tmp_path: Path,
) -> None:
    folder = without_head(write_tiny_service(tmp_path / "tiny"))
    file = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_tokens(["ilÖveyou"])
    backend.save(str(file))
    config = EngineConfig.model_validate({"model": {"path": str(folder)}})
    assert generated(config, "the cat") == expected_of(folder, "the cat")
    with pytest.raises(RequestError, match="found 'ilÖveyou', which is token 320"):
        generated(config, "the ilÖveyou")


def without_head(folder: Path) -> Path:
    """Removes the head, which is for the folder as it was."""
    shutil.rmtree(folder / "exit_head")
    return folder


def generated(config: EngineConfig, prompt: str) -> list[int]:
    with LLM(config) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        (completion,) = llm.generate(prompt, greedy)
    return [*completion.prompt_token_ids, *completion.outputs[0].token_ids]


def expected_of(folder: Path, prompt: str) -> list[int]:
    encode = AutoTokenizer.from_pretrained(folder, local_files_only=True).encode
    return their_tokens(folder, encode(prompt))


def compiled(name: str) -> str:
    return f"_orig_mod.{name}"


def compiled_layers(name: str) -> str:
    return re.sub(r"^(model\.layers\.\d+\.)", r"\1_orig_mod.", name)


def distributed(name: str) -> str:
    return f"module._orig_mod.{name}"


def sharded(name: str) -> str:
    return compiled_layers(name).replace(
        "_orig_mod.", "_fsdp_wrapped_module._checkpoint_wrapped_module."
    )


@pytest.mark.parametrize("wrap", [compiled, compiled_layers, distributed, sharded])
def test_names_with_the_prefixes_of_wrappers_are_read(
    tmp_path: Path, wrap: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path)
    rewrite(tmp_path, lambda stored: {wrap(name): stored[name] for name in stored})
    assert our_tokens(tmp_path) == their_tokens(model)
    assert logged(caplog) == []


def test_a_tensor_that_is_stored_with_and_without_a_prefix_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    name = "model.norm.weight"
    rewrite(tmp_path, lambda stored: stored | {f"_orig_mod.{name}": stored[name].clone()})
    with pytest.raises(CheckpointError, match=rf"_orig_mod\.{name}.* expected one tensor {name}"):
        our_tokens(tmp_path)


def max_model_len(folder: Path) -> int:
    model = {"path": str(folder), "head": None}
    return max_model_len_of(EngineConfig.model_validate({"model": model}))


@pytest.mark.parametrize(
    ("family", "num_positions"),
    [("llama, yarn", 4 * 64), ("llama, linear rope", 160), ("llama 3", 64), ("llama", 64)],
)
def test_rope_that_extends_the_positions_is_computed_to_their_end(
    tmp_path: Path, family: str, num_positions: int
) -> None:
    save_tiny_model(tmp_path, family, max_position_embeddings=64)
    assert ModelSpec.from_folder(tmp_path).max_position_embeddings == num_positions
    assert max_model_len(tmp_path) == num_positions
    prompt = LONG_PROMPT[: num_positions - NUM_TOKENS]
    assert our_tokens(tmp_path, prompt) == their_tokens(tmp_path, prompt)


@pytest.mark.parametrize(
    ("changes", "num_positions"),
    [
        ({}, 256),
        ({"n_positions": 200}, 200),
        ({"max_seq_len": 200, "seq_length": 190}, 190),
        ({"max_target_positions": 200, "max_sequence_length": 300}, 200),
        ({"max_seq_length": 201, "seq_len": None}, 201),
        ({"seq_len": 199}, 199),
        ({"model_max_length": 512}, 512),
        ({"model_max_length": 512, "seq_length": 128}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}, "seq_length": 128}, 320),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "model_max_length": 512}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, 256),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "original_max_position_embeddings": 32,
                "model_max_length": 512,
            },
            128,
        ),
    ],
)
def test_the_maximum_length_is_the_one_that_vllm_derives(
    tmp_path: Path, changes: Mapping[str, object], num_positions: int
) -> None:
    save_tiny_model(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps({**config, **changes}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 100}))
    assert ModelSpec.from_folder(tmp_path).max_position_embeddings == num_positions
    assert max_model_len(tmp_path) == num_positions
    assert read_shape(tmp_path).max_positions == num_positions


def test_a_length_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    edit_config(tmp_path, seq_length="long")
    for read in (ModelSpec.from_folder, max_model_len):
        with pytest.raises(CheckpointError, match="seq_length = 'long', expected a positive int"):
            read(tmp_path)
