"""Time per round: split without a rest, and measured by a bench that notices a changed text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_draft_engine, build_verify_stage
from eesd_dist.engine.local import Generation
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import Request, RequestId, RoundStats, TokenId, Traffic
from serve_app.bench.options import RoundsOptions
from serve_app.bench.rounds import measure
from serve_app.bench.rounds.measure import (
    RoundsSetting,
    Variant,
    over_one_microbatch,
    split_of,
    steady,
)
from tests.support.tiny_service import write_tiny_service
from tests.unit.telemetry.rounds import a_round


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("rounds") / "tiny")


class LocalRunner:
    """Both stages in this process, microbatches as they were asked for."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(1)
        stage = build_verify_stage(config, SingleGroup())
        self._engine = build_draft_engine(config, MemoryChannel(stage.verify))
        self._rounds: list[RoundStats] = []

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        done = {r.request_id: Generation(request_id=r.request_id) for r in requests}
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work:
            result = self._engine.step(wait_s=0.0)
            self._rounds += result.rounds
            for emission in result.emissions:
                done[emission.request_id].take(emission)
        return list(done.values())

    def rounds(self) -> Sequence[RoundStats]:
        return self._rounds


class Forgetful(LocalRunner):
    """With a bug: the last token of every text is another."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        done = super().generate(requests)
        for generation in done:
            generation.tokens[-1] = TokenId((generation.tokens[-1] + 1) % 300)
        return done


@contextmanager
def here(engines: Mapping[str, EngineConfig]) -> Iterator[Mapping[str, LocalRunner]]:
    yield {name: LocalRunner(engine) for name, engine in engines.items()}


@contextmanager
def one_forgets(engines: Mapping[str, EngineConfig]) -> Iterator[Mapping[str, LocalRunner]]:
    first, *others = engines.items()
    yield {
        first[0]: Forgetful(first[1]),
        **{name: LocalRunner(engine) for name, engine in others},
    }


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_the_parts_of_a_round_add_up_to_its_wall_clock() -> None:
    stats = a_round(
        plan_s=0.001,
        draft_s=0.012,
        transfer_s=0.003,
        verify_s=0.020,
        waited_s=0.015,
        commit_s=0.004,
        other_s=0.005,
        idle_s=1.0,
        verify_group=Traffic(wait_s=0.005),
        draft_group=Traffic(wait_s=0.004),
    )
    split = split_of([stats, stats])
    assert split.wall == pytest.approx(2 * 0.037)
    assert split.draft == pytest.approx(2 * 0.008)
    assert split.transfer == pytest.approx(2 * 0.003)
    assert split.collectives == pytest.approx(2 * (0.012 * 0.25 + 0.004))
    assert split.verify == pytest.approx(2 * 0.012 * 0.75)
    assert split.hidden == pytest.approx(2 * 0.008)
    assert split.overhead == pytest.approx(1 - (0.008 + 0.009) / 0.037)


def test_rounds_count_from_when_all_decode_until_one_leaves() -> None:
    a, b = RequestId("a"), RequestId("b")
    prefill = a_round(num_prefill_rows=9, request_ids=(a, b))
    alone = a_round(request_ids=(a,))
    both, in_turns = a_round(request_ids=(a, b)), a_round(request_ids=(b,))
    counted = [both, in_turns, alone, both]
    assert steady([prefill, alone, *counted[:2], prefill, *counted[2:], alone]) == counted
    assert steady([prefill]) == []


def test_two_microbatches_are_held_against_one_run_by_run() -> None:
    setting = RoundsSetting(batch=4, drafting=True)

    def ran(wall_s: float) -> measure.Split:
        return split_of([a_round(plan_s=wall_s, draft_s=0.0, commit_s=0.0, num_emitted=6)])

    splits = {
        (setting, Variant(overlap=False)): [ran(1.0), ran(4.0), ran(2.0)],
        (setting, Variant(overlap=True)): [ran(0.5), ran(4.0), ran(4.0)],
        (setting, Variant(overlap="auto")): [ran(0.5), ran(2.0), ran(4.0)],
    }
    for overlap, ratio in {True: 1.0, "auto": 2.0}.items():
        variant = Variant(overlap=overlap)
        assert over_one_microbatch(splits, setting, variant) == ratio


def test_every_variant_is_measured_and_no_text_differs(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RoundsOptions(model=model, quick=True, max_tokens=12, json=True)
    assert measure.run(options, actors=here) == 0
    found = report(capsys)
    rows = found["rows"]
    assert isinstance(rows, list)
    asked = {(row["batch"], row["drafting"], row["overlap"]) for row in rows}
    assert asked == {(b, d, o) for b in (1, 4) for d in (False, True) for o in (False, True)}
    for row in rows:
        assert row["rounds"] > 0
        assert row["tokens"] >= row["rounds"]
        parts = sum(row[f"{column}_ms"] for column in measure.COLUMNS)
        assert row["round_ms"] == pytest.approx(parts)
        assert 0 < row["overhead"] < 1
    assert found["texts_changed"] == 0
    assert found["provenance"]


def test_a_changed_text_is_counted_and_fails_the_bench(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RoundsOptions(model=model, quick=True, max_tokens=4, json=True)
    assert measure.run(options, actors=one_forgets) == 1
    assert report(capsys)["texts_changed"] == 2 * (1 + 4)
