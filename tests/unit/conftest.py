"""What tests leave behind in their process."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _loops_of_toys_end_with_their_module() -> Iterator[None]:
    """They would take time from the tests after them."""
    yield
    if (toys := sys.modules.get("tests.support.toy_stages")) is not None:
        toys.end_toys()
