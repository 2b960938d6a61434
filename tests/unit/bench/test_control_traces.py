"""Recorded guesses: a replay equals the run of the engine, round by round."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from eesd_dist.bench.judging import adaptive_variants, fixed_variants, other_forms
from eesd_dist.bench.replay import Clairvoyant, ReplaySetting, Variant, replay
from eesd_dist.bench.traces import Text, Trace, TraceSet, chain_length, joined, record
from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from eesd_dist.control.calibrator import UNFITTED
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.core import EngineCore
from eesd_dist.errors import CheckpointError, EngineError
from eesd_dist.types import Outcome, Request, RequestId, TokenId
from tests.support.drafters import Agreement, save_head, save_target

CEILING = 4
COST = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.0, 1.1, 1.2, 1.3), round_s=0.05)
DEAR = replace(COST, draft_step_s=1.0)
"""Drafts do not pay, so that requests rest."""


def fixed(length: int) -> Variant:
    return Variant(label=f"fixed {length}", controller="fixed", max_draft_tokens=length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = save_target(tmp_path_factory.mktemp("control") / "target")
    save_head(folder, folder / "exit_head", "sometimes")
    return folder


def config(model: Path, *, ceiling: int = CEILING, log_evidence: bool = False) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=model, dtype="float32"),
        cache=CacheConfig(page_size=8, num_pages=256, prefix_caching=False),
        speculation=SpeculationConfig(
            max_draft_tokens=ceiling,
            fixed_length=ceiling,
            log_evidence=log_evidence,
            stop_rule="optimal",
            learn_costs=False,
            prompt_lookup=False,
        ),
    )


def texts() -> list[Text]:
    """Returns greedy and sampled texts, one of them stopped by a token in its middle."""
    rng = Random(3)
    texts = [
        Text(
            prompt=tuple(TokenId(rng.randrange(3, 96)) for _ in range(9 + n)),
            workload=f"t{temperature:g}",
            temperature=temperature,
            seed=50 + n,
            max_tokens=30,
            stop_token_ids=(),
        )
        for n, temperature in enumerate((0.0, 0.0, 0.9, 0.9))
    ]
    return texts


@pytest.fixture(scope="module")
def recorded(model: Path) -> tuple[list[Text], list[Trace]]:
    engine = build_local_engine(
        config(model, ceiling=chain_length(CEILING), log_evidence=True), cost=COST
    )
    free = record(engine, texts(), max_draft_tokens=CEILING)
    stop = free[2].tokens[13]
    stopped = [*texts(), replace(texts()[2], stop_token_ids=(int(stop),))]
    return stopped, record(engine, stopped, max_draft_tokens=CEILING)


@pytest.fixture(scope="module")
def engine(model: Path) -> EngineCore:
    return build_local_engine(config(model), cost=COST)


def lived(
    engine: EngineCore, texts: list[Text], variant: Variant, *, tag: str
) -> dict[int, list[tuple[int, int]]]:
    """Returns (drafted, accepted) of every round of every text, all of them in one batch."""
    for number, text in enumerate(texts):
        engine.add(
            Request(
                request_id=RequestId(f"{tag}-{number}"),
                prompt=text.prompt,
                sampling=text.sampling(),
                speculation=variant.params,
                workload=f"{tag}/{text.workload}",
            )
        )
    outcomes: list[Outcome] = []
    while engine.has_work:
        outcomes.extend(engine.step(wait_s=0.0).outcomes)
    return by_request(outcomes)


def by_request(outcomes: list[Outcome]) -> dict[int, list[tuple[int, int]]]:
    rows: dict[int, list[tuple[int, int]]] = {}
    for outcome in outcomes:
        rows.setdefault(int(outcome.request_id.rsplit("-", 1)[1]), []).append(
            (outcome.num_drafted, outcome.num_accepted)
        )
    return rows


def setting(*, max_running: int = 32) -> ReplaySetting:
    return ReplaySetting(
        speculation=SpeculationConfig(
            max_draft_tokens=CEILING, fixed_length=CEILING, stop_rule="optimal"
        ),
        cost=COST,
        calibrator=UNFITTED,
        max_running=max_running,
    )


@pytest.mark.parametrize(
    "variant",
    [*(fixed(length) for length in (1, 2, 3, 4)), *adaptive_variants()],
    ids=lambda variant: variant.label,
)
def test_a_replayed_run_has_the_rounds_of_the_live_one(
    variant: Variant, recorded: tuple[list[Text], list[Trace]], engine: EngineCore
) -> None:
    """Fixed lengths check the guesses. The other controllers check that the evidence is equal bit
    for bit: they draw with the same seeds and would diverge at the first difference."""
    texts, traces = recorded
    tag = variant.label.replace(" ", "")
    alive = lived(engine, texts, variant, tag=tag)
    run = replay(traces, variant, setting(), tag=tag)
    assert by_request(run.verdicts) == alive
    assert run.tokens == sum(len(trace) for trace in traces)


def test_a_request_that_rests_has_no_verdict_in_the_replay_as_in_the_engine(
    model: Path, recorded: tuple[list[Text], list[Trace]]
) -> None:
    texts, traces = recorded
    goodput = Variant(label="goodput", controller="goodput")
    alive = lived(build_local_engine(config(model), cost=DEAR), texts, goodput, tag="dear")
    run = replay(traces, goodput, replace(setting(), cost=DEAR), tag="dear")
    assert by_request(run.verdicts) == alive
    assert len(run.verdicts) < 0.6 * len(run.outcomes)
    assert sum(turn.rests for turns in run.rounds for turn in turns) > 20


def test_recording_meets_both_verdicts_and_a_text_that_stops(
    recorded: tuple[list[Text], list[Trace]],
) -> None:
    """The comparison above needs traces that are neither empty nor all equal."""
    texts, traces = recorded
    accepted = [guess.num_accepted for trace in traces for guess in trace.guesses]
    assert 0 in accepted
    assert CEILING in accepted
    assert [len(trace) for trace in traces] == [
        30,
        30,
        30,
        30,
        traces[2].tokens.index(TokenId(texts[4].stop_token_ids[0])) + 1,
    ]
    assert all(len(guess.evidence) == CEILING for trace in traces for guess in trace.guesses)


def test_resuming_at_every_position_records_the_same_guesses(
    model: Path, recorded: tuple[list[Text], list[Trace]]
) -> None:
    """Resumes at every position, as an oracle for reading many guesses off one chain."""
    texts, traces = recorded
    slow = build_local_engine(config(model, log_evidence=True), cost=COST)
    text, trace = texts[3], traces[3]
    for at in range(len(trace)):
        slow.add(
            Request(
                request_id=RequestId("one"),
                prompt=text.prompt,
                sampling=text.sampling(more_tokens=CEILING + 1),
                speculation=fixed(CEILING).params,
                generated=trace.tokens[:at],
            )
        )
        (outcome,) = slow.step().outcomes or slow.step().outcomes
        slow.abort(RequestId("one"))
        while slow.has_work:
            slow.step()
        assert outcome.evidence == trace.guesses[at].evidence
        assert outcome.num_accepted == trace.guesses[at].num_accepted


@pytest.mark.parametrize("agreement", ["always", "never"])
def test_drafters_that_are_always_or_never_right_are_recorded_as_such(
    tmp_path: Path, agreement: Agreement
) -> None:
    """If always right, chains are fully accepted, and every other position must be asked
    separately."""
    folder = save_target(tmp_path / "target")
    save_head(folder, folder / "exit_head", agreement)
    engine = build_local_engine(
        config(folder, ceiling=chain_length(CEILING), log_evidence=True), cost=COST
    )
    for trace in record(engine, texts()[:2], max_draft_tokens=CEILING):
        assert len(trace) == 30
        accepted = {guess.num_accepted for guess in trace.guesses}
        assert accepted == ({CEILING} if agreement == "always" else {0})


def test_traces_survive_their_file_to_the_last_digit(
    tmp_path: Path, recorded: tuple[list[Text], list[Trace]]
) -> None:
    trace_set = TraceSet(max_draft_tokens=CEILING, cost=COST, traces=tuple(recorded[1]))
    trace_set.save(tmp_path / "traces.json")
    assert TraceSet.load(tmp_path / "traces.json") == trace_set


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"version": 9}'])
def test_a_file_that_holds_no_traces_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "traces.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=r"traces\.json: found .*expected recorded traces"):
        TraceSet.load(file)


def test_recording_without_room_for_a_draft_says_so(model: Path) -> None:
    """An engine with a smaller maximum length would leave gaps for ever."""
    engine = build_local_engine(config(model, ceiling=2, log_evidence=True), cost=COST)
    with pytest.raises(EngineError, match="found no room at token 0"):
        record(engine, texts()[:1], max_draft_tokens=CEILING)


def test_the_clairvoyant_is_never_slower_than_a_controller(
    recorded: tuple[list[Text], list[Trace]],
) -> None:
    variants = [*fixed_variants(CEILING), *adaptive_variants(), *other_forms()]
    for trace in recorded[1]:
        best = Clairvoyant.of(trace, cost=COST, ceiling=CEILING)
        for variant in variants:
            run = replay([trace], variant, setting())
            lost = best.regret(run, trace)
            assert min(lost) > -1e-9
            assert sum(lost) == pytest.approx(run.total_s - best.remaining_s[0])
            assert run.total_s >= best.remaining_s[0] - 1e-9


def test_the_clairvoyant_time_is_reached_by_drafting_its_lengths(
    recorded: tuple[list[Text], list[Trace]],
) -> None:
    for trace in recorded[1]:
        best = Clairvoyant.of(trace, cost=COST, ceiling=CEILING)
        run = replay(
            [trace],
            fixed(CEILING),
            setting(),
            lengths=lambda _, at, best=best: best.lengths[at],  # type: ignore[misc]
        )
        assert run.total_s == pytest.approx(best.remaining_s[0])


def test_a_stream_of_several_texts_has_all_their_tokens_and_no_round_across_a_seam(
    recorded: tuple[list[Text], list[Trace]],
) -> None:
    traces = recorded[1][:3]
    stream = joined(traces)
    assert len(stream) == sum(len(trace) for trace in traces)
    seams = {len(traces[0]), len(traces[0]) + len(traces[1])}
    starts = {
        turn.at for turns in replay([stream], fixed(CEILING), setting()).rounds for turn in turns
    }
    assert seams <= starts
