"""GGUF files as models: weights, texts and tokenizer, and files that are refused."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cluster.planning.checkpoint import read_shape
from eesd_dist import LLM, SamplingParams
from eesd_dist.command_line import run_app
from eesd_dist.errors import CheckpointError
from eesd_dist.model.checkpoint_folder import local_folder
from eesd_dist.model.gguf.folder import checkpoint_of
from eesd_dist.model.gguf.header import read_header
from eesd_dist.model.gguf.tokenizer import write_tokenizer
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import Checkpoint
from eesd_dist.text.tokenizer import Tokenizer
from serve_app.cli.configuration import EngineFlags, config_of
from serve_app.cli.main import app
from serve_app.distill.commands import step_program
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_tokenizer import TEXT, write_byte_level

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: x for shard in folder.glob("*.safetensors") for name, x in load_file(shard).items()
    }


@pytest.mark.parametrize("type_", TYPES)
def test_weights_are_bit_for_bit_those_of_ggufs_dequantiser(type_: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, type_)
    weights = weights_of(checkpoint_of(file))
    reader = GGUFReader(file)
    expected = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
    }
    assert len(weights) == len(expected)
    for name, stored in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.0.mlp.up_proj", "blk.0.ffn_up"),
        ("model.layers.1.self_attn.v_proj", "blk.1.attn_v"),
        ("model.layers.1.input_layernorm", "blk.1.attn_norm"),
    ):
        x = weights[f"{name}.weight"].float().numpy()
        assert x.tobytes() == np.ascontiguousarray(expected[f"{stored}.weight"]).tobytes()
    for name, stored, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
        x = weights[f"model.layers.1.self_attn.{name}.weight"].float().numpy()
        rows = expected[f"blk.1.{stored}.weight"].reshape(heads, -1, 2, x.shape[1])
        assert x.tobytes() == rows.swapaxes(1, 2).tobytes()
    stored_type = {"F16": "F16", "BF16": "BF16"}.get(type_, "F32")
    with Checkpoint(checkpoint_of(file)) as checkpoint:
        assert checkpoint.stored_type("model.embed_tokens.weight") == stored_type


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_answers_as_the_model_that_it_was_made_of(
    model_type: str, tied: bool, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.gguf"
    model = write_tiny_gguf(file, model_type=model_type, tied=tied)
    prompt = Tokenizer.load(checkpoint_of(file)).encode("the quick brown")
    with LLM(file, dtype="float32") as llm:
        (text,) = llm.generate("the quick brown", SamplingParams(temperature=0.0, max_tokens=12))
    output = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=0
    )
    assert list(text.outputs[0].token_ids) == output[0, len(prompt) :].tolist()


def test_transformers_reads_the_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several shards."""
    monkeypatch.setattr("eesd_dist.model.gguf.folder._SHARD_BYTES", 1 << 20)
    folder = checkpoint_of(file)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = write_tiny_gguf(file.with_name("same.gguf"))
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(x, state[name]) for name, x in expected.state_dict().items())


def test_tokenizer_and_template_are_those_of_the_file(file: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint_of(file))
    expected = Tokenizer.load(write_byte_level(tmp_path / "tokenizer"))
    chat = [{"role": "user", "content": "the cat"}]
    for text in [*TEXT, "naïve <|end|> 12 + 7"]:
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode_chat(chat) == expected.encode_chat(chat)
    assert tokenizer.eos_token_ids == expected.eos_token_ids
    assert tokenizer.special_token_ids == expected.special_token_ids


def test_a_file_or_its_folder_is_converted_once(file: Path, cache: Path) -> None:
    folder = local_folder(file)
    assert folder.parent == cache / "models"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert local_folder(file.parent) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert ModelSpec.from_folder(folder).num_layers == 2
    assert read_shape(folder).num_layers == 2
    config = config_of(EngineFlags(model=file))
    assert config.engine.model.path == folder
    assert config.served_model_name == "tiny"


def test_commands_take_a_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "--model", str(file), "--exit-layer", "1", "--acceptance", "0.5", "--json"]
    assert run_app(app, plan, program="eesd") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*TEXT, "more"]))
    dry_run = ["--model", str(file), "--prompts", str(prompts), "--exit", "1", "--dry-run"]
    options = ["--out", str(tmp_path / "head"), "--max-tokens", "8", "--held-out", "2"]
    assert run_app(step_program("run"), dry_run + options, program="run") == 0
    assert "tokens" in capsys.readouterr().out


def test_a_changed_file_is_another_model(file: Path) -> None:
    folder = checkpoint_of(file)
    write_tiny_gguf(file, "Q8_0")
    assert checkpoint_of(file) != folder


