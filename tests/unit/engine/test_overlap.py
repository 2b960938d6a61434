"""Two microbatches, and drafting ahead of a verdict: the work in another order, the same text."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eesd_dist.config import EngineConfig, SchedulerConfig, SpeculationConfig
from eesd_dist.control.chain_rule import REFUSAL
from eesd_dist.control.overlap_policy import OverlapPolicy
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.build import build_draft_engine, build_verify_stage
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import PeerLost, RequestError
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import Request, RequestId, SpeculationParams, TokenId
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import SAMPLING, requests


def late_engine(config: EngineConfig, *, late_by_polls: int) -> EngineCore:
    """Builds an engine in which replies are announced the given number of polls late."""
    torch.set_num_threads(1)
    stage = build_verify_stage(config, SingleGroup())
    return build_draft_engine(config, MemoryChannel(stage.verify, late_by_polls=late_by_polls))


def drain(engine: EngineCore, batch: list[Request]) -> dict[RequestId, list[TokenId]]:
    for request in batch:
        engine.add(request)
    found: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
    while engine.has_work:
        for emission in engine.step(wait_s=0.0).emissions:
            found[emission.request_id].extend(emission.tokens)
    return found


@pytest.mark.parametrize("head", ["always", "sometimes", "never"])
@pytest.mark.parametrize("late_by_polls", [1, 3, 9])
def test_drafting_ahead_of_the_verdict_changes_no_token(
    head: str, late_by_polls: int, make_config: MakeConfig
) -> None:
    config = make_config(head, speculation=SpeculationConfig(max_draft_tokens=4))
    engine = late_engine(config, late_by_polls=late_by_polls)
    plain = LocalEngine(make_config(head))
    for name, sampling in SAMPLING.items():
        for controller in ("fixed", "calibration"):
            speculation = SpeculationParams(controller=controller)  # type: ignore[arg-type]
            batch = requests(2, sampling, speculation, f"{name}-{controller}")
            wanted = plain.generate(
                requests(2, sampling, SpeculationParams(mode="off"), f"{name}-{controller}")
            )
            for request, generation in zip(batch, wanted, strict=True):
                found = drain(engine, [request])
                assert found[request.request_id] == generation.tokens, (name, controller)


def test_a_chain_that_ended_with_a_refused_guess_is_not_drafted_ahead(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call keeps nothing of a guess that its rule refuses. Another request, which drafts
    nothing and is drawn from fewer tokens, makes drafting ahead worth a try."""
    monkeypatch.setattr(DraftPolicy, "chain_rules", lambda _, asked: dict.fromkeys(asked, REFUSAL))
    config = make_config("never")
    engine = late_engine(config, late_by_polls=9)
    off = SpeculationParams(mode="off")
    filtered = dataclasses.replace(SAMPLING["filtered"], top_p=0.5)
    batch = [
        *requests(1, SAMPLING["greedy"], SpeculationParams(controller="fixed"), "greedy"),
        *requests(1, filtered, off, "filtered"),
    ]
    found = drain(engine, batch)
    alone = [dataclasses.replace(request, speculation=off) for request in batch]
    for request, generation in zip(batch, LocalEngine(config).generate(alone), strict=True):
        assert found[request.request_id] == generation.tokens


def test_drafting_ahead_stops_where_the_model_has_no_positions_left(
    make_config: MakeConfig,
) -> None:
    """The last page covers more positions than the model has."""
    config = make_config("always", page_size=24)
    engine = late_engine(config, late_by_polls=20)
    prompt = tuple(TokenId(3 + i % 90) for i in range(226))
    sampling = dataclasses.replace(SAMPLING["greedy"], max_tokens=30)
    request = Request(request_id=RequestId("long"), prompt=prompt, sampling=sampling)
    off = dataclasses.replace(request, speculation=SpeculationParams(mode="off"))
    (wanted,) = LocalEngine(make_config("always")).generate([off])
    assert drain(engine, [request])[request.request_id] == wanted.tokens
    assert len(wanted.tokens) == 30


def test_two_microbatches_overlap_and_change_no_token(make_config: MakeConfig) -> None:
    config = make_config(scheduler=SchedulerConfig(prefill_chunk=16, overlap=True))
    engine = late_engine(config, late_by_polls=0)
    plain = LocalEngine(make_config())
    for name, sampling in SAMPLING.items():
        batch = requests(5, sampling, SpeculationParams(controller="beta"), name)
        wanted = plain.generate(requests(5, sampling, SpeculationParams(mode="off"), name))
        found = drain(engine, batch)
        assert [found[r.request_id] for r in batch] == [g.tokens for g in wanted], name


