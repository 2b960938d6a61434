"""Features of whole texts are those of the frozen target, and asking for them changes no text."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eesd_dist.config import CacheConfig, SchedulerConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.recording.text_features import FeatureLimits, FeatureTap, TextFeatures
from eesd_dist.errors import CapacityError, RequestError
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import (
    FeatureSpec,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import prompts

COST = CostModel(draft_step_s=0.001, verify_s=(0.01,) * 8)
EVERY_EXIT = (1, 2, 3)
"""Below the cut, at it, and above it."""
TOP_K = 7
OFF = SpeculationParams(mode="off")


def asked(
    name: str, prompt: tuple[TokenId, ...], spec: FeatureSpec | None = None, **sampling: Any
) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=prompt,
        sampling=SamplingParams(**{"temperature": 0.8, "max_tokens": 20, **sampling}),
        speculation=OFF,
        features=spec,
    )


def run(
    engine: EngineCore, requests: list[Request]
) -> tuple[dict[str, list[int]], dict[str, TextFeatures]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    features: dict[str, TextFeatures] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        result = engine.step(wait_s=0.0)
        for emission in result.emissions:
            tokens[emission.request_id] += emission.tokens
        features.update(
            {text_features.request_id: text_features for text_features in result.features}
        )
    return tokens, features


def test_every_row_of_a_text_is_the_one_that_the_frozen_target_computes(
    target: Path, make_config: MakeConfig
) -> None:
    """With chunks of prefill, preemption, cached prefixes and requests that draft among them."""
    config = make_config(
        num_pages=13,
        scheduler=SchedulerConfig(prefill_chunk=10, max_running=4),
        speculation=SpeculationConfig(controller="fixed", fixed_length=3),
    )
    some = prompts(6)
    requests = [
        asked(
            f"r{i}",
            prompt,
            FeatureSpec(exits=EVERY_EXIT[: 1 + i % 3], top_k=TOP_K - i) if i != 2 else None,
            seed=i,
            max_tokens=30,
        )
        for i, prompt in enumerate([*some, some[0]])  # the last one's prefix is cached
    ]
    drafts = dataclasses.replace(
        asked("drafts", some[1], seed=9), speculation=SpeculationParams(controller="fixed")
    )
    engine = build_local_engine(config, cost=COST)
    tokens, features = run(engine, [*requests, drafts])
    assert engine.load().num_preemptions > 0
    assert engine._features._kept_bytes == 0
    bare = [dataclasses.replace(request, features=None) for request in [*requests, drafts]]
    undisturbed, none = run(build_local_engine(config, cost=COST), bare)
    assert tokens == undisturbed
    assert not none

    frozen = FrozenTarget(target, ModelSpec.from_folder(target), EVERY_EXIT)
    assert features.keys() == {
        request.request_id for request in requests if request.features is not None
    }
    for request in requests:
        if request.features is None:
            continue
        text_features, text = (
            features[request.request_id],
            [*request.prompt, *tokens[request.request_id]],
        )
        assert list(text_features.tokens) == text
        (view,) = frozen.view([text[:-1]], top_k=request.features.top_k)
        assert tuple(text_features.hidden) == request.features.exits
        for layer, hidden_TD in text_features.hidden.items():
            torch.testing.assert_close(hidden_TD, view.hidden[layer], atol=1e-4, rtol=1e-4)
        assert text_features.top_ids_TK.shape == (len(text) - 1, request.features.top_k)
        torch.testing.assert_close(
            torch.from_numpy(text_features.top_logits_TK), view.top_logits_TK, atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            torch.from_numpy(text_features.lse_T), view.lse_T, atol=1e-4, rtol=1e-4
        )
        assert (text_features.top_ids_TK == view.top_ids_TK.numpy()).mean() > 0.99


def test_rows_are_computed_even_where_their_pages_are_cached(make_config: MakeConfig) -> None:
    config = make_config().model_copy(update={"cache": CacheConfig(num_pages=96, page_size=4)})
    (prompt,) = prompts(1)
    spec = FeatureSpec(exits=(1,), top_k=3)
    engine = build_local_engine(config, cost=COST)
    run(engine, [asked("first", prompt)])
    _, first = run(engine, [asked("again", prompt, spec)])
    _, second = run(engine, [asked("and again", prompt, spec)])
    assert len(first["again"].lse_T) == len(prompt) + 19
    assert torch.equal(first["again"].hidden[1], second["and again"].hidden[1])
    assert (first["again"].top_logits_TK == second["and again"].top_logits_TK).all()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (FeatureSpec(exits=(0,), top_k=2), "after layers .0.: expected layers from 1 to 3"),
        (FeatureSpec(exits=(4,), top_k=2), "after layers .4."),
        (FeatureSpec(exits=(2, 1), top_k=2), "ascending"),
        (FeatureSpec(exits=(1,), top_k=0), "0 best tokens: expected 1 to 96"),
        (FeatureSpec(exits=(1,), top_k=97), "97 best tokens"),
    ],
)
def test_features_that_cannot_be_are_refused(
    make_config: MakeConfig, spec: FeatureSpec, reason: str
) -> None:
    engine = build_local_engine(make_config(), cost=COST)
    with pytest.raises(RequestError, match=reason):
        engine.add(asked("r", (TokenId(3),), spec))
    assert not engine.has_work


def test_a_text_with_features_is_not_drafted(make_config: MakeConfig) -> None:
    engine = build_local_engine(make_config(), cost=COST)
    request = asked("r", (TokenId(3),), FeatureSpec(exits=(1,), top_k=2))
    with pytest.raises(RequestError, match="mode to off"):
        engine.add(dataclasses.replace(request, speculation=SpeculationParams()))


def test_memory_is_reserved_before_a_text_begins_and_free_after_its_end() -> None:
    limits = FeatureLimits(
        split=2,
        num_layers=4,
        hidden_size=64,
        vocab_size=96,
        dtype=torch.bfloat16,
        max_bytes=10_000,
    )
    spec = FeatureSpec(exits=(1,), top_k=2)
    request = asked("one", (TokenId(3),) * 20, spec)
    size = limits.size_of(request)
    assert size == 40 * (2 * 64 + 8 * 2 + 4)
    tap = FeatureTap(limits)
    tap.check(request)
    tap.admit(request)
    assert tap._kept_bytes == size
    with pytest.raises(CapacityError, match="1 texts are kept"):
        tap.check(asked("two", (TokenId(3),) * 20, spec))
    with pytest.raises(RequestError, match="at most 10000 for one text"):
        tap.check(asked("long", (TokenId(3),) * 200, spec))
    tap.check(asked("bare", (TokenId(3),) * 200))
    tap.end(request.request_id)
    assert tap._kept_bytes == 0
    tap.check(request)
