"""Checks of a family, on random checkpoints that transformers writes and computes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from eesd_dist.backends.cpu.verifier import Verifier
from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Numerics,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.build import build_draft_shard
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import LocalEngine
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.sampling.rule import RowRule, choose
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import Stages

TOLERANCE = 1e-4
NUM_TOKENS = 75
EXIT_LAYER = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(seed=3, max_tokens=40)
SCATTERED = (7, 3, 4, 11, 0)


def eager(folder: Path, family: str, **sizes: object) -> PreTrainedModel:
    """Writes a model and reads it with the attention of transformers that computes everything."""
    save_tiny_model(folder, family, **sizes)
    return read_eager(folder)


def read_eager(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(tokens_BL).logits
    return logits_BLV


def greatest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def require_logits_of_transformers(
    model: PreTrainedModel, folder: Path, *, numerics: Numerics
) -> None:
    """Asserts that two spans give the logits, with the prompt in one piece or several."""
    tokens_BL = random_tokens(2, NUM_TOKENS)
    expected_BLV = logits_of(model, tokens_BL)
    assert model.config._attn_implementation == "eager"
    assert float(expected_BLV.std()) > 0.1
    for cut in (1, 2):
        stages = Stages.load(folder, cut=cut, numerics=numerics)
        whole_BLV = stages.run_without_pages(tokens_BL)
        assert greatest_difference(whole_BLV, expected_BLV) <= TOLERANCE
        for chunks in ([NUM_TOKENS], [30, 1, 1, 7, 1, 33, 1, 1]):
            logits_TV = stages.run_in_chunks(tokens_BL[0], pages=SCATTERED, chunks=chunks)
            assert greatest_difference(logits_TV, expected_BLV[0]) <= TOLERANCE


def require_logits_of_two_ranks(model: PreTrainedModel, folder: Path) -> None:
    """Asserts that two tensor-parallel ranks give the logits."""
    tokens_T = random_tokens(NUM_TOKENS)
    expected_TV = logits_of(model, tokens_T[None])[0]

    def rank(group: TensorGroup) -> Tensor:
        stages = Stages.load(folder, group=group)
        return stages.run_in_chunks(tokens_T, pages=range(5), chunks=[40, 1, 6, NUM_TOKENS - 47])

    shards = on_ranks(2, rank)
    assert [shard.shape[1] for shard in shards] == [48, 48]
    assert greatest_difference(torch.cat(shards, dim=1), expected_TV) <= TOLERANCE


def require_same_bits_in_a_batch(folder: Path, dtype: DType) -> None:
    """Asserts that a row has the same bits alone, in pieces of any size and among other requests'
    rows."""
    stages = Stages.load(folder, dtype=dtype)
    text, other = random_tokens(2, NUM_TOKENS)
    single_TV = stages.run_in_chunks(text, pages=range(5), chunks=[1] * NUM_TOKENS)
    for chunks in ([NUM_TOKENS], [17, 33, 25], [2, 5, 3, 40, 25]):
        logits_TV = stages.run_in_chunks(text, pages=(19, 30, 12, 14, 9), chunks=chunks)
        assert torch.equal(logits_TV, single_TV), chunks
    segments = [RowSegment(0, 50, range(20, 25)), RowSegment(60, 7, range(5))]
    logits_TV = stages.run(torch.cat([other[:50], text[60:67]]), segments)
    assert torch.equal(logits_TV[50:], single_TV[60:67])


def require_new_head_is_the_target(model: PreTrainedModel, folder: Path, kind: HeadKind) -> None:
    """Asserts that a new head on the last layer but one, written and read, gives the logits."""
    tokens_BL = random_tokens(2, NUM_TOKENS)
    expected_BLV = logits_of(model, tokens_BL)
    spec = ModelSpec.from_folder(folder)
    vocab = [1, 2, 5, 8, 13] if kind == "truncated" else None
    head = TrainableExitHead.from_target(folder, spec, EXIT_LAYER, head=kind, draft_vocab=vocab)
    head.save(folder / "head", dtype="float32")
    read = TrainableExitHead.read(folder / "head", target=spec, target_path=folder)
    span = Stages.load(folder, cut=EXIT_LAYER).draft
    logits_BLV = read.training_forward(span.forward_full(span.embed(tokens_BL)))
    expected_BLV = expected_BLV if vocab is None else expected_BLV[..., vocab]
    assert greatest_difference(logits_BLV, expected_BLV) <= TOLERANCE


@torch.no_grad()
def write_served(folder: Path, family: str, **sizes: object) -> Path:
    """Writes a target with a last layer that adds little, and a head that is often right."""
    model = save_tiny_model(folder, family, tie_word_embeddings=False, **sizes)
    norms = ModelSpec.from_folder(folder).traits.norms
    last = model.model.layers[EXIT_LAYER]
    if norms.after_attention is None:
        for product in (last.self_attn.o_proj, last.mlp.down_proj):
            product.weight.mul_(0.2)
    else:
        for name in (norms.after_attention, norms.after_mlp):
            weight_D = getattr(last, str(name)).weight
            weight_D.add_(norms.weight_offset).mul_(0.2).sub_(norms.weight_offset)
    model.save_pretrained(folder)
    spec = ModelSpec.from_folder(folder)
    head = TrainableExitHead.from_target(folder, spec, EXIT_LAYER, head="own")
    noise_VD = torch.randn(head.lm_head_VD.shape, generator=torch.Generator().manual_seed(0))
    head.lm_head_VD.add_(0.3 * head.lm_head_VD.std() * noise_VD)
    head.save(folder / "exit_head", dtype="float32")
    return folder


def require_texts_of_the_rule(
    served: Path, sampling: SamplingParams, *, in_compiled_rounds: bool
) -> None:
    """Asserts that an engine writes what the rule chooses from the logits of transformers, with
    speculation and without, and that drafts are sometimes right.

    `in_compiled_rounds`: drafting and verification are one compiled call each.
    """
    prompt = random_tokens(30).tolist()
    text = _text_of_the_rule(read_eager(served), prompt, sampling)
    assert len(set(text[len(prompt) :])) > 10
    config = EngineConfig(
        model=ModelConfig(path=served, head=served / "exit_head", dtype="float32"),
        cache=CacheConfig(num_pages=32, page_size=16),
        scheduler=SchedulerConfig(prefill_chunk=24),
        speculation=SpeculationConfig(max_draft_tokens=5),
    )
    shard = build_draft_shard(config, layout_of(config), SingleGroup())
    has_verifier = Verifier.of(Stages.load(served).verify) is not None
    assert (shard.drafter is not None, has_verifier) == (in_compiled_rounds,) * 2
    llm = LocalEngine(config)
    for speculation in (SpeculationParams(mode="off"), SpeculationParams(controller="fixed")):
        request = Request(
            request_id=RequestId("one"),
            prompt=tuple(TokenId(token) for token in prompt),
            sampling=sampling,
            speculation=speculation,
        )
        (done,) = llm.generate([request])
        assert [*prompt, *done.tokens] == text, speculation
    assert 0.2 * sum(done.drafted) < sum(done.accepted) < sum(done.drafted)


def _text_of_the_rule(
    model: PreTrainedModel, prompt: Sequence[int], sampling: SamplingParams
) -> list[int]:
    text = list(prompt)
    for position in range(len(prompt), len(prompt) + sampling.max_tokens):
        logits_SV = logits_of(model, torch.tensor([text]))[0, -1:]
        rule = RowRule.of(sampling, position=position, num_prompt=len(prompt))
        text += choose(logits_SV, [rule]).tokens.tolist()
    return text
