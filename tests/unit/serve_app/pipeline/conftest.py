"""Fixtures of the pipeline's tests."""

from collections.abc import Iterator

import pytest

from tests.support.toy_group import ToyCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyCluster]:
    """Takes the place of Ray for the workers of one test."""
    cluster = ToyCluster()
    cluster.install(monkeypatch)
    yield cluster
    cluster.close()
