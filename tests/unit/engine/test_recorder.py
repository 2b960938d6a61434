"""The recorder receives the generated tokens as the frozen target sees them; and a head changes
during a stream."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from eesd_dist.config import SchedulerConfig, SpeculationConfig
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.engine.build import build_local_engine, load_next_head
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.recording import recorder as recorder_module
from eesd_dist.engine.recording.recorder import VerifiedPiece
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.types import (
    Emission,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TreeShape,
)
from tests.support.drafters import EXIT_LAYER
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import prompts

COST = CostModel(draft_step_s=0.001, verify_s=(0.01,) * 8)
TOP_K = 5


class ListSink:
    """A sink that keeps everything of the wanted requests."""

    def __init__(self, *, unwanted: frozenset[str] = frozenset()) -> None:
        self._unwanted = unwanted
        self.pieces: list[VerifiedPiece] = []

    @property
    def top_k(self) -> int:
        return TOP_K

    def wants(self, request: Request) -> bool:
        return request.request_id not in self._unwanted

    def put(self, segment: VerifiedPiece) -> None:
        self.pieces.append(segment)


def request(name: str, prompt: tuple[TokenId, ...], **sampling: object) -> Request:
    params = {"temperature": 0.9, "max_tokens": 30, "stop_token_ids": (2,), **sampling}
    return Request(
        request_id=RequestId(name),
        prompt=prompt,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        workload="songs",
    )


def run(engine: EngineCore, requests: list[Request]) -> dict[RequestId, list[Emission]]:
    emissions: dict[RequestId, list[Emission]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for emission in engine.step(wait_s=0.0).emissions:
            emissions[emission.request_id].append(emission)
    return emissions


def _untimed(
    emissions: dict[RequestId, list[Emission]],
) -> dict[RequestId, list[Emission]]:
    return {
        name: [structs.replace(emission, queue_s=None) for emission in some]
        for name, some in emissions.items()
    }


def tokens(emissions: list[Emission]) -> list[int]:
    return [token for emission in emissions for token in emission.tokens]


@pytest.mark.parametrize("tree", ["none", "static", "dynamic"])
def test_pieces_are_the_tokens_that_left_as_the_frozen_target_sees_them(
    target: Path, make_config: MakeConfig, tree: TreeShape
) -> None:
    """Covers preemption, batches, stops by token or length, chains and trees."""
    sink = ListSink()
    engine = build_local_engine(
        make_config(num_pages=13, scheduler=SchedulerConfig(prefill_chunk=24, max_running=4)),
        cost=COST,
        recorder=sink,
    )
    requests = [
        dataclasses.replace(
            request(f"r{i}", prompt, seed=70 + i, temperature=0.9 * (i % 2)),
            speculation=SpeculationParams(controller="fixed", tree=tree),
        )
        for i, prompt in enumerate(prompts(6))
    ]
    left = run(engine, requests)
    frozen = FrozenTarget(target, ModelSpec.from_folder(target), [EXIT_LAYER])
    assert len(sink.pieces) == 6
    assert sum(len(segment.tokens_T) for segment in sink.pieces) > sum(map(len, prompts(6)))
    for prompt_request in requests:
        served = tokens(left[prompt_request.request_id])
        text = [*prompt_request.prompt, *served[:-1]]
        # Rows of a prefix that another request left in the cache are computed by none.
        (segment,) = [p for p in sink.pieces if text[-len(p.tokens_T) :] == p.tokens_T.tolist()]
        first = len(text) - len(segment.tokens_T)
        assert segment.num_prompt == len(prompt_request.prompt) - first
        (view,) = frozen.view([text], top_k=TOP_K)
        torch.testing.assert_close(
            segment.hidden_TD, view.hidden[EXIT_LAYER][first:], atol=1e-4, rtol=1e-4
        )
        assert segment.top_ids_TK.tolist() == view.top_ids_TK[first:].tolist()
        logprobs_TK = view.top_logits_TK[first:] - view.lse_T[first:, None]
        np.testing.assert_allclose(segment.top_logprobs_TK, logprobs_TK.numpy(), atol=1e-4)
        assert (segment.workload, segment.temperature) == (
            "songs",
            prompt_request.sampling.temperature,
        )


def test_what_the_recorder_asks_for_never_leaves(make_config: MakeConfig) -> None:
    requests = [
        request("silent", prompts(1)[0], seed=1),
        request("curious", prompts(2)[1], seed=2, top_logprobs=2),
    ]
    plain = run(build_local_engine(make_config(), cost=COST), requests)
    sink = ListSink()
    recorded = run(build_local_engine(make_config(), cost=COST, recorder=sink), requests)
    assert _untimed(recorded) == _untimed(plain)
    assert len(sink.pieces) == 2
    assert all(not emission.logprobs for emission in recorded[RequestId("silent")])
    assert {len(x.top) for e in recorded[RequestId("curious")] for x in e.logprobs} == {2}


def test_only_sampled_requests_are_kept_and_an_aborted_one_as_far_as_it_came(
    make_config: MakeConfig,
) -> None:
    sink = ListSink(unwanted=frozenset({"other"}))
    engine = build_local_engine(make_config(), cost=COST, recorder=sink)
    engine.add(request("other", prompts(1)[0], seed=3))
    engine.add(request("mine", prompts(2)[1], seed=4, max_tokens=400, stop_token_ids=()))
    left: list[int] = []
    while len(left) < 20:
        for emission in engine.step(wait_s=0.0).emissions:
            if emission.request_id == "mine":
                left += emission.tokens
    engine.abort(RequestId("mine"))
    while engine.has_work:
        engine.step(wait_s=0.0)
    (segment,) = sink.pieces
    assert segment.tokens_T.tolist() == [*prompts(2)[1], *left[:-1]]
    assert segment.num_prompt == len(prompts(2)[1])


def test_of_a_long_text_the_last_positions_are_kept(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_POSITIONS", 64)
    sink = ListSink()
    engine = build_local_engine(make_config(), cost=COST, recorder=sink)
    long_request = request("long", prompts(1)[0], seed=5, max_tokens=150, stop_token_ids=())
    served = tokens(run(engine, [long_request])[RequestId("long")])
    (segment,) = sink.pieces
    assert segment.tokens_T.tolist() == served[-65:-1]
    assert len(segment.hidden_TD) == len(segment.top_ids_TK) == 64
    assert segment.num_prompt == 1  # the first row was known


def test_a_head_that_is_swapped_in_changes_acceptance_and_no_token(
    make_config: MakeConfig, heads: dict[str, Path]
) -> None:
    config = make_config(
        "never", speculation=SpeculationConfig(controller="fixed", max_draft_tokens=5)
    )
    greedy_request = request(
        "one", prompts(1)[0], temperature=0.0, max_tokens=120, stop_token_ids=()
    )
    off = dataclasses.replace(greedy_request, speculation=SpeculationParams(mode="off"))
    plain = tokens(run(build_local_engine(config, cost=COST), [off])[RequestId("one")])

    engine = build_local_engine(config, cost=COST)
    engine.add(greedy_request)
    emissions: list[Emission] = []
    while engine.has_work:
        emissions += engine.step(wait_s=0.0).emissions
        if len(emissions) == 20:
            layout = layout_of(config)
            head = load_next_head(config, layout, heads["always"], group=SingleGroup())
            engine.swap_head(head, Calibrator(num_judged=7))
    assert tokens(emissions) == plain
    assert sum(e.num_accepted for e in emissions[:20]) == 0
    after = emissions[21:-1]
    assert [e.num_accepted for e in after] == [e.num_drafted for e in after]
    assert sum(e.num_drafted for e in after) > 50
    repeated = run(engine, [dataclasses.replace(greedy_request, request_id=RequestId("again"))])
    assert repeated[RequestId("again")][0].num_cached_prompt_tokens == 0  # not of the old head


def test_without_a_recorder_no_row_is_asked_for_more(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_top: list[int | None] = []
    verify = VerifyStage.verify

    def observed(stage: VerifyStage, header: RoundHeader, *inputs: Any) -> VerifyReply:
        num_top.extend(segment.top_logprobs for segment in header.segments)
        return verify(stage, header, *inputs)

    monkeypatch.setattr(VerifyStage, "verify", observed)
    run(build_local_engine(make_config(), cost=COST), [request("one", prompts(1)[0])])
    assert set(num_top) == {None}
    run(
        build_local_engine(make_config(), cost=COST, recorder=ListSink()),
        [request("1", prompts(1)[0])],
    )
    assert TOP_K in num_top
