"""One service for all tests of this folder, which restore what they kill.

`tests.conftest` has them run in one process, so that the service is started once.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve

from serve_app.app import build_app
from serve_app.config import service_config
from tests.support.running import Running


@pytest.fixture(scope="package")
def service(
    ray_port: int, tiny_service: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The whole application: two ingresses, a pipeline with two verify ranks, router."""
    config = service_config(
        {
            "engine": {
                "model": {"path": str(tiny_service), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 256},
                "parallel": {"verify_tensor_parallel_size": 2, "timeout_s": 20.0},
            },
            "model_name": "tiny",
            "port": ray_port,
            "num_ingresses": 2,
            # A busy machine takes its time to start a process.
            "recovery": {"stream_pause_s": 120.0},
            "router": {"checkpoint": str(tmp_path_factory.mktemp("router") / "beliefs.json")},
            "telemetry": {"trace_folder": str(tmp_path_factory.mktemp("traces"))},
        }
    )
    serve.run(build_app(config), name=config.app_name, route_prefix="/")
    yield Running(
        url=f"http://127.0.0.1:{ray_port}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", config.app_name),
    )
    serve.delete(config.app_name)
    ray.kill(ray.get_actor(config.router.name, namespace=config.router.namespace))
