"""Processors of Ray Data. Oracle: the same engine as a library."""

import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from pydantic import ValidationError
from ray.data import DataContext, Dataset
from ray.data.checkpoint import CheckpointConfig

from eesd_dist import LLM, SamplingParams
from eesd_dist.text import Tokenizer
from serve_app.batch.loop import Bodies
from serve_app.batch.processor import (
    EESDEngineProcessorConfig,
    EESDServiceProcessorConfig,
    ProcessorConfig,
    build_processor,
    staged,
)
from serve_app.batch.resources import default_resources, max_engines, shared_resources
from serve_app.batch.results import RowResult
from serve_app.batch.rows import Row
from serve_app.batch.stage import COLUMN, StageRow
from tests.support.live_server import serving
from tests.support.tiny_tokenizer import write_byte_level
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.support.toy_source import ToySource

PROMPTS = [f"the dog {i} sat on" for i in range(10)]
GREEDY = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(autouse=True)
def _quiet(ray_port: int) -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _config(model: Path, **settings: Any) -> EESDEngineProcessorConfig:
    defaults: dict[str, Any] = {
        "model_source": str(model),
        "engine_kwargs": {"dtype": "float32", "num_threads": 1},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "batch_size": 3,
    }
    return EESDEngineProcessorConfig(**{**defaults, **settings})


def _prompts() -> Dataset:
    return ray.data.from_items([{"question": prompt} for prompt in PROMPTS])


def test_texts_are_those_of_the_engine_in_columns_of_ray_data(tiny_service: Path) -> None:
    processor = build_processor(
        _config(tiny_service),
        preprocess=lambda row: {"prompt": row["question"], "sampling_params": GREEDY},
        postprocess=lambda row: {**row, "answer": row["generated_text"].upper()},
    )
    rows = processor(_prompts()).take_all()
    assert processor.list_stage_names() == ["GenerateText"]
    llm = LLM(model=tiny_service, dtype="float32")
    outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY))  # type: ignore[arg-type]
    expected = {output.prompt: output.outputs[0] for output in outputs}
    assert {row["question"] for row in rows} == set(PROMPTS)
    for row in rows:
        output = expected[row["question"]]
        assert row["generated_text"] == output.text
        assert row["answer"] == output.text.upper()
        assert list(row["generated_tokens"]) == list(output.token_ids)
        assert row["num_generated_tokens"] == len(output.token_ids)
        assert row["num_input_tokens"] > 0
        assert row["finish_reason"] == output.finish_reason
        assert row["__inference_error__"] == ""


def test_a_row_without_a_seed_has_the_same_text_each_time(tiny_service: Path) -> None:
    def texts(batch_size: int) -> dict[str, str]:
        processor = build_processor(
            _config(tiny_service, batch_size=batch_size),
            preprocess=lambda row: {
                "id": row["question"],
                "prompt": "the dog",
                "sampling_params": {"max_tokens": 8, "temperature": 1.0},
            },
            postprocess=lambda row: {"id": row["id"], "text": row["generated_text"]},
        )
        return {row["id"]: row["text"] for row in processor(_prompts()).take_all()}

    first = texts(1)
    assert texts(5) == first
    assert len(set(first.values())) > 1


def test_rows_with_equal_ids_have_answers_of_their_own(tiny_service: Path) -> None:
    processor = build_processor(
        _config(tiny_service),
        preprocess=lambda row: {"id": 7, "prompt": row["question"], "sampling_params": GREEDY},
    )
    rows = processor(_prompts()).take_all()
    outputs = LLM(model=tiny_service, dtype="float32").generate(
        PROMPTS,
        SamplingParams(**GREEDY),  # type: ignore[arg-type]
    )
    texts = {output.prompt: output.outputs[0].text for output in outputs}
    assert {row["question"]: row["generated_text"] for row in rows} == texts


def test_a_bad_row_is_an_error_column_or_the_end_of_the_job(tiny_service: Path) -> None:
    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        heat = 9.0 if row["question"] == PROMPTS[4] else 0.0
        return {"prompt": row["question"], "sampling_params": {**GREEDY, "temperature": heat}}

    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        return {"question": row["question"], "text": row["generated_text"]}

    lenient = _config(tiny_service, should_continue_on_error=True)
    rows = build_processor(lenient, preprocess, postprocess)(_prompts()).take_all()
    errors = {row["question"]: row["__inference_error__"] for row in rows}
    assert errors.pop(PROMPTS[4]).startswith("temperature: ")
    assert set(errors.values()) == {""}
    with pytest.raises(Exception, match="temperature: "):
        build_processor(_config(tiny_service), preprocess, postprocess)(_prompts()).take_all()


