"""The check of docstrings finds fragments, and says what to do."""

import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "infra" / "check_docstrings.py"
_NOUN = 'class Queue:\n    """Owns requests."""\n    length: int = 0\n    """{}"""\n'


def _check(root: Path, docstring: str) -> "subprocess.CompletedProcess[str]":
    file = root / "infra" / "queue.py"
    file.parent.mkdir()
    file.write_text(_NOUN.format(docstring))
    return subprocess.run(
        [sys.executable, str(_SCRIPT), str(root)], capture_output=True, text=True, check=False
    )


def test_a_docstring_that_starts_with_a_noun_or_a_verb_passes(tmp_path: Path) -> None:
    result = _check(tmp_path, "Number of requests that wait. Of these, some are suspects.")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_fragment_is_refused_with_its_place_and_what_to_do(tmp_path: Path) -> None:
    result = _check(tmp_path, "Of its requests.")
    assert result.returncode == 1
    assert result.stdout == "infra/queue.py:4: Of its requests.\n"
    assert "infra: found 1 docstrings that start as fragments, 0 allowed: start" in result.stderr
    assert len(result.stderr.splitlines()) == 1
