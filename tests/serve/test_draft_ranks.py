"""A service with two draft ranks: one of them dies, and no text changes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import ray
from ray import serve

from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams
from serve_app.app import build_app
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.drafters import save_head
from tests.support.running import Running, tokens_of


@pytest.fixture(scope="module")
def wide(ray_port: int, tiny_service: Path) -> Iterator[Running]:
    """Two draft ranks and two verify ranks."""
    config = service_config(
        {
            "engine": {
                "model": {"path": str(tiny_service), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 128},
                "parallel": {
                    "draft_tensor_parallel_size": 2,
                    "verify_tensor_parallel_size": 2,
                },
            },
            "app_name": "wide",
            "num_ingresses": 1,
            "router": {"name": "wide-router"},
            # A busy machine takes its time to start a process.
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    deploy(build_app(config), name="wide", route_prefix="/wide", wait=Event().wait)
    yield Running(url="", config=config, pipelines=serve.get_deployment_handle("Pipeline", "wide"))
    serve.delete("wide")
    ray.kill(ray.get_actor("wide-router", namespace=config.router.namespace))


def request(wide: Running, name: str) -> Request:
    prompt = Tokenizer.load(wide.config.engine.model.path).encode("the lazy dog")
    sampling = SamplingParams(max_tokens=80, temperature=0.9, seed=4)
    return Request(request_id=RequestId(name), prompt=prompt, sampling=sampling)


def test_a_stream_survives_the_death_of_a_draft_rank(wide: Running) -> None:
    undisturbed = tokens_of(wide.items(request(wide, "one")))
    before = wide.state()
    pids = {worker.name: worker.pid for worker in before.workers}
    assert list(pids) == ["drafting actor", "draft rank 1", "verify rank 0", "verify rank 1"]

    items = wide.items(request(wide, "two"))
    tokens = [token for emission in next(items) for token in emission.tokens]
    wide.signal("draft rank 1", signal.SIGKILL)
    tokens += tokens_of(items)

    assert tokens == undisturbed
    after = wide.ready_after(before)
    assert after.epoch == before.epoch + 1
    assert "draft rank 1" in after.last_trouble
    assert "its process has died" in after.last_trouble
    changed = {m.name for m in after.workers if m.pid != pids[m.name]}
    assert changed == {"draft rank 1"}


def test_a_promoted_head_reaches_every_draft_rank(wide: Running, tmp_path: Path) -> None:
    undisturbed = tokens_of(wide.items(request(wide, "three")))
    head = save_head(wide.config.engine.model.path, tmp_path / "always", "always")
    report = wide.pipelines.load_head.remote(str(head)).result(timeout_s=120)
    assert report.folder == str(head)
    assert tokens_of(wide.items(request(wide, "four"))) == undisturbed
    assert wide.state().is_ready
