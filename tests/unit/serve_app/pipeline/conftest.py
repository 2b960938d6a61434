"""Fixtures of the pipeline's tests."""

import pytest

from tests.support.toy_group import ToyCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ToyCluster:
    """Takes the place of Ray for the workers of one test."""
    cluster = ToyCluster()
    cluster.install(monkeypatch)
    return cluster
