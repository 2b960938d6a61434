"""Two cohorts, and drafting ahead of a verdict: other orders of the same work, the same text."""

import pytest
import torch

from eesd_dist.config import EngineConfig, SchedulerConfig, SpeculationConfig
from eesd_dist.engine.build import build_draft_engine, build_verify_stage
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.llm import LLM
from eesd_dist.transport.group import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import Request, RequestId, SpeculationParams, TokenId
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import SAMPLING, requests


def late_engine(config: EngineConfig, *, late_by_polls: int) -> EngineCore:
    """An engine whose replies are always announced so many polls late."""
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
    plain = LLM(make_config(head))
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


def test_two_cohorts_take_turns_and_change_no_token(make_config: MakeConfig) -> None:
    config = make_config(scheduler=SchedulerConfig(prefill_chunk=16, overlap=True))
    engine = late_engine(config, late_by_polls=0)
    plain = LLM(make_config())
    for name, sampling in SAMPLING.items():
        batch = requests(5, sampling, SpeculationParams(controller="beta"), name)
        wanted = plain.generate(requests(5, sampling, SpeculationParams(mode="off"), name))
        found = drain(engine, batch)
        assert [found[r.request_id] for r in batch] == [g.tokens for g in wanted], name


def test_a_lost_verify_stage_costs_recomputation_only(make_config: MakeConfig) -> None:
    config = make_config()
    stage = build_verify_stage(config, SingleGroup())
    engine = build_draft_engine(config, MemoryChannel(stage.verify))
    batch = requests(4, SAMPLING["warm"], SpeculationParams(controller="fixed"), "lost")
    wanted = LLM(make_config()).generate(
        requests(4, SAMPLING["warm"], SpeculationParams(mode="off"), "lost")
    )
    for request in batch:
        engine.add(request)
    found: dict[RequestId, list[TokenId]] = {r.request_id: [] for r in batch}
    turns = 0
    while engine.has_work:
        turns += 1
        if turns in (3, 6, 11):  # a new rank, whose cache is empty
            fresh = build_verify_stage(config, SingleGroup())
            engine.attach(MemoryChannel(fresh.verify), generation=turns)
        for emission in engine.step(wait_s=0.0).emissions:
            found[emission.request_id].extend(emission.tokens)
    assert turns > 11
    assert [found[r.request_id] for r in batch] == [g.tokens for g in wanted]