def test_changing_between_one_batch_and_two_microbatches_changes_no_token(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(scheduler=SchedulerConfig(prefill_chunk=16, overlap="auto"))
    engine = late_engine(config, late_by_polls=0)
    rng = random.Random(5)
    answers: list[bool] = []

    def tossed(self: OverlapPolicy, num_requests: int) -> bool:
        answers.append(rng.random() < 0.5)
        return answers[-1]

    monkeypatch.setattr(OverlapPolicy, "pays", tossed)
    plain = LocalEngine(make_config())
    for name, sampling in SAMPLING.items():
        batch = requests(5, sampling, SpeculationParams(controller="beta"), name)
        wanted = plain.generate(requests(5, sampling, SpeculationParams(mode="off"), name))
        found = drain(engine, batch)
        assert [found[r.request_id] for r in batch] == [g.tokens for g in wanted], name
    assert set(answers) == {True, False}


def test_a_lost_verify_stage_costs_recomputation_only(make_config: MakeConfig) -> None:
    config = make_config()
    stage = build_verify_stage(config, SingleGroup())
    engine = build_draft_engine(config, MemoryChannel(stage.verify))
    batch = requests(4, SAMPLING["warm"], SpeculationParams(controller="fixed"), "lost")
    wanted = LocalEngine(make_config()).generate(
        requests(4, SAMPLING["warm"], SpeculationParams(mode="off"), "lost")
    )
    for request in batch:
        engine.add(request)
    found: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
    turns = 0
    while engine.has_work:
        turns += 1
        if turns in (3, 6, 11):  # a new rank with an empty cache
            fresh = build_verify_stage(config, SingleGroup())
            engine.attach(MemoryChannel(fresh.verify), epoch=turns)
        for emission in engine.step(wait_s=0.0).emissions:
            found[emission.request_id].extend(emission.tokens)
    assert turns > 11
    assert [found[r.request_id] for r in batch] == [g.tokens for g in wanted]


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
    wanted = LocalEngine(make_config()).generate([request])[0].tokens
    engine.add(request)
    found: list[TokenId] = []
    num_losses = 0
    while engine.has_work:
        try:
            emissions = engine.step(wait_s=0.0).emissions
        except type(loss):
            num_losses += 1
            engine.attach(MemoryChannel(stage.verify), epoch=2)
            continue
        found += [token for emission in emissions for token in emission.tokens]
    assert num_losses == 1
    assert found == wanted


@pytest.mark.parametrize("turns_before", [1, 2, 3, 4])
def test_a_request_dropped_in_flight_may_come_back_at_once(
    turns_before: int, make_config: MakeConfig
) -> None:
    config = make_config(scheduler=SchedulerConfig(prefill_chunk=16, overlap=True))
    engine = late_engine(config, late_by_polls=2)
    batch = requests(3, SAMPLING["warm"], SpeculationParams(controller="beta"), "back")
    wanted = LocalEngine(make_config()).generate(batch)
    for request in batch:
        engine.add(request)
    found: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
    turns = 0
    while engine.has_work:
        for emission in engine.step(wait_s=0.0).emissions:
            found[emission.request_id].extend(emission.tokens)
        turns += 1
        if turns == turns_before:
            for request in batch:
                engine.abort(request.request_id)
                told = tuple(found[request.request_id])
                engine.add(dataclasses.replace(request, generated=told))
    assert [found[r.request_id] for r in batch] == [g.tokens for g in wanted]
    load = engine.load()
    assert load.free_pages == load.num_pages


def test_work_done_ahead_is_used_with_overlap_on(make_config: MakeConfig) -> None:
    config = make_config(
        "always",
        scheduler=SchedulerConfig(overlap=True),
        speculation=SpeculationConfig(max_draft_tokens=4),
    )
    stage = build_verify_stage(config, SingleGroup())
    asked: list[int] = []

    def forward(span_forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(hidden_td: torch.Tensor, rows: RowPlan, **kept: Any) -> torch.Tensor:
            asked.append(rows.num_rows)
            return span_forward(hidden_td, rows, **kept)

        return counted

    engine = build_draft_engine(config, MemoryChannel(stage.verify, late_by_polls=6))
    engine._draft.span.forward = forward(engine._draft.span.forward)  # type: ignore[method-assign]
    (request,) = requests(1, SAMPLING["greedy"], SpeculationParams(controller="fixed"), "used")
    found = drain(engine, [request])
    # If discarded, every row would be computed about twice; if used, about once.
    num_rows = len(request.prompt) + len(found[request.request_id])
    assert sum(asked) < 1.4 * num_rows


@pytest.mark.parametrize("seed", range(4))
def test_replies_at_odd_times_never_upset_the_exit_head(seed: int, make_config: MakeConfig) -> None:
    config = make_config(
        "sometimes",
        scheduler=SchedulerConfig(overlap=bool(seed % 2)),
        speculation=SpeculationConfig(max_draft_tokens=6, stop_rule="bernoulli"),
    )
    stage = build_verify_stage(config, SingleGroup())
    rng = random.Random(seed)

    class Irregular(MemoryChannel):
        def reply_is_here(self) -> bool:
            return rng.random() < 0.35

    engine = build_draft_engine(config, Irregular(stage.verify))
    plain = LocalEngine(make_config())
    for name in ("greedy", "warm", "penalised"):
        batch = requests(4, SAMPLING[name], SpeculationParams(controller="beta"), name)
        wanted = plain.generate(requests(4, SAMPLING[name], SpeculationParams(mode="off"), name))
        for request, generation in zip(batch, wanted, strict=True):
            assert drain(engine, [request])[request.request_id] == generation.tokens


def test_a_refused_request_leaves_nothing_behind(make_config: MakeConfig) -> None:
    llm = LocalEngine(make_config())
    good, bad = requests(2, SAMPLING["greedy"], SpeculationParams(), "mixed")
    with pytest.raises(RequestError):
        llm.generate([good, dataclasses.replace(bad, prompt=())])
    again = dataclasses.replace(good, request_id=RequestId("again"))
    assert llm.generate([again])[0].tokens
    reader = llm.stream([dataclasses.replace(good, request_id=RequestId("half"))])
    next(reader)
    reader.close()
    load = llm.engine.load()
    assert load.free_pages == load.num_pages