def test_the_error_column_is_a_text_whatever_happens(tiny_service: Path) -> None:
    """A column without errors must not become one of nulls, and one bad row near the end, here a
    conversation that the template refuses, must not end a long job."""

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        messages: Any = [{"role": "user", "content": row["question"]}]
        if row["question"] == PROMPTS[-1]:
            messages = [{"role": 7}]
        return {"messages": messages, "sampling_params": GREEDY}

    config = _config(tiny_service, should_continue_on_error=True)
    processor = build_processor(config, preprocess)
    assert _types(processor(_prompts().limit(3)))["__inference_error__"] == pa.string()
    answers = processor(_prompts()).materialize()
    assert _types(answers)["__inference_error__"] == pa.string()
    errors = {row["question"]: row["__inference_error__"] for row in answers.take_all()}
    assert "messages" in errors.pop(PROMPTS[-1])
    assert set(errors.values()) == {""}


def _types(dataset: Dataset) -> dict[str, Any]:
    schema = dataset.schema()
    assert schema is not None
    return dict(zip(schema.names, schema.types, strict=True))


def test_ray_datas_checkpoints_serve_a_processor(tiny_service: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for half in (0, 1):
        rows = [{"id": i, "question": f"the dog {i} sat"} for i in range(20 * half, 20 * half + 20)]
        ray.data.from_items(rows).write_parquet(str(tmp_path / "in" / str(half)))

    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        with log.open("a") as lines:
            lines.write(f"{row['id']}\n")
        return {"id": row["id"], "text": row["generated_text"]}

    def run(folder: Path) -> set[int]:
        log.write_text("")
        processor = build_processor(
            _config(tiny_service),
            preprocess=lambda row: {"prompt": row["question"], "sampling_params": GREEDY},
            postprocess=postprocess,
        )
        processor(ray.data.read_parquet(str(folder))).write_parquet(str(tmp_path / "out"))
        return {int(line) for line in log.read_text().split()}

    context = DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="id",
        checkpoint_path=str(tmp_path / "checkpoint"),
        delete_checkpoint_on_success=False,
    )
    try:
        assert run(tmp_path / "in" / "0") == set(range(20))
        assert run(tmp_path / "in") == set(range(20, 40))  # the job that is continued
    finally:
        context.checkpoint_config = None
    answers = ray.data.read_parquet(str(tmp_path / "out")).take_all()
    assert sorted(row["id"] for row in answers) == list(range(40))


def test_stages_can_be_off(tiny_service: Path) -> None:
    tokenizer = Tokenizer.load(tiny_service)
    off = {"tokenize_stage": False, "detokenize_stage": False, "should_continue_on_error": True}

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        if row["question"] == PROMPTS[3]:
            return {"prompt": row["question"]}
        return {"tokenized_prompt": tokenizer.encode(row["question"]), "sampling_params": GREEDY}

    rows = build_processor(_config(tiny_service, **off), tokens)(_prompts()).take_all()
    answers = {row["question"]: row for row in rows}
    error = answers.pop(PROMPTS[3])["__inference_error__"]
    assert "expected a column tokenized_prompt, since the processor's earlier" in error
    assert {row["generated_text"] for row in answers.values()} == {""}
    outputs = LLM(model=tiny_service, dtype="float32").generate(
        list(answers),
        SamplingParams(**GREEDY),  # type: ignore[arg-type]
    )
    for output in outputs:
        tokens_of_row = answers[str(output.prompt)]["generated_tokens"]
        assert list(tokens_of_row) == list(output.outputs[0].token_ids)


def test_settings_are_checked_when_they_are_written(tiny_service: Path) -> None:
    with pytest.raises(ValidationError, match="found min > max"):
        _config(tiny_service, concurrency=(3, 2))
    with pytest.raises(ValidationError, match="batch_siz"):
        _config(tiny_service, batch_siz=3)


def test_a_processor_over_a_service_gives_its_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "model"))
    app = toy_api(ToyEngine(vocab_size=320), tokenizer=tokenizer, max_model_len=200)
    with serving(app) as url:
        processor = build_processor(
            EESDServiceProcessorConfig(url=url, batch_size=4),
            preprocess=lambda row: {
                "messages": [{"role": "user", "content": row["question"]}],
                "sampling_params": {"max_tokens": 5},
            },
        )
        rows = processor(_prompts()).take_all()
    assert {row["num_generated_tokens"] for row in rows} == {5}
    assert len({row["generated_text"] for row in rows}) > 1


