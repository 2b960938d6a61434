from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _memory_without_values() -> Iterator[None]:
    """Fills memory that torch allocates and does not write with NaN, and integers with their
    largest value: what reads it fails in every run, not in one of ten."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        yield
    torch.use_deterministic_algorithms(False)
