"""Three hosts with Ray and one service on them, shared by all tests of this folder."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, can_make_hosts
from tests.support.ray_hosts import HostsService, RayHosts
from tests.support.tiny_service import write_tiny_service

DEADLINE_S = 3.0
"""The deadline of every wait between ranks in the service under test."""


@cache
def why_no_hosts() -> str | None:
    return can_make_hosts()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.hosts)
            item.add_marker(pytest.mark.timeout(480))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hosts") is None:
        return
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(f"no test hosts: {reason}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayHosts]:
    """Host 0 runs the Ray head, the ingress and the drafting actor; each other host has room for
    both verify ranks."""
    hosts = Hosts(3, prefix="eesdt", subnet="10.77.11")
    verify = {"verify": 2.0}
    with hosts, RayHosts(hosts, resources={1: verify, 2: verify}) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def service(cluster: RayHosts, tiny_model: Path) -> Iterator[HostsService]:
    tree = {
        "engine": {
            "model": {"path": str(tiny_model), "dtype": "float32", "device": "cpu"},
            "cache": {"num_pages": 256},
            "parallel": {"verify_tensor_parallel_size": 2, "timeout_s": DEADLINE_S},
        },
        "model_name": "tiny",
        "placement": {
            "strategy": "SPREAD",
            "draft": {"resources": {"host0": 1}},
            "verify": {"resources": {"verify": 1}},
            "front": {"host0": 0.001},
        },
        # Starting a process takes long on a busy machine.
        "recovery": {"stream_pause_s": 120.0, "max_interruptions": 20},
    }
    with cluster.service(tree) as service:
        yield service
