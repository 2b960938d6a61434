"""The benchmarks run on any checkpoint, and detect what they are meant to detect."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from eesd_dist.bench import exact
from eesd_dist.bench.online import Sample, percentiles, row_of
from eesd_dist.bench.options import SHIPPED_PROMPTS
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.engine.local import Generation, LocalEngine
from eesd_dist.text.prompts import load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from eesd_dist.types import Request, TokenId
from serve_app.cli.main import main
from tests.support.running import free_port
from tests.support.tiny_service import write_tiny_service


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("bench") / "tiny")


def test_offline_reports_every_variant_and_no_changed_text(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick", "class": "a"}\n{"prompt": "dog", "class": "b"}\n')
    words = ["--model", str(model), "--prompts", str(prompts), "--max-tokens", "10"]
    words += ["--repeats", "1", "--dtype", "float32", "--device", "cpu", "--json"]
    assert main(["bench", "offline", *words]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    summary = report["summary"]
    assert set(summary["by_class"]) == {"a", "b"}
    assert summary["texts_unlike_plain"] == 0
    for key in (
        "plain_over_transformers",
        "best_thompson_over_plain",
        "best_thompson_over_best_fixed",
        "worst_class_over_plain",
    ):
        assert summary[key] > 0
    fixed = {f"fixed {k}" for k in range(1, 9)}
    assert fixed | {"plain", "transformers", "beta", "calibration"} <= set(report["variants"])
    assert report["variants"]["plain"]["over_plain"] == 1.0
    assert report["settings"]["device"] == "cpu"
    drafted = report["variants"]["fixed 8"]
    assert 0.0 <= drafted["accepted_over_drafted"] <= drafted["accepted_over_judged"] <= 1.0


def test_offline_times_the_lengths_that_are_wanted_on_this_engine_alone(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick", "class": "a"}\n{"prompt": "dog", "class": "a"}\n')
    words = ["--model", str(model), "--prompts", str(prompts), "--max-tokens", "6"]
    words += ["--repeats", "1", "--device", "cpu", "--json", "--skip-transformers"]
    assert main(["bench", "offline", *words, "--fixed", "2", "--fixed", "5"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    controllers = {"beta", "calibration", "goodput", "ngram"}
    assert set(report["variants"]) == {"plain", "fixed 2", "fixed 5", *controllers}
    assert report["variants"]["plain"]["over_plain_without_prefill"] == 1.0
    assert report["summary"]["by_class"]["a"]["best_thompson"]["tokens"] > 0
    for ratio in report["summary"]["by_class"]["a"]["over_plain"].values():
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert main(["bench", "offline", *words, "--fixed", "9"]) == 2
    assert "expected draft lengths from 1 to 8" in capsys.readouterr().err


def test_a_batch_is_timed_on_every_variant_with_an_interval(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--batches", "3", "--max-tokens", "6", "--repeats", "2"]
    assert main(["bench", "batch", *words, "--dtype", "float32", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = report["batches"]["3"]
    assert set(rows) == {"plain", "speculation", "ngram", "transformers"}
    for name, row in rows.items():
        assert name == "transformers" or row["texts_unlike_plain"] == 0
        assert 0 < row["over_plain"]["low"] <= row["over_plain"]["value"]
    speeds = report["transformers"]["tokens_per_s_by_dtype"]
    assert set(speeds) == {"float32", "bfloat16"}
    assert speeds[report["transformers"]["dtype"]] == max(speeds.values())
    assert "1 threads" in report["machine"]


def test_texts_of_a_batch_have_the_sampling_parameters_that_are_asked_for(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "batch", "--model", str(model), "--batches", "2", "--max-tokens", "5"]
    words += ["--repeats", "1", "--dtype", "float32", "--device", "cpu", "--temperature", "0.7"]
    words += ["--top-p", "0.8", "--top-k", "9", "--min-p", "0.01", "--repetition-penalty", "1.1"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["sampling"] == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
    }
    assert report["batches"]["2"]["speculation"]["texts_unlike_plain"] == 0
    assert main([*words, "--top-p", "1.5"]) == 2
    assert "top_p: found 1.5" in capsys.readouterr().err


def test_batches_have_prompts_of_the_length_that_is_asked_for(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "batch", "--model", str(model), "--batches", "2", "--max-tokens", "4"]
    words += ["--repeats", "1", "--dtype", "float32", "--device", "cpu", "--skip-transformers"]
    assert main([*words, "--prompt-tokens", "90", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["prompt_tokens"] == 90
    assert report["batches"]["2"]["speculation"]["texts_unlike_plain"] == 0
    assert main([*words, "--prompt-tokens", "100000"]) == 2
    assert "expected at most" in capsys.readouterr().err
    assert main([*words, "--prompt-tokens", "0"]) == 2
    assert "expected 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["batch", "online"])
def test_a_url_without_a_service_is_an_error_in_a_line(
    name: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--url", f"http://127.0.0.1:{free_port()}"]
    words += ["--model", str(model), "--dtype", "float32"] if name == "batch" else []
    assert main(["bench", *words]) == 2
    assert "found no service with a model" in capsys.readouterr().err


class Forgetful:
    """A runner with a bug: under speculation every text loses its last token."""

    def __init__(self, llm: LocalEngine) -> None:
        self._llm = llm

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        done = self._llm.generate(requests)
        for request, generation in zip(requests, done, strict=True):
            if request.speculation.mode == "auto":
                generation.tokens[-1] = TokenId((generation.tokens[-1] + 1) % 300)
        return done


_HERE = exact.Case(verify_ranks=0, dtype="float32", numerics="invariant")


def test_exact_finds_a_single_changed_token(model: Path) -> None:
    case = _HERE
    config = exact.engine_config(model, None, case)
    prompts = load_prompts(Tokenizer.load(model), SHIPPED_PROMPTS, limit=4)
    lines: list[str] = []
    runner = LocalEngine(config)
    sound = exact.compare(
        runner, prompts, max_tokens=4, stop_token_ids=(), report=lines.append, label="sound"
    )
    assert sound.total.mismatches == 0
    assert not lines
    assert sound.total.tokens > 200
    assert min(tally.tokens for tally in sound.by_shape.values()) > 0.2 * sound.total.tokens
    broken = exact.compare(
        Forgetful(runner), prompts, max_tokens=4, stop_token_ids=(), report=lines.append, label="b"
    )
    assert min(tally.mismatches for tally in broken.by_shape.values()) >= 60
    assert lines


def test_exact_meets_every_controller_with_every_shape_under_every_sampling(model: Path) -> None:
    config = exact.engine_config(model, None, _HERE)
    combinations: set[tuple[str, str, float]] = set()

    class Listening:
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            for request in requests:
                speculation = request.speculation
                if speculation.mode == "auto":
                    key = (str(speculation.controller), str(speculation.tree))
                    combinations.add((*key, request.sampling.temperature))
            return [Generation(request_id=request.request_id) for request in requests]

    prompts = load_prompts(Tokenizer.load(config.model.path), SHIPPED_PROMPTS, limit=1)
    exact.compare(
        Listening(), prompts, max_tokens=4, stop_token_ids=(), report=lambda _: None, label="l"
    )
    temperatures = {sampling.temperature for sampling in exact.SAMPLING.values()}
    assert len(combinations) == len(CONTROLLER_NAMES) * len(exact.SHAPES) * len(temperatures)


def test_online_figures_are_taken_from_what_clients_saw() -> None:
    samples = [
        Sample(
            first_token_s=0.1 * i,
            gaps_s=(0.01, 0.02),
            total_s=0.1 * i + 0.9,
            num_tokens=10,
            num_drafted=8,
            num_accepted=4,
        )
        for i in range(1, 5)
    ]
    row = row_of(samples, 2.0)
    assert row["tokens_per_s"] == 20.0
    assert row["acceptance"] == 0.5
    assert row["time_per_token_ms"]["p50"] == pytest.approx(100.0)
    assert percentiles([]) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["costs", "--batches", "0"], "at least 1 request"),
        (["costs", "--lengths", "-1"], "drafts of -1 tokens"),
        (["costs", "--verify-tp", "3"], "choose one of"),
        (["costs", "--repeats", "0"], "repeats is 0"),
        (["costs", "--verify-tp", "0"], "at least"),
        (["costs", "--max-tokens", "0"], "max_tokens is 0"),
    ],
)
def test_costs_that_cannot_be_measured_are_refused_before_a_rank_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
