"""The commands by which the cluster files install the service on a host."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

_REPOSITORY = Path(__file__).parents[3]
_FILES = [*(_REPOSITORY / "cluster" / "configs").glob("*.yaml")]
_NEEDED = ("Makefile", "pyproject.toml", "README.md", "LICENSE")


_SECTIONS = ("setup_commands", "head_setup_commands", "worker_setup_commands")


def _install_commands() -> set[str]:
    contents = [yaml.safe_load(file.read_text()) for file in _FILES]
    commands = [c for content in contents for name in _SECTIONS for c in content.get(name, [])]
    return {command for command in commands if "make " in command and "apt-get" not in command}


def test_an_install_that_cannot_succeed_ends_with_its_error(tmp_path: Path) -> None:
    (command,) = _install_commands()
    checkout = tmp_path / "eesd-dist"
    (checkout / "infra").mkdir(parents=True)
    for name in _NEEDED:
        (checkout / name).symlink_to(_REPOSITORY / name)
    (checkout / "infra" / "constraints.txt").write_text("numpy==1.0\nnumpy==2.0\n")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "HOME": str(tmp_path), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "ERROR:" in done.stderr
    assert "install-serving" in command