def _toy_results(source: ToySource, prompts: list[str], **settings: Any) -> dict[str, RowResult]:
    stage_rows = [
        StageRow(
            row=Row(custom_id=prompt, digest="", body={"prompt": prompt, "max_tokens": 6}),
            columns={},
        )
        for prompt in prompts
    ]
    rows = ray.data.from_items(
        [{COLUMN: pickle.dumps(row)} for row in stage_rows], override_num_blocks=len(prompts)
    )
    defaults: dict[str, Any] = {"batch_size": 4, "should_continue_on_error": True}
    config = ProcessorConfig(**{**defaults, **settings})
    answers = staged(rows, config, source=source, body_of=Bodies(), resources={"CPU": 1.0})
    results = [pickle.loads(row[COLUMN]).result for row in answers.take_all()]
    assert len(results) == len(prompts)
    return {result.custom_id: result for result in results}


@pytest.mark.parametrize("kind", ["kills", "breaks"])
def test_a_row_that_kills_engines_is_named_and_the_others_are_answered(
    tmp_path: Path, kind: str
) -> None:
    prompts = [f"row {i}" for i in range(24)]
    prompts[13] += " is poison"
    source = ToySource(starts=tmp_path / "starts", delay_s=0.01)
    expected = _toy_results(source, prompts)
    poisoned = ToySource(starts=tmp_path / "poisoned", delay_s=0.01, **{kind: "poison"})  # type: ignore[arg-type]
    results = _toy_results(poisoned, prompts)
    assert "the engine broke" in results[prompts[13]].error
    assert results[prompts[13]].error_code == "poison_request"
    for prompt in set(prompts) - {prompts[13]}:
        assert results[prompt].answer["choices"] == expected[prompt].answer["choices"]
    # With others, with its batch, and twice alone.
    assert len((tmp_path / "poisoned").read_text()) == 1 + 4


def test_a_dead_engine_reloads_no_other(tmp_path: Path) -> None:
    prompts = [f"row {i}" for i in range(40)]
    prompts[20] = "poison"
    source = ToySource(starts=tmp_path / "starts", kills="poison", delay_s=0.02)
    results = _toy_results(source, prompts, concurrency=2, batch_size=1)
    (error,) = [result.error for result in results.values() if result.has_failed]
    (num_deaths,) = map(int, re.findall(r"the engine broke (\d+) times", error))
    assert 2 <= num_deaths <= 4
    assert len((tmp_path / "starts").read_text()) == 2 + num_deaths


def test_an_engine_that_cannot_be_built_ends_the_job(tiny_service: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "no model")
    with pytest.raises(Exception, match="no model"):
        build_processor(config, lambda row: {"prompt": "x"})(_prompts()).take_all()


@pytest.mark.parametrize(
    ("nodes", "resources", "num_engines"),
    [
        ([{"CPU": 2.0}], {"CPU": 1.0}, 1),
        ([{"CPU": 4.0}, {"CPU": 32.0}, {"CPU": 32.0}], {"CPU": 16.5}, 2),
        ([{"CPU": 96.0, "GPU": 8.0}, {"CPU": 4.0}], {"CPU": 1.0, "GPU": 1.0}, 8),
    ],
)
def test_each_large_node_or_gpu_has_one_engine(
    nodes: list[dict[str, float]],
    resources: dict[str, float],
    num_engines: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _list_nodes(monkeypatch, nodes)
    assert default_resources("auto") == resources
    assert max_engines(default_resources("auto")) == num_engines


@pytest.mark.parametrize(
    ("cores", "num_engines", "expected"),
    [([5, 5], 3, 2), ([8, 8], 3, 4), ([2, 32], 2, 16), ([4, 4], 2, 4), ([4], 9, 1), ([0], 2, 1)],
)
def test_so_many_engines_as_are_asked_for_fit_the_nodes(
    cores: list[float], num_engines: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _list_nodes(monkeypatch, [{"CPU": size} for size in cores])
    assert shared_resources(num_engines, "auto") == {"CPU": expected}


def test_a_device_that_is_named_decides_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _list_nodes(monkeypatch, [{"CPU": 16.0, "GPU": 2.0}])
    assert default_resources("cpu") == {"CPU": 8.5}
    assert "GPU" not in shared_resources(2, "cpu")
    _list_nodes(monkeypatch, [{"CPU": 0.0}])  # a head, before there are nodes
    assert default_resources("cuda") == shared_resources(4, "cuda") == {"CPU": 1.0, "GPU": 1.0}
    assert default_resources("auto") == {"CPU": 1.0}


def _list_nodes(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, float]]) -> None:
    listed = [{"Alive": True, "Resources": node} for node in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
