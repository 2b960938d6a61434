"""`eesd distill`: its commands, and what is told before any of them runs."""

import importlib.util
from pathlib import Path

import pytest

from serve_app.cli import main as cli
from serve_app.distill.commands import _STEPS as STEPS


@pytest.mark.parametrize("step", STEPS)
def test_every_step_says_what_its_options_mean(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["distill", step, "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert help_text.startswith(f"Usage: eesd distill {step} [OPTIONS] `eesd distill {step}`: ")
    assert "--model <path> folder of the target (the bundled one) --" in help_text


def test_options_have_the_names_that_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["distill", "train", "--help"]) == 0
    help_text = capsys.readouterr().out
    for name in ("exit", "rate", "checkpoint-every", "loss-temperature", "zero-stage", "bfloat16"):
        assert f"  --{name} " in help_text


def test_all_packages_that_are_missing_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    missing = {"deepspeed", "pyarrow"}
    monkeypatch.setattr(
        "eesd_dist.checks.find_spec", lambda name: None if name in missing else find_spec(name)
    )
    assert cli.main(["distill", "evaluate"]) == 2
    assert capsys.readouterr().err == (
        "eesd: distillation needs deepspeed, pyarrow, not found here: pip install "
        "'eesd-dist[distill]'\n"
    )


def test_a_file_where_a_folder_was_meant_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    assert cli.main(["distill", "collect", "--out", str(file), "--limit", "1"]) == 2
    assert capsys.readouterr().err == f"eesd: {file}: File exists\n"
    assert file.read_text() == "mine"
