"""One local Ray for all tests of this package."""

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ray_compat import PROXY_CALLBACK

# Read by Ray when it is imported. On a busy machine idle workers in store cost more than they save,
# and workers with Ray's niceness starve.
os.environ.update(
    {
        "RAY_worker_niceness": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.2",
        # A client of this process that outlives the tests would start another Ray.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        PROXY_CALLBACK: "serve_app.ingress.proxy_front:proxy_middlewares",
    }
)

import ray
from ray import serve

from tests.support.running import free_port
from tests.support.tiny_service import write_tiny_service


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.serve)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="package")
def ray_port() -> Iterator[int]:
    """Starts Ray and Serve; the port is where Serve listens."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        ray.init(
            "local",
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=folder,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        yield port
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="package")
def tiny_service(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("model") / "tiny")
