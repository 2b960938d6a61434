"""What the start-up profile measures, how it is pinned, and how controllers use it."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.backends.torch.engine import TorchEngine
from eesd_dist.config import SchedulerConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.engine import profile
from eesd_dist.engine.local import Generation, LocalEngine
from eesd_dist.errors import ConfigError
from eesd_dist.transport.contracts import RoundHeader
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import SpeculationParams
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import SAMPLING, requests, texts

PINNED = CostModel(
    draft_step_s=0.1,
    verify_s=(1.0, 1.02),
    round_s=0.05,
    guess_s=0.06,
    request_s=0.01,
    draft_rows_s=((8, 0.2),),
)


class Clock:
    """Stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def move(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_disturbance_of_twice_as_long_as_a_figure_takes_is_in_no_figure(clock: Clock) -> None:
    def run(seconds: float) -> None:
        is_disturbed = 0.02 < clock.now_s < 0.02 + 2 * profile._POINT_S
        clock.move(seconds + (6e-3 if is_disturbed else 0.0))

    figures = [1e-4 * rows for rows in range(1, 11)]
    assert profile._usual([partial(run, s) for s in figures]) == pytest.approx(figures)


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    PINNED.save(tmp_path / "cost.json")
    return tmp_path / "cost.json"


def test_the_profile_knows_one_request_and_batches_and_never_a_free_row(
    make_config: MakeConfig,
) -> None:
    LocalEngine(make_config())  # compiles, once per machine
    began = time.process_time()
    llm = LocalEngine(make_config(scheduler=SchedulerConfig(max_running=24)))
    assert time.process_time() - began < 20.0  # 3 s on an idle machine
    cost = llm.engine.cost
    assert cost is not None
    assert len(cost.verify_s) == 6
    assert [count for count, _ in cost.verify_rows_s] == [12, 24, 96, 144]
    assert [count for count, _ in cost.draft_rows_s] == [2, 4, 16, 24]
    for figures in (
        cost.verify_s,
        [cost.verify_s[-1], *(s for _, s in cost.verify_rows_s)],
        [cost.draft_step_s, *(s for _, s in cost.draft_rows_s)],
        [cost.round_s, *(s for _, s in cost.known_rows_s)],
    ):
        assert all(figure <= other for figure, other in pairwise(figures))
    assert 0.0 <= cost.guess_s <= cost.draft_step_s
    assert cost.verify_batch(144, 24) > cost.verify_batch(6)


def test_noise_does_not_make_a_draft_look_free(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def draft(_: profile._Bench, num: int, length: int, *__: object) -> None:
        clock.move(0.9 if length else 1.0)

    monkeypatch.setattr(profile._Bench, "_draft", draft)
    monkeypatch.setattr(profile._Bench, "_verify", lambda *_: clock.move(1.0))
    cost = LocalEngine(make_config()).engine.cost
    assert cost is not None
    assert 0.0 < cost.draft_step_s < 0.1


def test_the_profile_knows_what_context_and_a_request_cost(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def verify(bench: profile._Bench, rows: Sequence[int]) -> None:
        position_s = 2e-3 * len(rows) + 0.5e-3 * sum(rows)
        clock.move(1.0 + 0.25 * len(rows) + bench.kv_range.start * position_s)

    def draft(bench: profile._Bench, num: int, length: int, *_: object) -> None:
        clock.move(0.1 + 0.01 * length + bench.kv_range.start * 0.1e-3 * num * (1 + length))

    monkeypatch.setattr(profile._Bench, "_verify", verify)
    monkeypatch.setattr(profile._Bench, "_draft", draft)
    cost = LocalEngine(make_config(page_size=16, num_pages=16)).engine.cost
    assert cost is not None
    assert (cost.context_s, cost.row_context_s, cost.draft_context_s) == pytest.approx(
        (2e-3, 0.5e-3, 0.1e-3)
    )
    assert 0 < cost.context < 40
    assert cost.request_s == pytest.approx(0.25 + cost.context * 2e-3)
    # Pages for a few positions only: nothing is known, and nothing is assumed.
    cost = LocalEngine(make_config(page_size=16, num_pages=4)).engine.cost
    assert cost is not None
    assert cost.at(1_000) is cost


@pytest.mark.parametrize(("page_size", "num_pages"), [(128, 8), (4, 2), (250, 1)])
def test_the_profile_rehearses_what_fits_into_the_pages_and_the_positions(
    page_size: int, num_pages: int, make_config: MakeConfig
) -> None:
    speculation = SpeculationConfig(max_draft_tokens=8)
    scheduler = SchedulerConfig(prefill_chunk=24, max_running=2)
    llm = LocalEngine(
        make_config(
            page_size=page_size, num_pages=num_pages, speculation=speculation, scheduler=scheduler
        )
    )
    cost = llm.engine.cost
    assert cost is not None
    assert len(cost.verify_s) == 9


def test_measured_rounds_are_told_apart_so_that_a_rank_in_them_makes_progress(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    send = MemoryChannel.send

    def noted(channel: MemoryChannel, header: RoundHeader, *args: Any) -> None:
        seen.append(header.round_id)
        send(channel, header, *args)

    monkeypatch.setattr(MemoryChannel, "send", noted)
    LocalEngine(make_config())
    assert len(seen) > 20
    assert len(set(seen)) == len(seen)


def test_rounds_of_every_size_that_is_captured_run_before_the_measured_ones(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[list[int]] = []
    send = MemoryChannel.send

    def noted(channel: MemoryChannel, header: RoundHeader, *args: Any) -> None:
        rounds.append([segment.num_rows for segment in header.segments])
        send(channel, header, *args)

    monkeypatch.setattr(MemoryChannel, "send", noted)
    monkeypatch.setattr(TorchEngine, "captured_rows", (8, 16, 64))
    LocalEngine(make_config(scheduler=SchedulerConfig(max_running=10)))
    assert rounds[:3] == [[6, 2], [6, 6, 4], [1]]


def test_a_pinned_cost_model_is_taken_instead_of_measuring(
    make_config: MakeConfig, cost_file: Path
) -> None:
    speculation = SpeculationConfig(max_draft_tokens=5, cost_file=cost_file)
    assert LocalEngine(make_config(speculation=speculation)).engine.cost == PINNED
    missing = SpeculationConfig(cost_file=cost_file.with_name("none.json"))
    with pytest.raises(ConfigError, match=r"none\.json"):
        LocalEngine(make_config(speculation=missing))


@pytest.mark.parametrize("name", ["greedy", "penalised"])
def test_no_registered_controller_changes_a_token(
    name: str, make_config: MakeConfig, cost_file: Path
) -> None:
    speculation = SpeculationConfig(max_draft_tokens=5, cost_file=cost_file)
    llm = LocalEngine(make_config(speculation=speculation))
    plain = llm.generate(requests(4, SAMPLING[name], SpeculationParams(mode="off"), "plain"))
    for controller in CONTROLLER_NAMES:
        requested = SpeculationParams(controller=controller)
        done = llm.generate(requests(4, SAMPLING[name], requested, controller))
        assert texts(done) == texts(plain), controller
        assert [g.logprobs for g in done] == [g.logprobs for g in plain], controller


def test_goodput_drafts_for_a_head_that_agrees_and_not_for_one_that_never_does(
    make_config: MakeConfig, cost_file: Path
) -> None:
    """A head that was not used for long first processes the rows it has missed, a few at a time."""
    drafted = {}
    for head in ("always", "never"):
        speculation = SpeculationConfig(
            max_draft_tokens=5, cost_file=cost_file, controller="goodput"
        )
        llm = LocalEngine(make_config(head, speculation=speculation))
        rounds: list[Generation] = []
        for turn in range(6):
            rounds += llm.generate(
                requests(4, SAMPLING["greedy"], SpeculationParams(), f"{head}-{turn}")
            )
        last_rounds = rounds[12:]
        drafted[head] = sum(sum(g.drafted) for g in last_rounds) / sum(
            len(g.drafted) for g in last_rounds
        )
    assert drafted["always"] > 2.5
    assert drafted["never"] < 0.3


def test_pinned_runs_draft_the_same_lengths(make_config: MakeConfig, cost_file: Path) -> None:
    speculation = SpeculationConfig(
        max_draft_tokens=5, cost_file=cost_file, controller="goodput", learn=False
    )
    lengths = []
    for _ in range(2):
        llm = LocalEngine(make_config(speculation=speculation))
        done = llm.generate(requests(4, SAMPLING["warm"], SpeculationParams(), "pinned"))
        lengths.append([generation.drafted for generation in done])
    assert lengths[0] == lengths[1]
    assert sum(map(sum, lengths[0])) > 0
