"""A path that is no folder of a whole model in safetensors: what was found, and what to do."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from eesd_dist import LLM, EngineConfig, SamplingParams
from eesd_dist.engine.build import check_model
from eesd_dist.errors import CheckpointError
from eesd_dist.model.checkpoint_folder import local_folder
from eesd_dist.model.max_len import max_model_len_of
from serve_app.batch.job import BatchOptions
from serve_app.batch.start import run_in_process
from serve_app.cli.configuration import EngineFlags, GenerateOptions, config_of
from serve_app.cli.terminal import stream_text
from serve_app.config import ServiceConfig
from serve_app.service.serving import _check_early
from tests.support.fake_hub import fake_hub
from tests.support.tiny_service import write_tiny_service

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A model's folder, to be spoilt."""
    return shutil.copytree(whole, tmp_path / "tiny")


def config_for(path: Path) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"path": str(path), "head": None}})


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        check_model(config_for(path))
    return str(raised.value)


def only(name: str) -> Spoil:
    """Returns what leaves a folder with one file, and without config.json and safetensors."""

    def spoil(folder: Path) -> None:
        for file in folder.iterdir():
            if file.is_file():
                file.unlink()
        (folder / name).write_bytes(b"content")

    return spoil


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "example/base", "peft_type": "LORA"})
    )


