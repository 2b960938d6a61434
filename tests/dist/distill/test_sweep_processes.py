"""A sweep tries the requested combinations, each head in a separate process, and none twice."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.sweep import Combination, recommendation, sweep
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_features import write_tiny_features, write_tiny_target
from tests.support.tiny_sweep import sweep_request

pytestmark = pytest.mark.dist


def say_nothing(text: str) -> None:
    assert text


def test_every_combination_is_trained_measured_and_not_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_tiny_target(tmp_path / "target")
    write_tiny_features(tmp_path / "features", target)
    out = tmp_path / "out"
    plain = Combination(exit_layer=1, head="own")
    truncated = Combination(exit_layer=1, head="truncated")
    request = sweep_request(target, tmp_path / "features", out, truncated)
    sweep(request, executor=LocalExecutor(), say=say_nothing)
    # As a process would have left another combination that it tried.
    shutil.copytree(out / truncated.name, out / plain.name)
    first = (out / plain.name / "evaluation.json").read_text()

    monkeypatch.delattr("eesd_dist.distill.sweep.ProcessPoolExecutor")
    report = sweep(
        replace(request, combinations=(plain, truncated)), executor=LocalExecutor(), say=say_nothing
    )

    assert (out / plain.name / "evaluation.json").read_text() == first
    assert {row.name for row in report.rows} == {"exit_1_own", "exit_1_truncated"}
    spec = ModelSpec.from_folder(target)
    config = HeadConfig.read(out / truncated.name, target=spec, target_path=target)
    assert (config.exit_layer, config.kind, config.draft_vocab_size) == (1, "truncated", 48)
    for row in report.rows:
        assert row.texts_unlike_plain == 0
        assert row.tokens_per_s > 0
        assert row.draft_step_ms > 0
        assert (out / row.name / "calibration.json").exists()
    written = json.loads((out / "sweep.json").read_text())
    assert [row["name"] for row in written["rows"]] == [row.name for row in report.rows]
    assert written["reason"] == recommendation(report)
    assert "torch" in json.dumps(written["provenance"])

    with pytest.raises(ConfigError, match="was begun with draft_vocab 48, now asked for 32"):
        sweep(
            replace(request, options=replace(request.options, draft_vocab=32)),
            executor=LocalExecutor(),
            say=say_nothing,
        )
