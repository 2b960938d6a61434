"""Calibration of drafters that are sometimes right."""

import json
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.control.calibrator import CALIBRATION_FILE, Calibrator
from eesd_dist.distill.answers import Machine
from eesd_dist.distill.calibrate import CalibrateOptions, CalibrationReport, calibrate
from eesd_dist.distill.executor import LocalExecutor, Say
from eesd_dist.errors import ConfigError
from eesd_dist.text.prompts import Prompt
from tests.support.drafters import save_target
from tests.support.judged_heads import machine_of, prompts_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def run(
    machine: Machine, prompts: tuple[Prompt, ...], *, say: Say = lambda _: None, **options: Any
) -> CalibrationReport:
    return calibrate(
        machine, prompts, CalibrateOptions(**options), seed=0, executor=LocalExecutor(), say=say
    )


def test_calibration_is_judged_on_prompts_it_was_not_fitted_on_and_comes_nearer_the_truth(
    target: Path, tmp_path: Path
) -> None:
    machine = machine_of(target, tmp_path, "sometimes")
    lines: list[str] = []
    report = run(machine, prompts_of(16), max_tokens=48, say=lines.append)
    assert report.num_fitted > 500
    assert report.num_judged > 500
    assert 0.1 < report.acceptance < 0.9
    assert report.after.ece < report.before.ece
    assert sum(bin_.num_judged for bin_ in report.after.bins) == report.num_judged
    assert set(report.by_temperature) == {"0", "0.5", "0.8", "1"}
    assert set(report.by_class) == {"even", "odd"}
    for groups in (report.by_temperature, report.by_class):
        assert sum(group.num_judged for group in groups.values()) == report.num_judged
        accepted = sum(group.num_judged * group.acceptance for group in groups.values())
        assert accepted / report.num_judged == pytest.approx(report.acceptance)
        assert max(group.after.ece for group in groups.values()) >= report.after.ece
    written = json.loads((machine.head / "reliability.json").read_text())
    assert written["after"]["ece"] == report.after.ece
    assert written["by_temperature"]["0"]["after"]["ece"] == report.by_temperature["0"].after.ece
    assert written["provenance"]["seed"] == 0
    assert Calibrator.load(machine.head).num_judged == report.num_fitted
    assert (machine.head / "reliability.png").read_bytes()[:4] == b"\x89PNG"
    assert "expected calibration error" in lines[0]
    assert "; largest at" in lines[0]
    assert sorted(file.name for file in machine.head.iterdir() if file.name[0] == ".") == []


def test_calibration_may_be_written_to_another_folder(target: Path, tmp_path: Path) -> None:
    machine = machine_of(target, tmp_path, "sometimes")
    run(machine, prompts_of(4), max_tokens=12, out=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / CALIBRATION_FILE).exists()
    assert not (machine.head / CALIBRATION_FILE).exists()


def test_one_prompt_is_too_few_to_fit_and_to_judge(target: Path, tmp_path: Path) -> None:
    machine = machine_of(target, tmp_path, "sometimes")
    with pytest.raises(ConfigError, match="hold more prompts out"):
        run(machine, prompts_of(1), max_tokens=12)
