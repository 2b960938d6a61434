"""Two consecutive spans equal the model of transformers."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eesd_dist.backends.cpu import packed
from eesd_dist.config import Numerics
from eesd_dist.transport.contracts import TensorGroup
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_checkpoints import FAMILIES, save_tiny_model
from tests.unit.model.paged_stages import Stages

TOLERANCE = 1e-4
NUM_TOKENS = 75
SCATTERED = (7, 3, 4, 11, 0)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(5))


def greatest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_two_spans_give_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path, family)
    tokens_BL = random_tokens(2, NUM_TOKENS)
    with torch.no_grad():
        expected_BLV = model(tokens_BL).logits
    assert float(expected_BLV.std()) > 0.1
    stages = Stages.load(tmp_path, cut=2)

    without_pages_BLV = stages.run_without_pages(tokens_BL)
    at_once_TV = stages.run_in_chunks(tokens_BL[0], pages=range(5), chunks=[NUM_TOKENS])
    chunks = [30, 1, 1, 7, 1, 33, 1, 1]
    piecewise_TV = stages.run_in_chunks(tokens_BL[0], pages=SCATTERED, chunks=chunks)

    assert greatest_difference(without_pages_BLV, expected_BLV) <= TOLERANCE
    assert greatest_difference(at_once_TV, expected_BLV[0]) <= TOLERANCE
    assert greatest_difference(piecewise_TV, expected_BLV[0]) <= TOLERANCE


@pytest.mark.parametrize("family", ["mistral, sliding window", "llama 3"])
def test_fast_numerics_compute_the_same_model(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path, family)
    tokens_T = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        expected_TV = model(tokens_T[None]).logits[0]
    stages = Stages.load(tmp_path, numerics="fast")
    logits_TV = stages.run_in_chunks(tokens_T, pages=SCATTERED, chunks=[40, 1, 6, 28])
    assert greatest_difference(logits_TV, expected_TV) <= TOLERANCE


@pytest.mark.parametrize(
    "family", ["llama, biases", "llama, tied", "qwen2", "qwen3", "mistral, sliding window"]
)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path, family)
    tokens_T = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        expected_TV = model(tokens_T[None]).logits[0]

    def rank(group: TensorGroup) -> Tensor:
        stages = Stages.load(tmp_path, group=group)
        chunks = [40, 1, 6, NUM_TOKENS - 47]
        return stages.run_in_chunks(tokens_T, pages=range(5), chunks=chunks)

    shards = on_ranks(2, rank)
    assert [shard.shape[1] for shard in shards] == [48, 48]
    assert greatest_difference(torch.cat(shards, dim=1), expected_TV) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "llama 3", "llama, yarn", "qwen2"])
def test_the_older_config_keys_mean_the_same(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path, family)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    file.write_text(json.dumps(config))
    tokens_L = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        expected_LV = model(tokens_L[None]).logits[0]
    logits_LV = Stages.load(tmp_path).run_without_pages(tokens_L[None])[0]
    assert greatest_difference(logits_LV, expected_LV) <= TOLERANCE


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "ministral, a window in some layers")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    file.write_text(json.dumps(config))
    tokens_L = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        expected_LV = model(tokens_L[None]).logits[0]
    stages = Stages.load(tmp_path)
    logits_LV = stages.run_in_chunks(tokens_L, pages=SCATTERED, chunks=[40, 1, 6, 28])
    assert greatest_difference(logits_LV, expected_LV) <= TOLERANCE

    kinds = config.pop("layer_types")
    file.write_text(json.dumps(config))
    windowed_LV = Stages.load(tmp_path).run_without_pages(tokens_L[None])[0]
    assert kinds == ["sliding_attention", "full_attention", "sliding_attention"]
    assert greatest_difference(windowed_LV[:21], expected_LV[:21]) <= TOLERANCE
    assert greatest_difference(windowed_LV[21:], expected_LV[21:]) > 0.1


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_float16_weights_are_computed_with_as_they_are(tmp_path: Path, numerics: Numerics) -> None:
    model = save_tiny_model(tmp_path)
    tokens_L = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
        expected_LV = model(tokens_L[None]).logits[0]
    model.half().save_pretrained(tmp_path)
    stages = Stages.load(tmp_path, dtype="float16", numerics=numerics)
    logits_LV = stages.run_in_chunks(tokens_L, pages=range(5), chunks=[NUM_TOKENS])
    assert greatest_difference(logits_LV, expected_LV) <= TOLERANCE


def test_bfloat16_weights_are_computed_with_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path)
    tokens_L = random_tokens(NUM_TOKENS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        expected_LV = model(tokens_L[None]).logits[0]
        rounded_LV = model.bfloat16()(tokens_L[None]).logits[0].float()

    def found() -> torch.Tensor:
        stages = Stages.load(tmp_path, dtype="bfloat16")
        return stages.run_in_chunks(tokens_L, pages=range(5), chunks=[NUM_TOKENS])

    # A processor that multiplies bfloat16 rounds the inputs of products: less than the library,
    # which rounds every result too.
    error, library_error = (
        float((x_LV - expected_LV).square().mean().sqrt()) for x_LV in (found(), rounded_LV)
    )
    assert error <= library_error
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: False)
    assert greatest_difference(found(), expected_LV) <= TOLERANCE


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens_L = random_tokens(20)
    with torch.no_grad():
        expected_LV = model(tokens_L[None]).logits[0]
    logits_LV = Stages.load(tmp_path).run_without_pages(tokens_L[None])[0]
    assert greatest_difference(logits_LV, expected_LV) <= TOLERANCE