def hub_cache(folder: Path) -> None:
    only("README.md")(folder)
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "reason", "advice"),
    [
        (adapter, "found a LoRA adapter of example/base, expected a whole", "merge_and_unload"),
        (
            only("model-Q4_K_M.gguf"),
            r"found (GGUF weights \(model-Q4_K_M.gguf\)|a file that begins with b'cont')",
            "give the file itself",
        ),
        (only("consolidated.00.pth"), r"found weights in the layout of .*\(cons", "config.json$"),
        (only("README.md"), "found no config.json", "expected a Hugging Face model folder$"),
        (hub_cache, "found no config.json", "give the snapshot in it: .*/snapshots/abc$"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused_with_what_to_do(
    folder: Path, spoil: Spoil, reason: str, advice: str
) -> None:
    spoil(folder)
    for read in (check_model, max_model_len_of):
        with pytest.raises(CheckpointError, match=reason) as raised:
            read(config_for(folder))
        assert raised.match(advice)
    with pytest.raises(CheckpointError, match=reason):
        LLM(folder)


def test_every_command_names_an_adapter_before_what_the_adapter_lacks(tmp_path: Path) -> None:
    adapter(tmp_path)
    config = ServiceConfig(engine=config_for(tmp_path))
    options = GenerateOptions(prompt="x")
    ignored: list[str] = []
    notes = {"write": ignored.append, "note": ignored.append}

    def generate() -> None:
        stream_text(config.engine, options, prompt="x", seed=0, in_colour=False, **notes)

    def batch() -> None:
        rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
        files = (str(rows), str(answers))
        job = run_in_process(*files, config=config, options=BatchOptions(), concurrency=1)
        asyncio.run(job)

    def serve() -> None:
        _check_early(config, is_ours=False)

    for run in (generate, batch, serve, lambda: LLM(tmp_path)):
        with pytest.raises(CheckpointError, match="found a LoRA adapter of example/base"):
            run()


@pytest.mark.parametrize(
    ("name", "reason", "advice"),
    [
        ("model.gguf", "found GGUF weights (model.gguf)", "give the file itself"),
        ("pytorch_model-00001-of-00002.bin", "found PyTorch's pickled weights (", "save_pretr"),
        ("README.md", "found no safetensors", "expected model.safetensors or model.safet"),
    ],
)
def test_a_folder_of_other_weights_is_refused_with_what_to_do(
    folder: Path, name: str, reason: str, advice: str
) -> None:
    (folder / "model.safetensors").rename(folder / name)
    assert reason in refusal(folder)
    assert advice in refusal(folder)


def test_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name, words in (("model.gguf", "found GGUF weights"), ("x.txt", "found a file, expected")):
        (tmp_path / name).write_text("content")
        assert words in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [
        ("q_proj.qweight", "found weights quantized by GPTQ or AWQ ("),
        ("q_proj.weight_packed", "found quantized weights ("),
        ("q_proj.weight_scale_inv", "found quantized weights ("),
        ("q_proj.weight.quant_state.bitsandbytes__nf4", "found weights quantized by bitsandbytes"),
        ("q_proj.lora_A.default.weight", "found a LoRA adapter next to its base model ("),
    ],
)
def test_quantized_and_adapted_tensors_are_named_where_the_configuration_is_silent(
    folder: Path, suffix: str, reason: str
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    weight = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    tensors[f"model.layers.1.self_attn.{suffix}"] = weight.to(torch.int32)
    save_file(tensors, file)
    message = refusal(folder)
    assert reason in message
    assert suffix in message
    assert ("use the checkpoint that is not quantized" in message) != ("merge it" in message)


def test_a_quantization_of_the_configuration_is_named_with_what_to_do(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "modules": ["x"] * 999}
    file.write_text(json.dumps(config))
    assert refusal(folder) == (
        f"{file}: found quantization_config of the method 'awq', expected plain float weights; use "
        "the checkpoint that is not quantized"
    )


@pytest.fixture(scope="module")
def hub_model(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(whole, tmp_path_factory.mktemp("hub") / "tiny")
    (folder / "consolidated.safetensors").write_bytes(b"a copy")
    (folder / "pytorch_model.bin").write_bytes(b"a copy")
    return folder


@pytest.fixture(scope="module")
def hub_cache_folder(hub_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's cache of a process that has downloaded `example/tiny`."""
    home = tmp_path_factory.mktemp("home")
    script = (
        "from pathlib import Path\n"
        "from eesd_dist.model.checkpoint_folder import local_folder\n"
        "print(local_folder(Path('example/tiny')))\n"
    )
    with fake_hub("example/tiny", hub_model) as url:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(home)
    return home / "hub"


def test_a_name_of_the_hub_is_downloaded_without_what_is_not_read(
    hub_cache_folder: Path, hub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_cache_folder))
    folder = local_folder(Path("example/tiny"))
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert not names & {"consolidated.safetensors", "pytorch_model.bin"}
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM("example/tiny") as downloaded, LLM(hub_model) as local:
        (text,), (expected,) = (llm.generate("the cat", greedy) for llm in (downloaded, local))
    assert text.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_command_serves_a_model_of_the_hub_under_its_name(
    hub_cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_cache_folder))
    config = config_of(EngineFlags(model=Path("example/tiny")))
    assert (config.engine.model.path / "config.json").is_file()
    assert config.served_model_name == "example/tiny"
    custom = config_of(EngineFlags(model=Path("example/tiny"), set=("model_name=mine",)))
    assert custom.served_model_name == "mine"


@pytest.mark.parametrize("has_library", [True, False])
def test_a_name_of_the_hub_without_the_hub_is_one_error_with_what_to_do(
    has_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    if not has_library:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError) as raised:
        LLM("example/other")
    message = str(raised.value)
    assert message.startswith("example/other: found no such folder, and no model of this name from")
    assert ("huggingface_hub is not installed" in message) != has_library
    assert "download it with `hf download example/other --local-dir FOLDER`, and" in message
    assert "\n" not in message


def test_a_name_of_the_hub_in_a_process_that_downloads_nothing_is_explained() -> None:
    assert refusal(Path("example/other")) == (
        "example/other: found no such folder, expected a checkpoint folder; download it with "
        "`hf download example/other --local-dir FOLDER`, and give that folder"
    )
    assert refusal(Path("/nowhere/at/all")) == (
        "/nowhere/at/all: found no such folder, expected a checkpoint folder"
    )
