"""The pool of engines of `eesd batch`. Oracle: the same rows in engines that nothing kills."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from eesd_dist.config import EngineConfig
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.telemetry.tracing_options import TracingOptions
from serve_app.batch.engine_pool import EnginePool
from serve_app.batch.loop import Bodies
from serve_app.batch.results import RowResult
from serve_app.batch.rows import Row
from serve_app.batch.sources import EngineSource, Source
from tests.support.toy_source import ToySource


@pytest.fixture(autouse=True)
def _ray(ray_port: int) -> None:
    del ray_port


def _run(source: Source, prompts: Sequence[str], **settings: Any) -> dict[str, RowResult]:
    pool = EnginePool(
        **{
            "source": source,
            "body_of": Bodies(),
            "num_engines": 1,
            "resources": {"CPU": 0.1},
            "concurrency": 16,
            "num_rows": len(prompts),
            **settings,
        }
    )
    results: list[RowResult] = []
    asyncio.run(pool.run(_rows(prompts), results.append))
    by_prompt = {result.custom_id: result for result in results}
    assert len(results) == len(by_prompt) == len(prompts)
    return by_prompt


def _rows(prompts: Iterable[str]) -> Any:
    for ordinal, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_tokens": 6}
        yield Row(custom_id=prompt, digest="", body=body, ordinal=ordinal)


@pytest.mark.parametrize("kind", ["kills", "breaks"])
def test_a_row_that_kills_engines_is_named_and_the_others_are_answered(
    tmp_path: Path, kind: str
) -> None:
    prompts = [f"row {i}" for i in range(60)]
    prompts[13] += " is poison"
    expected = _run(ToySource(starts=tmp_path / "starts", delay_s=0.01), prompts)
    poisoned = ToySource(starts=tmp_path / "poisoned", delay_s=0.01, **{kind: "poison"})  # type: ignore[arg-type]
    results = _run(poisoned, prompts)
    assert "the engine broke" in results[prompts[13]].error
    assert results[prompts[13]].error_code == "poison_request"
    for prompt in set(prompts) - {prompts[13]}:
        assert results[prompt].answer["choices"] == expected[prompt].answer["choices"]
    # With others, in its group, and twice alone.
    assert len((tmp_path / "poisoned").read_text()) == 1 + 4


def test_a_dead_engine_reloads_no_other_and_its_rows_do_not_wait_for_it(tmp_path: Path) -> None:
    prompts = [f"row {i}" for i in range(80)]
    prompts[20] = "poison"
    source = ToySource(starts=tmp_path / "starts", kills="poison", delay_s=0.02)
    results = _run(source, prompts, num_engines=2)
    (error,) = [result.error for result in results.values() if result.has_failed]
    (num_deaths,) = map(int, re.findall(r"the engine broke (\d+) times", error))
    assert 2 <= num_deaths <= 4
    assert len((tmp_path / "starts").read_text()) <= 2 + num_deaths


def test_an_engine_that_finds_no_resources_is_reported_and_the_others_do_its_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.batch.engine_pool._PATIENCE_S", 0.5)
    num_cpus = ray.cluster_resources()["CPU"]
    source = ToySource(starts=tmp_path / "starts", delay_s=0.5)
    prompts = [f"row {i}" for i in range(40)]
    _run(source, prompts, num_engines=2, resources={"CPU": 0.6 * num_cpus})
    assert len((tmp_path / "starts").read_text()) == 1
    assert f"waits: no node of the cluster has CPU {0.6 * num_cpus:g} free" in caplog.text


def test_engines_that_cannot_be_built_end_the_job(tmp_path: Path) -> None:
    engine = EngineConfig.model_validate({"model": {"path": tmp_path / "no model"}})
    source = EngineSource(
        engine=engine, model_name="x", tracing=TracingOptions(), has_whole_node=False
    )
    with pytest.raises(ConfigError, match="no model"):
        _run(source, ["a row"])


def test_rows_that_all_kill_are_all_named(tmp_path: Path) -> None:
    source = ToySource(starts=tmp_path / "starts", kills="")  # in every prompt
    results = _run(source, ["one", "two"])
    assert {result.error_code for result in results.values()} == {"poison_request"}


def test_an_error_of_the_output_ends_the_job_as_it_is(tmp_path: Path) -> None:
    pool = EnginePool(
        source=ToySource(starts=tmp_path / "starts"),
        body_of=Bodies(),
        num_engines=1,
        resources={},
        concurrency=4,
        num_rows=8,
    )

    def take(result: RowResult) -> None:
        raise EngineError(f"too many errors, at {result.custom_id}")

    with pytest.raises(EngineError, match="too many errors, at row"):
        asyncio.run(pool.run(_rows(f"row {i}" for i in range(8)), take))
    assert len((tmp_path / "starts").read_text()) == 1
