"""The check of names finds participles and pronouns, and says what to do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "infra" / "check_names.py"
_ALLOWED = 'ALLOWED = {"eesd_dist": 0, "serve_app": 0, "cluster": 0, "infra": 0, "tests": 0}'


def _check(root: Path, source: str) -> "subprocess.CompletedProcess[str]":
    """Runs the check on one file, with no name allowed."""
    file = root / "infra" / "queue.py"
    file.parent.mkdir()
    file.write_text(source)
    lines = _SCRIPT.read_text().splitlines()
    script = root / "check_names.py"
    shutil.copy(_SCRIPT.with_name("falling_counts.py"), root)
    script.write_text(
        "\n".join(_ALLOWED if line.startswith("ALLOWED = ") else line for line in lines)
    )
    return subprocess.run(
        [sys.executable, str(script), str(root)], capture_output=True, text=True, check=False
    )


def test_names_of_things_pass_whatever_is_read_or_called(tmp_path: Path) -> None:
    result = _check(tmp_path, "partition = queue.found(each=kept, rest=(head_TV := parts[0]))\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("found = 1", "found"),
        ("num_told: int = 1", "num_told"),
        ("found_TV = 1", "found_TV"),
        ("def push(*, is_taken): ...", "is_taken"),
        ("lengths = [len(each) for each in queue]", "each"),
    ],
)
def test_a_participle_or_a_pronoun_is_refused_with_its_place_and_what_to_do(
    tmp_path: Path, source: str, name: str
) -> None:
    result = _check(tmp_path, source)
    assert result.returncode == 1
    assert result.stdout == f"infra/queue.py:1: {name}\n"
    assert result.stderr.startswith("infra: found 1 variables and arguments that a participle or ")
    assert "0 allowed: name new ones after the thing" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_with_fewer_names_than_allowed_asks_for_a_lower_number(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    result = subprocess.run(
        [sys.executable, str(_SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    assert result.stdout.startswith("tests: found 0 variables and arguments ")
    assert result.stdout.endswith("allowed: lower the number in infra/check_names.py\n")
