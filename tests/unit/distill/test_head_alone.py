"""Rounds played over recorded rows are the rounds that an engine with the head runs."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.distill.answers import Machine
from eesd_dist.distill.head_alone import HeadAlone, rounds_of
from eesd_dist.distill.sources import PLAIN, EngineRows, EngineWriter
from eesd_dist.engine.build import build_local_engine
from eesd_dist.types import FeatureSpec, Outcome, Request, RequestId, SamplingParams
from tests.support.drafters import EXIT_LAYER, save_head, save_target
from tests.support.judged_heads import prompts_of

LENGTH = 5
COST = CostModel(draft_step_s=1.0, verify_s=(1.0,))
DRAFTING = SpeculationConfig(
    controller="fixed", max_draft_tokens=LENGTH, fixed_length=LENGTH, log_evidence=True
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), tail_scale=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["own", "truncated"])
def test_replayed_rounds_are_those_of_an_engine_with_the_head(
    target: Path, tmp_path: Path, kind: str, dtype: str
) -> None:
    drafted = list(range(0, 96, 2)) if kind == "truncated" else None
    folder = save_head(target, tmp_path / "head", "sometimes", draft_vocab=drafted)
    machine = Machine(model=target, head=folder, dtype=dtype)  # type: ignore[arg-type]
    requests = [
        Request(
            request_id=RequestId(f"r{number}"),
            prompt=prompt.tokens,
            sampling=SamplingParams(
                temperature=(0.0, 0.7, 1.0)[number % 3], seed=number, max_tokens=40
            ),
        )
        for number, prompt in enumerate(prompts_of(9))
    ]
    drafting = build_local_engine(machine.engine(DRAFTING, batch=9, max_length=64), cost=COST)
    written = EngineWriter(drafting).write(requests)

    plain = build_local_engine(machine.engine(DRAFTING, batch=9, max_length=64), cost=COST)
    spec = FeatureSpec(exits=(EXIT_LAYER,), top_k=4)
    recorded = [replace(request, speculation=PLAIN, features=spec) for request in requests]
    texts = EngineRows(plain).rows_of(recorded)
    head = HeadAlone(target, folder, dtype=machine.dtype, max_length=64)
    ours, theirs = [], []
    for request, text, answer in zip(recorded, texts, written, strict=True):
        assert list(text.tokens[len(request.prompt) :]) == answer.tokens
        guesses = head.guesses(text, request)
        ours += rounds_of(guesses, text, request, draft_length=LENGTH)
        theirs += [
            structs.replace(outcome, evidence=outcome.evidence[: judged(outcome)])
            for outcome in answer.outcomes
        ]
    num_accepted = sum(outcome.num_accepted for outcome in theirs)
    assert 0 < num_accepted < LENGTH * len(theirs)
    for replayed, engine in zip(ours, theirs, strict=True):
        assert replayed == engine


def judged(outcome: Outcome) -> int:
    return min(outcome.num_accepted + 1, outcome.num_drafted)


def test_a_draft_cut_by_the_end_of_the_text_counts_judged_tokens_only(
    target: Path, tmp_path: Path
) -> None:
    """A text that ends with a stop token was not continued, so that the rest was not judged."""
    folder = save_head(target, tmp_path / "head", "always")
    machine = Machine(model=target, head=folder, dtype="float32")
    source = EngineRows(
        build_local_engine(machine.engine(DRAFTING, batch=1, max_length=64), cost=COST)
    )
    spec = FeatureSpec(exits=(EXIT_LAYER,), top_k=4)
    request = Request(
        request_id=RequestId("r"),
        prompt=prompts_of(1)[0].tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=30),
        speculation=PLAIN,
        features=spec,
    )
    (whole,) = source.rows_of([request])
    written = whole.tokens[len(request.prompt) :]
    stop = next(token for at, token in enumerate(written) if token not in written[:at] and at > 1)
    stopping = replace(request, sampling=structs.replace(request.sampling, stop_token_ids=(stop,)))
    (text,) = source.rows_of([stopping])
    head = HeadAlone(target, folder, dtype="float32", max_length=64)
    played = rounds_of(head.guesses(text, stopping), text, stopping, draft_length=LENGTH)
    num_written = len(text.tokens) - len(request.prompt)
    assert sum(outcome.num_accepted + 1 for outcome in played) == num_written + 1
    last = played[-1]
    assert last.num_drafted == last.num_accepted == len(last.evidence)
