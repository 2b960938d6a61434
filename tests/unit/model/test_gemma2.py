"""Gemma 2 through the generic layers equals the model of transformers."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Numerics,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import CheckpointError
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.families.gemma2 import GEMMA2
from eesd_dist.model.heads.head_config import HeadKind, single_layer_config
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.sampling.rule import RowRule, choose
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.thread_group import on_ranks
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from tests.support.fake_cuda import GPU, HostCopies, fake_cuda
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import Stages
from tests.unit.model.test_fake_cuda import span_of

TOLERANCE = 1e-4
NUM_TOKENS = 75
WINDOW = 21
EXIT_LAYER = 2
SCATTERED = (7, 3, 4, 11, 0)
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "as it is": {},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
    "one KV head, other windows": {
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}


def eager(folder: Path, **sizes: object) -> PreTrainedModel:
    save_tiny_model(folder, "gemma2", **sizes)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(tokens_BL).logits
    return logits_BLV


def greatest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_spans_give_the_logits_of_transformers_past_the_window(
    tmp_path: Path, variant: str, numerics: Numerics
) -> None:
    model = eager(tmp_path, **VARIANTS[variant])
    tokens_BL = random_tokens(2, NUM_TOKENS)
    expected_BLV = logits_of(model, tokens_BL)
    assert model.config._attn_implementation == "eager"
    assert float(expected_BLV.std()) > 0.1
    for cut in (1, 2):
        stages = Stages.load(tmp_path, cut=cut, numerics=numerics)
        whole_BLV = stages.run_without_pages(tokens_BL)
        assert greatest_difference(whole_BLV, expected_BLV) <= TOLERANCE
        for pieces in ([NUM_TOKENS], [30, 1, 1, 7, 1, 33, 1, 1]):
            found_TV = stages.run_in_pieces(tokens_BL[0], pages=SCATTERED, pieces=pieces)
            assert greatest_difference(found_TV, expected_BLV[0]) <= TOLERANCE


def test_the_window_and_both_caps_matter_to_these_models(tmp_path: Path) -> None:
    tokens_BL = random_tokens(1, NUM_TOKENS)
    expected_BLV = logits_of(eager(tmp_path), tokens_BL)
    assert float(expected_BLV.abs().max()) > 2.0  # with a cap at 4, tanh is far from its argument
    for change in (
        {"sliding_window": NUM_TOKENS},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
    ):
        other_BLV = logits_of(eager(tmp_path, **change), tokens_BL)
        assert greatest_difference(other_BLV[:, WINDOW:], expected_BLV[:, WINDOW:]) > 0.1, change


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    tokens_T = random_tokens(NUM_TOKENS)
    expected_TV = logits_of(eager(tmp_path), tokens_T[None])[0]

    def rank(group: TensorGroup) -> Tensor:
        stages = Stages.load(tmp_path, group=group)
        return stages.run_in_pieces(tokens_T, pages=range(5), pieces=[40, 1, 6, NUM_TOKENS - 47])

    parts = on_ranks(2, rank)
    assert [part.shape[1] for part in parts] == [48, 48]
    assert greatest_difference(torch.cat(parts, dim=1), expected_TV) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 6, "num_key_value_heads": 4}], ids=["", "6"])
def test_a_row_has_the_same_bits_alone_and_among_others(
    tmp_path: Path, dtype: DType, sizes: dict[str, object]
) -> None:
    save_tiny_model(tmp_path, "gemma2", **sizes)
    stages = Stages.load(tmp_path, dtype=dtype)
    one, other = random_tokens(2, NUM_TOKENS)
    alone_TV = stages.run_in_pieces(one, pages=range(5), pieces=[1] * NUM_TOKENS)
    for pieces in ([NUM_TOKENS], [17, 33, 25], [2, 5, 3, 40, 25]):
        found_TV = stages.run_in_pieces(one, pages=(19, 30, 12, 14, 9), pieces=pieces)
        assert torch.equal(found_TV, alone_TV), pieces
    segments = [RowSegment(0, 50, range(20, 25)), RowSegment(60, 7, range(5))]
    found_TV = stages.run(torch.cat([other[:50], one[60:67]]), segments)
    assert torch.equal(found_TV[50:], alone_TV[60:67])


@pytest.mark.parametrize("kind", ["shared", "own", "truncated"])
def test_a_new_head_on_the_last_but_one_layer_is_the_target(tmp_path: Path, kind: HeadKind) -> None:
    tokens_BL = random_tokens(2, NUM_TOKENS)
    expected_BLV = logits_of(eager(tmp_path / "target"), tokens_BL)
    spec = ModelSpec.from_folder(tmp_path / "target")
    assert spec.sliding_windows == (WINDOW, None, WINDOW)
    vocab = [1, 2, 5, 8, 13] if kind == "truncated" else None
    made = TrainableExitHead.from_target(
        tmp_path / "target", spec, EXIT_LAYER, head=kind, draft_vocab=vocab
    )
    made.save(tmp_path / "head", dtype="float32")
    read = TrainableExitHead.read(tmp_path / "head", target=spec, target_path=tmp_path / "target")
    span = Stages.load(tmp_path / "target", cut=EXIT_LAYER).draft
    logits_BLV = read.training_forward(span.forward_full(span.embed(tokens_BL)))
    expected_BLV = expected_BLV if vocab is None else expected_BLV[..., vocab]
    assert greatest_difference(logits_BLV, expected_BLV) <= TOLERANCE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a target with a last layer that adds little, and a head that is often right."""
    folder = tmp_path_factory.mktemp("gemma2")
    model = save_tiny_model(
        folder, "gemma2", final_logit_softcapping=9.0, tie_word_embeddings=False
    )
    with torch.no_grad():
        last = model.model.layers[EXIT_LAYER]
        for norm in (last.post_attention_layernorm, last.post_feedforward_layernorm):
            norm.weight.add_(1.0).mul_(0.2).sub_(1.0)  # the norm's factor is 1 + weight
    model.save_pretrained(folder)
    spec = ModelSpec.from_folder(folder)
    head = TrainableExitHead.from_target(folder, spec, EXIT_LAYER, head="own")
    with torch.no_grad():
        noise_VD = torch.randn(head.lm_head_VD.shape, generator=torch.Generator().manual_seed(0))
        head.lm_head_VD.add_(0.3 * head.lm_head_VD.std() * noise_VD)
    head.save(folder / "exit_head", dtype="float32")
    return folder


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(seed=3, max_tokens=40)],
    ids=["greedy", "seeded"],
)
def test_speculation_writes_what_the_rule_chooses_from_the_logits_of_transformers(
    served: Path, sampling: SamplingParams
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        served, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = random_tokens(30).tolist()
    text = list(prompt)
    for position in range(len(prompt), len(prompt) + sampling.max_tokens):
        logits_SV = logits_of(model, torch.tensor([text]))[0, -1:]
        rule = RowRule.of(sampling, position=position, num_prompt=len(prompt))
        text += choose(logits_SV, [rule]).tokens.tolist()
    assert len(set(text[len(prompt) :])) > 10
    llm = LocalEngine(
        EngineConfig(
            model=ModelConfig(path=served, head=served / "exit_head", dtype="float32"),
            cache=CacheConfig(num_pages=32, page_size=16),
            scheduler=SchedulerConfig(prefill_chunk=24),
            speculation=SpeculationConfig(max_draft_tokens=5),
        )
    )
    ways = {
        "plain": SpeculationParams(mode="off"),
        "drafted": SpeculationParams(controller="fixed"),
    }
    for name, speculation in ways.items():
        request = Request(
            request_id=RequestId(name),
            prompt=tuple(TokenId(token) for token in prompt),
            sampling=sampling,
            speculation=speculation,
        )
        (done,) = llm.generate([request])
        assert [*prompt, *done.tokens] == text, name
    assert 0.2 * sum(done.drafted) < sum(done.accepted) < sum(done.drafted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_span_and_its_logits_stay_on_the_gpu(tmp_path: Path, dtype: DType) -> None:
    save_tiny_model(tmp_path, "gemma2")
    spec = ModelSpec.from_folder(tmp_path)
    with fake_cuda():
        span = span_of(tmp_path, spec, dtype)
        with HostCopies() as copies, torch.inference_mode():
            rows = RowPlan.build(
                [RowSegment(20, 25, (1, 2, 3))], page_size=16, device=GPU, numerics="invariant"
            )
            logits_TV = span.logits(span.forward(span.embed(torch.arange(25, device=GPU)), rows))
        assert (logits_TV.device, logits_TV.shape) == (GPU, (25, 96))
        assert copies.to_the_host == []


# In the form of the published files for 2 and 27 billion weights.
PUBLISHED: Mapping[str, object] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
LARGE = {
    "_attn_implementation": "eager",
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "sliding_window_size": 4096,
}
FILE = Path("config.json")


def test_the_published_configs_pass_and_mean_what_the_paper_says() -> None:
    small = ModelSpec.from_config(PUBLISHED, file=FILE)
    assert small.tie_word_embeddings
    assert small.sliding_windows == (4096, None) * 13
    assert small.traits.embedding_scale == 48.0
    assert (small.traits.scores.scale, small.traits.scores.softcap) == (1 / 16, 50.0)
    assert small.traits.logit_softcap == 30.0
    large = ModelSpec.from_config({**PUBLISHED, **LARGE}, file=FILE)
    assert large.traits.scores.scale == 1 / 12
    last = ModelSpec.from_config(single_layer_config(PUBLISHED, small), file=FILE)
    assert last.sliding_windows == (None,)
    unsaid = {key: value for key, value in PUBLISHED.items() if key not in GEMMA2.defaults}
    assert ModelSpec.from_config(unsaid, file=FILE) == small


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu', expected gelu_pytorch_tanh"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu', expected gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0, expected a positive number"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping = -1"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"model_type": "gemma"}, "model_type = 'gemma' with architecture Gemma2ForCausalLM"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        ModelSpec.from_config({**PUBLISHED, **change}, file=FILE)
