"""Troubles really happen to the engines, and no text changes."""

from dataclasses import replace

import pytest
from msgspec import structs

from eesd_dist.bench.fuzz.cases import (
    Abort,
    Case,
    EngineSetup,
    Entry,
    Link,
    Loss,
    Migration,
    Resume,
    Trouble,
    World,
)
from eesd_dist.bench.fuzz.check import ENGINE, Checked, check
from eesd_dist.bench.fuzz.drawing.engines import degrees_of
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.reference import PlainTexts
from eesd_dist.config import SchedulerConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId

COST = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.02), round_s=0.05)


def case_of(
    model: str,
    *troubles: Trouble,
    num_engines: int = 1,
    ranks: tuple[int, int] = (1, 1),
    link: Link | None = None,
    num_entries: int = 4,
) -> Case:
    setup = EngineSetup(
        num_pages=64,
        prefix_caching=True,
        scheduler=SchedulerConfig(max_running=8, prefill_chunk=16, overlap=False),
        speculation=SpeculationConfig(controller="fixed", max_draft_tokens=3, fixed_length=3),
        cost=COST,
        link=link or Link(kind="inline"),
    )
    return Case(
        seed=0,
        number=0,
        world=World(
            model=model,
            head="heads/own",
            device="cpu",
            dtype="float32",
            draft_ranks=ranks[0],
            verify_ranks=ranks[1],
            page_size=4,
        ),
        engines=(setup,) * num_engines,
        entries=tuple(_entry(at) for at in range(num_entries)),
        troubles=troubles,
    )


def _entry(at: int) -> Entry:
    sampling = SamplingParams(temperature=0.8, seed=-at, max_tokens=30, top_logprobs=2)
    return Entry(
        name=f"e{at}",
        request=Request(
            request_id=RequestId(f"request {at}"),
            prompt=tuple(TokenId(5 + (i * i + at) % 50) for i in range(9 + 3 * at)),
            sampling=sampling,
        ),
        turn=at,
        engine=0,
    )


@pytest.fixture(scope="module")
def shared_model(shelf: ModelShelf) -> str:
    """Returns a model with heads and channels that two ranks can share."""
    models = (shelf.random(3, number) for number in range(20))
    return next(model.name for model in models if 2 in degrees_of(model.spec))


def sound(case: Case, shelf: ModelShelf) -> Checked:
    plain = PlainTexts(shelf)
    checked = check(case, shelf, plain)
    plain.close()
    assert not checked.failures, checked.failures
    return checked


@pytest.mark.parametrize("link", ["inline", "thread", "encoded"])
@pytest.mark.parametrize("component", ["send", "receive", "verify rank", "draft rank"])
def test_a_lost_part_costs_rounds_and_no_token(
    component: str, link: str, shared_model: str, shelf: ModelShelf
) -> None:
    kind = "thread" if link == "thread" else "inline"
    losses = [
        Loss(turn=turn, engine=0, part=component, after=1, fresh=turn > 5)  # type: ignore[arg-type]
        for turn in (2, 8)
    ]
    links = Link(kind=kind, encoded=link == "encoded")  # type: ignore[arg-type]
    case = case_of(shared_model, *losses, ranks=(2, 2), link=links)
    checked = sound(case, shelf)
    assert checked.counts["lost stages"] == 2
    assert checked.num_tokens == 120
    assert checked.counts["accepted"] > 0


def test_pages_move_with_their_requests(shared_model: str, shelf: ModelShelf) -> None:
    moves = [
        Migration(
            turn=turn,
            source=0,
            entries=names,
            copy_after=copy_after,
            adopt_after=1,
            chunk_bytes=700,
            is_adopted=True,
        )
        for turn, names, copy_after in ((6, ("e0", "e1"), 0), (9, ("e2",), 2), (10, (), 0))
    ]
    checked = sound(case_of(shared_model, *moves, num_engines=2, ranks=(1, 2)), shelf)
    assert checked.counts["trouble migration"] == 3
    assert checked.counts["migrated requests"] == 3
    assert checked.counts["migrated pages"] >= 6


def test_no_pages_move_to_a_pipeline_that_never_drafts(
    shared_model: str, shelf: ModelShelf
) -> None:
    move = Migration(
        turn=6,
        source=0,
        entries=("e0",),
        copy_after=0,
        adopt_after=0,
        chunk_bytes=700,
        is_adopted=True,
    )
    case = case_of(shared_model, move, num_engines=2)
    drafting, other = case.engines
    plain = replace(other, speculation=SpeculationConfig(max_draft_tokens=0))
    checked = sound(replace(case, engines=(drafting, plain)), shelf)
    assert checked.counts["migrated pages"] == 0


def test_ids_are_free_again_at_once_and_requests_go_on_anywhere(
    shared_model: str, shelf: ModelShelf
) -> None:
    troubles = (
        Abort(turn=4, entry="e0", successor="e3"),
        Resume(turn=5, entry="e1", engine=1, renamed=False),
        Resume(turn=6, entry="e2", engine=0, renamed=True),
        Resume(turn=8, entry="e1", engine=0, renamed=False),
    )
    checked = sound(case_of(shared_model, *troubles, num_engines=2), shelf)
    assert checked.counts["id reused"] == 1
    assert checked.counts["resumed in the other engine"] == 2
    assert 90 < checked.num_tokens < 120


def test_an_engine_that_breaks_is_a_failure_with_its_traceback(
    shared_model: str, shelf: ModelShelf
) -> None:
    case = case_of(shared_model)
    broken = replace(case.engines[0], num_pages=2)
    plain = PlainTexts(shelf)
    checked = check(replace(case, engines=(broken,)), shelf, plain)
    plain.close()
    assert checked.failures[0].entry == ENGINE
    assert "PromptTooLong" in checked.failures[0].what


def test_a_text_is_plainly_generated_once_and_a_shorter_one_is_its_beginning(
    shared_model: str, shelf: ModelShelf
) -> None:
    case = case_of(shared_model)
    request = case.entries[0].request
    plain = PlainTexts(shelf)
    whole = plain.text(case.world, request)
    num_tokens = plain.num_tokens
    sampling = structs.replace(request.sampling, max_tokens=7)
    cut = plain.text(case.world, replace(request, sampling=sampling))
    assert plain.num_tokens == num_tokens == 30
    assert cut.tokens == whole.tokens[:7]
    fresh = PlainTexts(shelf)
    assert fresh.text(case.world, replace(request, sampling=sampling)) == cut
    for texts in (plain, fresh):
        texts.close()
