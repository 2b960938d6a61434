"""`eesd distill`: its commands, and what is told before any of them runs."""

import importlib.util
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from serve_app.cli import main as cli
from serve_app.distill import main as distill


def test_an_unknown_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="eesd distill trian: expected one of run, collect"):
        distill.main(["trian"])
    with pytest.raises(SystemExit):
        distill.main([])
    assert "eesd distill run" in capsys.readouterr().out


@pytest.mark.parametrize("command", distill.COMMANDS)
def test_every_step_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        distill.main([command, "--help"])
    assert left.value.code == 0
    assert f"eesd distill {command}" in capsys.readouterr().out


def test_all_packages_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    missing = {"deepspeed", "pyarrow"}
    monkeypatch.setattr(
        "serve_app.distill.main.find_spec",
        lambda name: None if name in missing else found(name),
    )
    with pytest.raises(ConfigError, match=r"needs deepspeed, pyarrow.*eesd-dist\[distill\]"):
        distill.main(["evaluate"])


def test_a_file_where_a_folder_was_meant_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    assert cli.main(["distill", "collect", "--out", str(file), "--limit", "1"]) == 2
    assert capsys.readouterr().err == f"eesd: {file}: File exists\n"
    assert file.read_text() == "mine"
