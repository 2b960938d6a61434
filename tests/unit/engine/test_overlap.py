"""Two microbatches: the work in another order, the same text."""

import dataclasses
import random
from typing import Any

import pytest
import torch

from eesd_dist.config import EngineConfig, SchedulerConfig
from eesd_dist.control.overlap_policy import OverlapPolicy
from eesd_dist.engine.build import build_draft_engine, build_verify_stage
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import PeerLost, RequestError
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import Request, RequestId, SpeculationParams, TokenId
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import SAMPLING, requests


def memory_engine(config: EngineConfig) -> EngineCore:
    """Builds an engine with its verify stage in the same process."""
    torch.set_num_threads(1)
    stage = build_verify_stage(config, SingleGroup())
    return build_draft_engine(config, MemoryChannel(stage.verify))


def drain(engine: EngineCore, batch: list[Request]) -> dict[RequestId, list[TokenId]]:
    for request in batch:
        engine.add(request)
    tokens_of: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
    while engine.has_work:
        for emission in engine.step(wait_s=0.0).emissions:
            tokens_of[emission.request_id].extend(emission.tokens)
    return tokens_of


def test_two_microbatches_overlap_and_change_no_token(make_config: MakeConfig) -> None:
    config = make_config(scheduler=SchedulerConfig(prefill_chunk=16, overlap=True))
    engine = memory_engine(config)
    plain = LocalEngine(make_config())
    for name, sampling in SAMPLING.items():
        batch = requests(5, sampling, SpeculationParams(controller="beta"), name)
        expected = plain.generate(requests(5, sampling, SpeculationParams(mode="off"), name))
        tokens_of = drain(engine, batch)
        assert [tokens_of[r.request_id] for r in batch] == [g.tokens for g in expected], name


def test_changing_between_one_batch_and_two_microbatches_changes_no_token(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(scheduler=SchedulerConfig(prefill_chunk=16, overlap="auto"))
    engine = memory_engine(config)
    rng = random.Random(5)
    answers: list[bool] = []

    def tossed(self: OverlapPolicy, num_requests: int) -> bool:
        answers.append(rng.random() < 0.5)
        return answers[-1]

    monkeypatch.setattr(OverlapPolicy, "pays", tossed)
    plain = LocalEngine(make_config())
    for name, sampling in SAMPLING.items():
        batch = requests(5, sampling, SpeculationParams(controller="beta"), name)
        expected = plain.generate(requests(5, sampling, SpeculationParams(mode="off"), name))
        tokens_of = drain(engine, batch)
        assert [tokens_of[r.request_id] for r in batch] == [g.tokens for g in expected], name
    assert set(answers) == {True, False}


def test_a_lost_verify_stage_costs_recomputation_only(make_config: MakeConfig) -> None:
    config = make_config()
    stage = build_verify_stage(config, SingleGroup())
    engine = build_draft_engine(config, MemoryChannel(stage.verify))
    batch = requests(4, SAMPLING["warm"], SpeculationParams(controller="fixed"), "lost")
    expected = LocalEngine(make_config()).generate(
        requests(4, SAMPLING["warm"], SpeculationParams(mode="off"), "lost")
    )
    for request in batch:
        engine.add(request)
    tokens_of: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
    turns = 0
    while engine.has_work:
        turns += 1
        if turns in (3, 6, 11):  # a new rank with an empty cache
            fresh = build_verify_stage(config, SingleGroup())
            engine.attach(MemoryChannel(fresh.verify), epoch=turns)
        for emission in engine.step(wait_s=0.0).emissions:
            tokens_of[emission.request_id].extend(emission.tokens)
    assert turns > 11
    assert [tokens_of[r.request_id] for r in batch] == [g.tokens for g in expected]


@pytest.mark.parametrize(
    "loss",
    [
        PeerLost(peer="verify rank 0", operation="round 4", reason="it is gone"),
        ZeroDivisionError("a bug of ours"),
    ],
    ids=["a peer", "a bug"],
)
def test_tokens_of_a_verdict_leave_before_the_loss_that_follows_it(
    loss: Exception, make_config: MakeConfig
) -> None:
    config = make_config()
    stage = build_verify_stage(config, SingleGroup())

    class Breaking(MemoryChannel):
        num_until_loss = 10_000

        def send(self, *round_: Any) -> int:
            self.num_until_loss -= 1
            if self.num_until_loss == 0:
                raise loss
            return super().send(*round_)

    channel = Breaking(stage.verify)
    engine = build_draft_engine(config, channel)
    channel.num_until_loss = 4
    (request,) = requests(1, SAMPLING["warm"], SpeculationParams(controller="fixed"), "broken")
    expected = LocalEngine(make_config()).generate([request])[0].tokens
    engine.add(request)
    tokens: list[TokenId] = []
    num_losses = 0
    while engine.has_work:
        try:
            emissions = engine.step(wait_s=0.0).emissions
        except type(loss):
            num_losses += 1
            engine.attach(MemoryChannel(stage.verify), epoch=2)
            continue
        tokens += [token for emission in emissions for token in emission.tokens]
    assert num_losses == 1
    assert tokens == expected


@pytest.mark.parametrize("turns_before", [1, 2, 3, 4])
def test_a_request_dropped_in_flight_may_come_back_at_once(
    turns_before: int, make_config: MakeConfig
) -> None:
    config = make_config(scheduler=SchedulerConfig(prefill_chunk=16, overlap=True))
    engine = memory_engine(config)
    batch = requests(3, SAMPLING["warm"], SpeculationParams(controller="beta"), "back")
    expected = LocalEngine(make_config()).generate(batch)
    for request in batch:
        engine.add(request)
    tokens_of: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
    turns = 0
    while engine.has_work:
        for emission in engine.step(wait_s=0.0).emissions:
            tokens_of[emission.request_id].extend(emission.tokens)
        turns += 1
        if turns == turns_before:
            for request in batch:
                engine.abort(request.request_id)
                prefix = tuple(tokens_of[request.request_id])
                engine.add(dataclasses.replace(request, generated=prefix))
    assert [tokens_of[r.request_id] for r in batch] == [g.tokens for g in expected]
    load = engine.load()
    assert load.free_pages == load.num_pages


def test_a_refused_request_leaves_nothing_behind(make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config())
    good, bad = requests(2, SAMPLING["greedy"], SpeculationParams(), "mixed")
    with pytest.raises(RequestError):
        llm.generate([good, dataclasses.replace(bad, prompt=())])
    retry = dataclasses.replace(good, request_id=RequestId("again"))
    assert llm.generate([retry])[0].tokens
    reader = llm.stream([dataclasses.replace(good, request_id=RequestId("half"))])
    next(reader)
    reader.close()
    load = llm.engine.load()
    assert load.free_pages == load.num_pages