def test_the_downloaded_model_has_a_name(file: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such file.*download it with `make model`"):
        local_folder(Path("smollm2"))
    (cache / "models").mkdir(parents=True)
    downloaded = file.rename(cache / "models" / "SmolLM2-135M-Instruct.gguf")
    assert local_folder(Path("smollm2")) == checkpoint_of(downloaded)
    assert config_of(EngineFlags(model=Path("smollm2"))).served_model_name == "smollm2"


def test_several_files_are_one_error(file: Path) -> None:
    write_tiny_gguf(file.with_name("other.gguf"))
    with pytest.raises(CheckpointError, match=r"2 GGUF files: other\.gguf, tiny\.gguf.*give one"):
        local_folder(file.parent)


def test_an_interrupted_conversion_leaves_no_folder(file: Path, cache: Path) -> None:
    """The process is killed when the first weights are written; the next one converts."""
    script = (
        "import os, sys, pathlib\n"
        "from eesd_dist.model.gguf import folder\n"
        "folder.save_file = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "folder.checkpoint_of(pathlib.Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, file], check=False, timeout=120)
    assert done.returncode == -9
    assert [path.name[0] for path in (cache / "models").iterdir()] == [".", "."]
    folder = checkpoint_of(file)
    assert sorted(path.name for path in (cache / "models").iterdir() if path.is_dir()) == [
        folder.name
    ]
    assert ModelSpec.from_folder(folder).num_layers == 2


Spoil = Callable[[bytes], bytes]


def with_number(needle: bytes, form: str, number: int, *, skip: int = 0) -> Spoil:
    """Returns what replaces the number after these bytes."""

    def spoil(content: bytes) -> bytes:
        at = content.index(needle) + len(needle) + skip
        size = struct.calcsize(f"<{form}")
        return content[:at] + struct.pack(f"<{form}", number) + content[at + size :]

    return spoil


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "empty": (lambda content: b"", "an empty file"),
    "another format": (lambda content: b"PK" + content[2:], "a file that begins with b'PK"),
    "another version": (with_number(b"GGUF", "I", 77), "GGUF version 77"),
    "cut in the header": (lambda content: content[:100], "a complete file"),
    "cut in the weights": (lambda content: content[:-5000], "a complete file"),
    "countless tensors": (with_number(b"GGUF", "Q", 2**62, skip=4), "a complete file"),
    "countless entries": (with_number(b"GGUF", "Q", 2**62, skip=12), "a complete file"),
    "a huge text": (with_number(b"general.architecture", "Q", 2**60, skip=4), "a text of"),
    "a huge array": (with_number(b"tokenizer.ggml.tokens", "Q", 2**60, skip=8), "entries"),
    "an array of arrays": (with_number(b"ggml.token_type", "I", 9, skip=4), "of type 9"),
    "an unknown type": (with_number(b"ggml.token_type", "I", 99, skip=4), "of type 99"),
    "a huge tensor": (with_number(b"token_embd.weight", "Q", 2**61, skip=4), "a complete file"),
    "many dimensions": (with_number(b"token_embd.weight", "I", 2**30), "dimensions"),
    "an unknown tensor type": (with_number(b"token_embd.weight", "I", 21, skip=20), "of type 21"),
    "overlapping tensors": (
        with_number(b"blk.1.ffn_up.weight", "Q", 0, skip=24),
        "over another tensor",
    ),
    "a start after the end": (
        with_number(b"blk.1.ffn_up.weight", "Q", 2**63, skip=24),
        "a complete file",
    ),
    "no layers": (with_number(b"llama.block_count", "I", 0, skip=4), "block_count 0"),
    "countless layers": (with_number(b"llama.block_count", "I", 2**31, skip=4), "block_count"),
    "no heads": (with_number(b"attention.head_count", "I", 0, skip=4), "head_count 0"),
    "odd text": (lambda content: content.replace(b"the", b"t\xff\xff"), "not UTF-8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_error(name: str, file: Path, cache: Path) -> None:
    spoil, says = HOSTILE[name]
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CheckpointError, match=says) as raised:
        local_folder(file)
    assert "tiny.gguf" in str(raised.value)
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_any_changed_byte_of_the_header_is_read_or_refused(file: Path) -> None:
    """No other exception, no endless loop, no large allocation."""
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    end = content.index(b"blk.1.") + 200
    num_errors = 0
    for at in rng.integers(0, end, 400).tolist():
        file.write_bytes(content[:at] + bytes([int(rng.integers(256))]) + content[at + 1 :])
        try:
            read_header(file)
        except CheckpointError:
            num_errors += 1
    assert num_errors > 10


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"llama.rope.scaling.type = 'yarn'.*not computed"),
        ({"llama.expert_count": 8}, r"llama.expert_count = 8"),
        ({"llama.vocab_size": 7}, r"llama.vocab_size 7"),
        ({"general.alignment": 3}, r"general.alignment 3"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, r"unknown_token_id 1000000"),
    ],
)
def test_what_is_not_computed_is_refused(
    metadata: dict[str, int | str], says: str, tmp_path: Path
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=says):
        checkpoint_of(tmp_path / "tiny.gguf")


def test_scaled_positions_of_llama_3_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"a tensor rope_freqs.weight.*unscaled positions"):
        checkpoint_of(tmp_path / "tiny.gguf")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    file = tmp_path / "tiny.gguf"
    file.write_bytes(file.read_bytes().replace(b"llama", b"lama2", 1))
    with pytest.raises(CheckpointError, match=r"'lama2', expected one of llama, qwen2, qwen3"):
        checkpoint_of(file)


def test_a_cache_that_cannot_be_written_is_one_error(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "taken"))
    with pytest.raises(CheckpointError, match=r"set EESD_CACHE_DIR"):
        checkpoint_of(file)


def test_a_tokenizer_with_byte_fallback_is_that_of_its_scores(tmp_path: Path) -> None:
    """Pieces of a SentencePiece model: merges follow from the scores, bytes from their tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁the", "▁t", "he", "▁", "t", "h", "e", "c", "a"]
    scores = [0.0] * len(tokens) + [-3.0, -2.0, -1.0, *(-10.0 - at for at in range(6))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *words],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert write_tokenizer(tmp_path / "x.gguf", metadata, tmp_path) == len(tokens) + len(words)
    tokenizer = Tokenizer.load(tmp_path)
    ids = {token: id_ for id_, token in enumerate([*tokens, *words])}
    # "he" has the best score, then "▁t", and both make "▁the".
    assert tokenizer.encode("the cat") == tuple(ids[x] for x in ("<s>", "▁the", "▁", "c", "a", "t"))
    assert tokenizer.encode("é", add_special_tokens=False)[1:] == (ids["<0xC3>"], ids["<0xA9>"])
    for text in ("the cat", "naïve 12", " a"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
