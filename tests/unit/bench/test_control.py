"""`eesd bench control` from the command line: on a tiny model, and on traces alone."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from eesd_dist.bench import control
from eesd_dist.bench.crowds import Guest, in_turn, mixed, take_per_class
from eesd_dist.bench.judging import Curve, Judge, fixed_variants, tree_variants
from eesd_dist.bench.live import PLAIN, Pass, Race
from eesd_dist.bench.options import ControlOptions
from eesd_dist.bench.replay import ReplaySetting, Variant, replay
from eesd_dist.bench.traces import Guess, Trace, TraceSet
from eesd_dist.config import EngineConfig, ModelConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.engine.build import compile_kernels
from eesd_dist.errors import ConfigError
from eesd_dist.text.prompts import Prompt, prompts_of_context
from eesd_dist.types import Evidence, TokenId
from serve_app.cli.main import main
from tests.support.drafters import save_target
from tests.support.tiny_service import write_tiny_service
from tests.support.tiny_tokenizer import write_byte_level
from tests.unit.telemetry.rounds import a_round

COST = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.0, 1.1, 1.2, 1.3), round_s=0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_service(tmp_path_factory.mktemp("control") / "tiny")


PROMPTS = """
{"prompt": "the quick", "class": "a"}
{"prompt": "brown fox", "class": "a"}
{"prompt": "dog", "class": "b"}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A quick run, and its outputs."""

    report: dict[str, Any]
    words: list[str]
    traces: Path
    cpu_seconds: float


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ran")
    (folder / "prompts.jsonl").write_text(PROMPTS)
    words = ["--model", str(model), "--prompts", str(folder / "prompts.jsonl"), "--quick"]
    words += ["--temperatures", "0", "1.2", "--max-tokens", "8", "--dtype", "float32", "--json"]
    COST.save(folder / "cost.json")  # drafts must not depend on the load
    words += ["--cost", str(folder / "cost.json")]
    recording = ["--record", str(folder / "traces.json")]
    # Once a machine: the time is that of the benchmark.
    compile_kernels(EngineConfig(model=ModelConfig(path=model, dtype="float32")))
    started = time.process_time()
    report = report_of([*words, *recording])
    return Ran(
        report=report,
        words=words,
        traces=folder / "traces.json",
        cpu_seconds=time.process_time() - started,
    )


def report_of(words: Sequence[str]) -> dict[str, Any]:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["bench", "control", *words]) == 0
    report: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return report


def test_a_quick_run_reports_all_that_is_promised_of_it(ran: Ran) -> None:
    summary = ran.report["summary"]
    classes = {"a/t0", "b/t0", "a/t1.2", "b/t1.2"}
    assert summary["texts_unlike_plain"] == 0
    assert summary["basis"] == "live"
    assert set(summary["goodput_over_best_fixed_per_class"]) == classes
    assert summary["goodput_over_best_single_fixed_mixed"] > 0
    assert summary["worst_load_over_plain"] > 0
    for name in ("beta", "calibration"):
        assert set(summary[name]["over_best_fixed_per_class"]) == classes
        assert summary[name]["over_best_single_fixed_mixed"] > 0
        assert summary[name]["worst_load_over_plain"] > 0
    assert ran.report["provenance"]["command"]
    assert ran.cpu_seconds < 40.0


def test_live_crowds_are_as_large_as_they_are_called(ran: Ran) -> None:
    loads = ran.report["live"]["by_load"]
    assert {load: row["largest_batch"] for load, row in loads.items()} == {
        str(load): load for load in (1, 2, 4, 8, 16, 32)
    }
    assert ran.report["live"]["mixed"]["largest_batch"] >= 16


def test_trees_are_raced_against_the_chains_of_the_same_controller(ran: Ran) -> None:
    ratios = ran.report["summary"]["tree_over_chain"]
    trees = {f"{n}, {s} tree" for n in ("goodput", "calibration") for s in ("static", "dynamic")}
    assert ratios
    for name, row in ratios.items():
        assert set(row) == trees
        race = ran.report["live"]["trees"][name]
        assert {"plain", "goodput", "calibration"} | trees == set(race["variants"])
    shapes = {variant.label: variant.params.tree for variant in tree_variants()}
    assert shapes["goodput"] == "none"
    assert shapes["goodput, static tree"] == "static"
    assert shapes["calibration, dynamic tree"] == "dynamic"


def test_the_replay_goes_through_every_controller_and_length(ran: Ran) -> None:
    names = set(CONTROLLER_NAMES) - {"fixed", "ngram"}
    lengths = {"plain", *(f"fixed {length}" for length in range(1, 9))}
    replayed = ran.report["replay"]
    rows = [replayed["mixed"], *replayed["by_load"].values()]
    rows += [loads["1"] for loads in replayed["by_class"].values()]
    for row in rows:
        assert names | lengths <= set(row["variants"])
        assert row["variants"][row["best_fixed"]]["over_best_fixed"] == 1.0
        assert row["variants"]["plain"]["over_plain"] == 1.0
    assert names <= set(replayed["change_of_class"]["variants"])
    assert names <= set(replayed["priors"]["a/t0"])


def test_the_pictures_are_drawn_from_the_recording_and_small(ran: Ran, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(ran.report))
    script = Path(__file__).parents[3] / "infra" / "draw_control.py"
    words = ["--traces", str(ran.traces), "--report", str(tmp_path / "report.json")]
    done = subprocess.run(
        [sys.executable, str(script), *words, "--folder", str(tmp_path / "pictures")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [picture.name for picture in pictures] == [
        f"control-{name}.png"
        for name in ("change", "lengths", "load", "posterior", "regret", "reliability")
    ]
    assert all(1_000 < picture.stat().st_size < 80_000 for picture in pictures)


def test_kept_traces_give_the_same_figures_again(ran: Ran) -> None:
    """With recorded rounds and a recorded cost model, nothing depends on the machine."""
    words = [*ran.words, "--only", "replay", "--traces", str(ran.traces)]
    first, second = report_of(words), report_of(words)
    assert first["replay"] == second["replay"]
    assert first["replay"] == ran.report["replay"]
    assert first["summary"]["basis"] == "replay"
    assert first["summary"]["texts_unlike_plain"] is None
    assert set(first["summary"]["beta"]["over_best_fixed_per_class"]) == {
        "a/t0",
        "b/t0",
        "a/t1.2",
        "b/t1.2",
    }


def test_a_pinned_cost_model_is_the_replays_clock(ran: Ran, tmp_path: Path) -> None:
    slow = CostModel(draft_step_s=0.1, verify_s=(2.0,), round_s=0.5)
    slow.save(tmp_path / "cost.json")
    words = [*ran.words, "--only", "replay", "--traces", str(ran.traces)]
    report = report_of([*words, "--cost", str(tmp_path / "cost.json")])
    plain = report["replay"]["by_class"]["a/t0"]["1"]["variants"]["plain"]
    texts = [text for text in TraceSet.load(ran.traces).traces if text.workload == "a/t0"]
    seconds = sum(
        slow.batch_seconds([0], num_known=text.num_prompt) + (len(text) - 1) * slow.seconds(0)
        for text in texts
    )
    assert plain["tokens_per_s"] == pytest.approx(sum(map(len, texts)) / seconds, abs=0.01)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--traces", "a", "--record", "b"], "use one of them"),
        (["--max-tokens", "5000"], "lower --max-tokens"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(
    ran: Ran, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "control", *ran.words, *words]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("head", ["own", "useless"])
def test_the_table_of_contexts_has_every_place_that_fits(
    model: Path, tmp_path: Path, head: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    COST.save(tmp_path / "cost.json")
    words = ["--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), "--json"]
    words += ["--only", "contexts", "--contexts", "24", "60", "100000", "--loads", "1", "3"]
    words += ["--temperatures", "0", "1", "--max-tokens", "6", "--dtype", "float32"]
    words += ["--cost", str(tmp_path / "cost.json")]
    words += ["--useless-head"] if head == "useless" else []
    summary = report_of(words)["summary"]
    cells = summary["cells"]
    assert {(row["context"], row["temperature"], row["load"]) for row in cells} == {
        (context, temperature, load)
        for context in (24, 60)
        for temperature in (0.0, 1.0)
        for load in (1, 3)
    }
    assert summary["texts_unlike_plain"] == 0
    assert summary["lowest"] == min(row["over_plain_95"][0] for row in cells)
    for row in cells:
        low, high = row["over_plain_95"]
        assert 0.0 < low <= high
        assert row["over_plain"] > 0.0
        assert row["plain_tokens_per_s"] > 0
        assert 0.0 <= row["drafting_share"] <= 1.0


def test_contexts_are_the_ends_of_the_prompts_and_distinct() -> None:
    prompts = [
        Prompt(workload="a", tokens=tuple(map(TokenId, range(first, first + 7))))
        for first in (0, 100, 200, 300, 400)
    ]
    for context in (3, 7, 12, 90):
        texts = [prompt.tokens for prompt in prompts_of_context(prompts, context, limit=4)]
        assert [len(tokens) for tokens in texts] == [context] * 4
        assert len(set(texts)) == 4
        for tokens, prompt in zip(texts, prompts, strict=False):
            assert tokens[-3:] == prompt.tokens[-3:]


def test_contexts_of_which_none_fits_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--only", "contexts", "--contexts", "100000"]
    assert main(["bench", "control", *words]) == 2
    assert "use shorter --contexts" in capsys.readouterr().err


def test_without_a_head_there_is_nothing_to_judge(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    save_target(tmp_path, vocab_size=320)
    with pytest.raises(ConfigError, match="found no exit head"):
        control.main(ControlOptions(model=tmp_path))


def trace(accepted: Sequence[int], *, ceiling: int = 4, workload: str = "a") -> Trace:
    """Returns a text with the given accepted drafts and constant evidence."""
    seen = tuple(Evidence(depth=depth, top1_prob=0.5) for depth in range(ceiling))
    return Trace(
        workload=workload,
        temperature=0.0,
        seed=len(accepted),
        num_prompt=1,
        max_tokens=len(accepted),
        tokens=tuple(TokenId(0) for _ in accepted),
        guesses=tuple(Guess(num_accepted=count, evidence=seen) for count in accepted),
    )


def judge(*traces: Trace) -> Judge:
    trace_set = TraceSet(max_draft_tokens=4, cost=COST, traces=traces)
    return Judge(trace_set, setting(), seed=0)


def setting() -> ReplaySetting:
    return ReplaySetting(
        speculation=SpeculationConfig(max_draft_tokens=4, fixed_length=4),
        cost=COST,
        calibrator=None,
    )


def test_the_best_fixed_length_is_none_where_nothing_and_all_where_everything_is_accepted() -> None:
    never, always = trace([0] * 40), trace([4] * 40)
    assert judge(never).class_rates([never], 1).best_fixed == "plain"
    assert judge(always).class_rates([always], 1).best_fixed == "fixed 4"


def test_a_round_of_a_batch_costs_what_the_cost_model_says() -> None:
    """Two requests of which one ends sooner; the seconds are computed by hand."""
    (fixed,) = [v for v in fixed_variants(4) if v.label == "fixed 2"]
    run = replay([trace([2] * 6), trace([0] * 2)], fixed, setting())
    assert [len(turns) for turns in run.rounds] == [2, 2]
    assert run.tokens == 8
    # The shorter text has room for one drafted token at first, and then for none.
    assert run.seconds == pytest.approx([COST.batch_seconds([2, 1]), COST.batch_seconds([2, 0])])


@pytest.mark.usefixtures("documented_controller")
def test_a_guess_that_is_refused_is_paid_for() -> None:
    dear = replace(COST, guess_s=0.08)
    variant = Variant(label="threshold", controller="threshold")  # 0.5 is below its threshold 0.6
    run = replay([trace([4] * 3)], variant, replace(setting(), cost=dear))
    guessed = dear.seconds(0) + dear.guess_s
    assert run.seconds == pytest.approx([guessed, guessed, dear.seconds(0)])


def test_no_request_arrives_before_the_mark_unless_the_engine_is_idle() -> None:
    crowd = (Guest(text=0), Guest(text=0, after_tokens=2), Guest(text=0, after_tokens=99))
    run = replay([trace([0] * 4)], PLAIN, setting(), crowd=crowd)
    assert [len(turns) for turns in run.rounds] == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]


def test_the_mean_curve_keeps_what_an_ended_text_has_lost() -> None:
    mean = Curve.mean_of([Curve(lost_s=(1.0, 3.0)), Curve(lost_s=(2.0,))])
    assert mean.lost_s == (1.5, 2.5)


def test_the_change_of_class_goes_from_the_easiest_to_the_hardest_and_back() -> None:
    easy, hard = trace([4] * 20, workload="easy"), trace([0] * 20, workload="hard")
    change = judge(hard, trace([1] * 20, workload="middling"), easy).change_of_class()
    assert change.classes == ("easy", "hard", "easy")
    assert change.seams == (20, 40)
    lost = change.as_json()["variants"]
    assert isinstance(lost, dict)
    # Full drafts are right in the easy parts and wrong in the hard one; plain decoding the reverse.
    full, plain = (lost[name]["lost_ms_per_round"] for name in ("fixed 4", "plain"))
    assert full[0]["first"] == pytest.approx(0.0, abs=1e-6)
    assert full[1]["later"] > 0
    assert plain[1]["later"] == pytest.approx(0.0, abs=1e-6)
    assert plain[2]["later"] > 0


def passes(**seconds: float) -> dict[str, Pass]:
    text = [(TokenId(1), TokenId(2))]
    return {
        label: Pass(seconds=took, tokens=2, texts=list(text), rounds=[a_round()])
        for label, took in seconds.items()
    }


def test_a_race_is_judged_by_sums_over_its_blocks() -> None:
    race = Race(blocks=(passes(plain=2.0, fast=1.0), passes(plain=4.0, fast=2.0)))
    assert race.ratio("fast", "plain") == pytest.approx(2.0)
    interval = race.interval("fast", "plain")
    assert interval.low == interval.high == pytest.approx(2.0)


def test_the_median_of_the_blocks_is_not_moved_by_one_disturbance() -> None:
    calm = passes(plain=2.0, fast=1.0)
    race = Race(blocks=(calm, calm, passes(plain=2.0, fast=50.0)))
    assert race.median_ratio("fast", "plain") == pytest.approx(2.0)
    assert race.ratio("fast", "plain") < 1.0


def test_an_interval_spans_the_blocks_that_disagree() -> None:
    race = Race(
        blocks=tuple(passes(plain=2.0, other=took) for took in (1.0, 2.0, 2.0, 4.0) for _ in "ab")
    )
    interval = race.interval("other", "plain")
    assert interval.low < race.ratio("other", "plain") < interval.high


def test_a_changed_token_is_counted() -> None:
    block = passes(plain=1.0, wrong=1.0)
    block["wrong"].texts[0] = (TokenId(1), TokenId(3))
    assert Race(blocks=(block, passes(plain=1.0, wrong=1.0))).texts_unlike_plain == 1


def test_mixed_traffic_comes_in_bursts_and_repeats_no_text_before_all_were_drawn() -> None:
    crowd = mixed(10, max_tokens=20, rng=Random(0), bursts=(1, 4, 5))
    assert sorted(guest.text for guest in crowd) == list(range(10))
    assert [guest.after_tokens for guest in crowd] == [0, *[16] * 4, *[80] * 5]
    assert [guest.max_running for guest in in_turn(3, 2, rng=Random(0))] == [2] * 8


def test_each_class_gives_its_first_prompts() -> None:
    prompts = [Prompt(workload=name, tokens=(TokenId(i),)) for i, name in enumerate("aabab")]
    prompts_of_classes = take_per_class(prompts, 2)
    assert [(prompt.workload, prompt.tokens[0]) for prompt in prompts_of_classes] == [
        ("a", 0),
        ("a", 1),
        ("b", 2),
        ("b", 4),
    ]
