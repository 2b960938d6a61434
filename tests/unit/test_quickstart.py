"""The Python example of the quickstart runs."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_library_example_of_the_quickstart_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL
    )
    (example,) = [block for block in blocks if "from eesd_dist import" in block]
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "quickstart", "exec"), {})
    assert len(printed.getvalue().split()) > 30
