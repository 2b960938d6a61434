"""The check of documents counts words, long lines and long cells of what is written by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "infra" / "check_documents.py"
_LONG_LINE, _LONG_CELL = "x" * 121, "word " * 26


def _check(root: Path, page: str) -> "subprocess.CompletedProcess[str]":
    (root / "docs").mkdir()
    (root / "docs" / "page.md").write_text(page)
    (root / "README.md").write_text("# A project\n")
    return subprocess.run(
        [sys.executable, str(_SCRIPT), str(root)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "page",
    [
        f"{'x' * 120}\n| a | {'x' * 121} |\n| {'word ' * 25} | {'word ' * 25} |\n",
        f"<!-- keys -->\n| {_LONG_CELL} |\n{_LONG_LINE}\n<!-- end of keys -->\n",
        f"<!-- states -->\n{'word ' * 100_000}\n<!-- end -->\n",
    ],
    ids=["at the limits", "generated table", "generated table of other form"],
)
def test_a_page_within_the_limits_passes(tmp_path: Path, page: str) -> None:
    result = _check(tmp_path, page)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (_LONG_LINE, f"found 1 lines over 120 columns, 0 allowed:\n    {_LONG_LINE}\n"),
        (f"| a | {_LONG_CELL} |", "found 1 cells over 25 words, 0 allowed:\n    word word"),
        ("word\n" * 100_000, "in all: found 100003 words, "),
    ],
    ids=["line", "cell", "words"],
)
def test_a_page_beyond_a_limit_is_refused(tmp_path: Path, page: str, message: str) -> None:
    result = _check(tmp_path, page)
    assert result.returncode == 1
    assert message in result.stdout


def test_the_documents_pass() -> None:
    result = subprocess.run(
        [sys.executable, str(_SCRIPT)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
