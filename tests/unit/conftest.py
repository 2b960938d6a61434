"""What tests leave behind in their process."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.control.registry import CONTROLLERS, PerRequest

_EXTENDING = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


@pytest.fixture
def documented_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the controller of docs/extending.md as `threshold`."""
    _, code = _EXTENDING.read_text(encoding="utf-8").split('```python\n"""`threshold`', 1)
    names: dict[str, Any] = {}
    exec('"""' + code.partition("\n```")[0], names)
    entry = PerRequest(names["build"])
    monkeypatch.setitem(CONTROLLERS, "threshold", entry)  # type: ignore[arg-type]


@pytest.fixture(autouse=True, scope="module")
def _loops_of_toys_end_with_their_module() -> Iterator[None]:
    """They would take time from the tests after them."""
    yield
    if (toys := sys.modules.get("tests.support.toy_stages")) is not None:
        toys.end_toys()
