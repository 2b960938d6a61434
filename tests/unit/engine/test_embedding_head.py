"""A head that reads embeddings drafts as it was trained to, and changes no text."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.distill.target import FrozenTarget, target_embedding
from eesd_dist.engine.build import build_draft_engine, build_verify_stage
from eesd_dist.engine.local import LocalEngine
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import SpeculationParams
from tests.support.drafters import EXIT_LAYER
from tests.unit.engine.test_exactness import CONTROLLERS, SAMPLING, requests, texts
from tests.unit.engine.test_overlap import drain

MakeReading = Callable[..., EngineConfig]
LENGTH = 5


@pytest.fixture(scope="module")
def reading_head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a head that chooses like the target except for its embedding input: often right, not
    always."""
    head = TrainableExitHead.from_target(
        target, ModelSpec.from_folder(target), EXIT_LAYER, head="own", reads_embedding=True
    )
    assert head.embedding_DD is not None
    with torch.no_grad():
        head.embedding_DD.normal_(0.0, 0.12, generator=torch.Generator().manual_seed(2))
    folder = tmp_path_factory.mktemp("heads") / "reading"
    head.save(folder, dtype="float32")
    return folder


@pytest.fixture
def make_reading(target: Path, reading_head: Path) -> MakeReading:
    def make(**speculation: object) -> EngineConfig:
        options: dict[str, object] = {"max_draft_tokens": LENGTH, "fixed_length": LENGTH}
        return EngineConfig(
            model=ModelConfig(path=target, head=reading_head, dtype="float32"),
            cache=CacheConfig(num_pages=96, page_size=16),
            scheduler=SchedulerConfig(prefill_chunk=24),
            speculation=SpeculationConfig(**{**options, **speculation}),  # type: ignore[arg-type]
        )

    return make


@pytest.mark.parametrize("name", SAMPLING)
def test_no_token_changes_under_any_controller(name: str, make_reading: MakeReading) -> None:
    llm = LocalEngine(make_reading())
    plain = llm.generate(requests(4, SAMPLING[name], SpeculationParams(mode="off"), "plain"))
    for controller in CONTROLLERS:
        speculation = SpeculationParams(controller=controller)
        drafted = llm.generate(requests(4, SAMPLING[name], speculation, controller))
        assert texts(drafted) == texts(plain), controller


def test_no_token_changes_when_it_drafts_trees(make_reading: MakeReading) -> None:
    llm = LocalEngine(make_reading())
    plain = llm.generate(requests(4, SAMPLING["warm"], SpeculationParams(mode="off"), "plain"))
    for shape in ("static", "dynamic"):
        speculation = SpeculationParams(controller="fixed", tree=shape)  # type: ignore[arg-type]
        drafted = llm.generate(requests(4, SAMPLING["warm"], speculation, shape))
        assert texts(drafted) == texts(plain), shape
        assert sum(sum(g.accepted) for g in drafted) > 0, shape


def test_no_token_changes_when_it_drafts_ahead_of_the_verdict(make_reading: MakeReading) -> None:
    config = make_reading()
    stage = build_verify_stage(config, SingleGroup())
    engine = build_draft_engine(config, MemoryChannel(stage.verify, late_by_polls=4))
    batch = requests(3, SAMPLING["greedy"], SpeculationParams(controller="fixed"), "ahead")
    wanted = LocalEngine(make_reading()).generate(
        requests(3, SAMPLING["greedy"], SpeculationParams(mode="off"), "ahead")
    )
    for request, generation in zip(batch, wanted, strict=True):
        assert drain(engine, [request])[request.request_id] == generation.tokens


def guessed_right(
    target: Path, head: TrainableExitHead, text: list[int], *, without_embedding: bool
) -> list[bool]:
    """Returns whether the head, as in training, would guess each next token of the text."""
    spec = ModelSpec.from_folder(target)
    tokens_1L = torch.tensor([text])
    hidden, _ = FrozenTarget(target, spec, [EXIT_LAYER]).forward(tokens_1L, [EXIT_LAYER])
    embedding_1LD = target_embedding(target, spec)(tokens_1L)
    if without_embedding:
        embedding_1LD = torch.zeros_like(embedding_1LD)
    logits_1LV = head.training_forward(hidden[EXIT_LAYER], embedding_1LD)
    return (logits_1LV[0, :-1].argmax(-1) == tokens_1L[0, 1:]).tolist()


def rounds_of(right: list[bool], *, num_prompt: int, num_tokens: int) -> list[int]:
    """Returns the accepted drafts of rounds of `LENGTH` over a greedy text."""
    accepted = []
    at = num_prompt - 1
    end = num_prompt + num_tokens - 1
    while at < end:
        run = 0
        while run < LENGTH and at + run < end and right[at + run]:
            run += 1
        accepted.append(run)
        at += run + 1
    return accepted


def test_its_drafts_are_accepted_where_training_says_they_would_be(
    target: Path, reading_head: Path, make_reading: MakeReading
) -> None:
    spec = ModelSpec.from_folder(target)
    head = TrainableExitHead.read(reading_head, target=spec, target_path=target)
    batch = [
        dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, stop_token_ids=())
        )
        for request in requests(
            6, SAMPLING["greedy"], SpeculationParams(controller="fixed"), "oracle"
        )
    ]
    told: list[list[int]] = []
    untold: list[list[int]] = []
    found: list[list[int]] = []
    for request, generation in zip(batch, LocalEngine(make_reading()).generate(batch), strict=True):
        text = [int(token) for token in (*request.prompt, *generation.tokens)]
        size = {"num_prompt": len(request.prompt), "num_tokens": len(generation.tokens)}
        told.append(rounds_of(guessed_right(target, head, text, without_embedding=False), **size))
        untold.append(rounds_of(guessed_right(target, head, text, without_embedding=True), **size))
        found.append(list(generation.accepted))
    # The end of the text may shorten the last round.
    assert [rounds[:-1] for rounds in found] == [rounds[:-1] for rounds in told]
    assert told != untold
    assert sum(sum(rounds) for rounds in told) > 0
