"""Batch jobs next to a service with two verify ranks, and over it. Oracle: the service's texts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from psutil import Process
from ray import serve
from ray.data import DataContext

from eesd_dist.errors import ConfigError
from serve_app.batch import (
    EESDEngineProcessorConfig,
    EESDServiceProcessorConfig,
    build_processor,
)
from tests.support.running import Running, until

NUM_ROWS = 40
PROMPTS = [f"the dog {i} sat on" for i in range(NUM_ROWS)]
PARAMETERS = {"max_tokens": 24, "temperature": 0.8}


def _texts(config: EESDServiceProcessorConfig | EESDEngineProcessorConfig) -> dict[str, str]:
    DataContext.get_current().enable_progress_bars = False
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "prompt": row["item"],
            "seed": PROMPTS.index(row["item"]),
            "sampling_params": PARAMETERS,
        },
        postprocess=lambda row: {"prompt": row["item"], "text": row["generated_text"]},
    )
    rows = processor(ray.data.from_items(PROMPTS)).take_all()
    return {row["prompt"]: row["text"] for row in rows}


@pytest.fixture(scope="module")
def expected(service: Running) -> dict[str, str]:
    texts = _texts(EESDServiceProcessorConfig(name=service.config.app_name, batch_size=8))
    assert set(texts) == set(PROMPTS)
    assert len(set(texts.values())) > 1
    return texts


def test_a_service_is_found_by_its_name(service: Running, expected: dict[str, str]) -> None:
    assert _texts(EESDServiceProcessorConfig(url=service.url)) == expected
    with pytest.raises(ConfigError, match=f"no service 'x' in this cluster: found {_APP}"):
        EESDServiceProcessorConfig(name="x").source()
    with pytest.raises(ValueError, match="either url or name"):
        EESDServiceProcessorConfig()


_APP = "eesd"


def test_a_processor_has_pipelines_of_its_own(
    service: Running, expected: dict[str, str], tiny_service: Path
) -> None:
    config = EESDEngineProcessorConfig(
        model_source=str(tiny_service),
        engine_kwargs={
            "dtype": "float32",
            "device": "cpu",
            "tensor_parallel_size": 2,
            "num_pages": 256,
        },
        placement_group_config={"bundles": [{"CPU": 0.5}], "strategy": "PACK"},
        batch_size=8,
    )
    assert _texts(config) == expected
    until(lambda: set(serve.status().applications) == {service.config.app_name}, timeout_s=60)


@contextmanager
def _job(folder: Path, model: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Gives a job with a pipeline of its own on this cluster, and its output."""
    rows, output = folder / "rows.jsonl", folder / "out.jsonl"
    lines = [
        json.dumps({"id": prompt, "prompt": prompt, "seed": seed, **PARAMETERS})
        for seed, prompt in enumerate(PROMPTS)
    ]
    rows.write_text("\n".join(lines))
    command = [sys.executable, "-m", "serve_app.cli.main", "batch", str(rows), str(output)]
    command += ["--model", str(model), "--dtype", "float32", "--device", "cpu", "--quiet"]
    command += ["--verify-tp", "2", "--set", "engine.cache.num_pages=256", "--concurrency", "4"]
    command += ["--address", ray.get_runtime_context().gcs_address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    ) as process:
        try:
            yield process, output
        finally:
            process.kill()


def _wait_for_rows(number: int, process: "subprocess.Popen[str]", output: Path) -> None:
    def is_there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return output.exists() and output.read_bytes().count(b"\n") >= number

    until(is_there, timeout_s=120)


def _job_apps() -> list[str]:
    return [name for name in serve.status().applications if name.startswith("eesd-batch-")]


def _text_of(record: dict[str, Any]) -> str:
    text: str = record["response"]["body"]["choices"][0]["text"]
    return text


def test_a_job_has_a_pipeline_that_recovers_and_ends_with_it(
    service: Running, expected: dict[str, str], tiny_service: Path, tmp_path: Path
) -> None:
    with _job(tmp_path, tiny_service) as (process, output):
        _wait_for_rows(6, process, output)
        (app,) = _job_apps()
        pipeline = serve.get_deployment_handle("Pipeline", app)
        workers = pipeline.state.remote().result(timeout_s=30).workers
        Process(workers[-1].pid).kill()
        text, _ = process.communicate(timeout=180)
    assert process.returncode == 0, text
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len(records) == NUM_ROWS
    assert {record["custom_id"]: _text_of(record) for record in records} == expected
    until(lambda: not _job_apps(), timeout_s=60)


def test_a_killed_job_leaves_no_pipeline(
    service: Running, expected: dict[str, str], tiny_service: Path, tmp_path: Path
) -> None:
    with _job(tmp_path, tiny_service) as (process, output):
        _wait_for_rows(1, process, output)
        assert _job_apps()
        process.kill()
        process.communicate()
    until(lambda: not _job_apps(), timeout_s=90)
    assert set(serve.status().applications) == {service.config.app_name}
    for line in output.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            record = json.loads(line)
            assert _text_of(record) == expected[record["custom_id"]]
