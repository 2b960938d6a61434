"""A service with two draft ranks, its first ranks in two processes and in one: processes die, and
no text changes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import ray
from ray import serve

from eesd_dist.config import EngineConfig
from eesd_dist.engine.local import LocalEngine
from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams
from serve_app.app import build_app
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.drafters import save_head
from tests.support.running import Running, tokens_of


@pytest.fixture(scope="module", params=["dedicated", "shared"])
def wide(request: pytest.FixtureRequest, ray_port: int, tiny_service: Path) -> Iterator[Running]:
    """Two draft ranks and two verify ranks."""
    name = f"wide-{request.param}"
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
            "placement": {"mode": request.param},
            "app_name": name,
            "num_ingresses": 1,
            "router": {"name": f"{name}-router"},
            # A busy machine takes its time to start a process.
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    deploy(build_app(config), name=name, route_prefix=f"/{name}", wait=Event().wait)
    yield Running(url="", config=config, pipelines=serve.get_deployment_handle("Pipeline", name))
    serve.delete(name)
    ray.kill(ray.get_actor(config.router.name, namespace=config.router.namespace))


def _request(wide: Running, name: str) -> Request:
    prompt = Tokenizer.load(wide.config.engine.model.path).encode("the lazy dog")
    sampling = SamplingParams(max_tokens=80, temperature=0.9, seed=4)
    # Of fixed length: on a busy machine the others find, rightly, that drafting does not pay.
    speculation = SpeculationParams(controller="fixed")
    return Request(
        request_id=RequestId(name), prompt=prompt, sampling=sampling, speculation=speculation
    )


def test_texts_are_those_of_plain_decoding_in_one_process(wide: Running) -> None:
    is_shared = wide.config.placement.mode == "shared"
    assert [worker.name for worker in wide.state().workers] == [
        "drafting actor",
        "draft rank 1",
        *([] if is_shared else ["verify rank 0"]),
        "verify rank 1",
    ]
    engine = wide.config.engine
    plain = EngineConfig(
        model=engine.model,
        cache=engine.cache,
        speculation=engine.speculation.model_copy(update={"max_draft_tokens": 0}),
    )
    local = LocalEngine(plain)
    try:
        (generation,) = local.generate([_request(wide, "plain")])
    finally:
        local.close()
    assert tokens_of(wide.items(_request(wide, "one"))) == generation.tokens


@pytest.mark.parametrize("name", ["draft rank 1", "verify rank 1"])
def test_a_stream_survives_the_death_of_a_rank(name: str, wide: Running) -> None:
    undisturbed = tokens_of(wide.items(_request(wide, f"before {name}")))
    before = wide.state()
    pids = {worker.name: worker.pid for worker in before.workers}

    items = wide.items(_request(wide, f"during {name}"))
    tokens = [token for emission in next(items) for token in emission.tokens]
    wide.signal(name, signal.SIGKILL)
    tokens += tokens_of(items)

    assert tokens == undisturbed
    after = wide.ready_after(before)
    assert after.epoch == before.epoch + 1
    assert name in after.last_trouble
    assert "its process has died" in after.last_trouble
    changed = {m.name for m in after.workers if m.pid != pids[m.name]}
    assert changed == {name}


def test_a_drafting_actor_is_replaced_alone(wide: Running) -> None:
    undisturbed = tokens_of(wide.items(_request(wide, "before the drafting actor")))
    before = wide.state()
    pids = {worker.name: worker.pid for worker in before.workers}
    wide.signal("drafting actor", signal.SIGKILL)
    after = wide.ready_after(before)
    assert tokens_of(wide.items(_request(wide, "after the drafting actor"))) == undisturbed
    assert {m.name for m in after.workers if m.pid != pids[m.name]} == {"drafting actor"}


def test_a_promoted_head_reaches_every_draft_rank(wide: Running, tmp_path: Path) -> None:
    undisturbed = tokens_of(wide.items(_request(wide, "before the head")))
    head = save_head(wide.config.engine.model.path, tmp_path / "always", "always")
    report = wide.pipelines.load_head.remote(str(head)).result(timeout_s=120)
    assert report.folder == str(head)
    assert tokens_of(wide.items(_request(wide, "after the head"))) == undisturbed
    assert wide.state().is_ready
