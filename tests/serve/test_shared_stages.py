"""A service of which the drafting actor holds verify rank 0: processes die, and no text changes."""

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


@pytest.fixture(scope="module")
def shared(ray_port: int, tiny_service: Path) -> Iterator[Running]:
    """Two draft ranks and two verify ranks in three processes."""
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
            "placement": {"mode": "shared"},
            "app_name": "shared-stages",
            "num_ingresses": 1,
            "router": {"name": "shared-stages-router"},
            # A busy machine takes its time to start a process.
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    name = config.app_name
    deploy(build_app(config), name=name, route_prefix=f"/{name}", wait=Event().wait)
    yield Running(url="", config=config, pipelines=serve.get_deployment_handle("Pipeline", name))
    serve.delete(name)
    ray.kill(ray.get_actor(config.router.name, namespace=config.router.namespace))


def _request(shared: Running, name: str) -> Request:
    prompt = Tokenizer.load(shared.config.engine.model.path).encode("the lazy dog")
    sampling = SamplingParams(max_tokens=80, temperature=0.9, seed=4)
    # Of fixed length: on a busy machine the others find, rightly, that drafting does not pay.
    speculation = SpeculationParams(controller="fixed")
    return Request(
        request_id=RequestId(name), prompt=prompt, sampling=sampling, speculation=speculation
    )


def test_texts_are_those_of_plain_decoding_in_one_process(shared: Running) -> None:
    assert [worker.name for worker in shared.state().workers] == [
        "drafting actor",
        "draft rank 1",
        "verify rank 1",
    ]
    engine = shared.config.engine
    plain = EngineConfig(
        model=engine.model,
        cache=engine.cache,
        speculation=engine.speculation.model_copy(update={"max_draft_tokens": 0}),
    )
    local = LocalEngine(plain)
    try:
        (generation,) = local.generate([_request(shared, "plain")])
    finally:
        local.close()
    assert tokens_of(shared.items(_request(shared, "one"))) == generation.tokens


@pytest.mark.parametrize("name", ["verify rank 1", "drafting actor"])
def test_a_stream_survives_the_death_of_either_process(name: str, shared: Running) -> None:
    undisturbed = tokens_of(shared.items(_request(shared, f"before {name}")))
    before = shared.state()
    pids = {worker.name: worker.pid for worker in before.workers}

    tokens: list[int] = []
    if name == "drafting actor":  # its streams end with it, and are submitted again
        shared.signal(name, signal.SIGKILL)
    else:
        items = shared.items(_request(shared, f"during {name}"))
        tokens = [token for emission in next(items) for token in emission.tokens]
        shared.signal(name, signal.SIGKILL)
        tokens += tokens_of(items)
    after = shared.ready_after(before)
    if not tokens:
        tokens = tokens_of(shared.items(_request(shared, f"after {name}")))

    assert tokens == undisturbed
    assert after.epoch == before.epoch + 1
    assert name in after.last_trouble
    assert {m.name for m in after.workers if m.pid != pids[m.name]} == {name}


def test_a_promoted_head_drafts_without_another_text(shared: Running, tmp_path: Path) -> None:
    undisturbed = tokens_of(shared.items(_request(shared, "before the head")))
    head = save_head(shared.config.engine.model.path, tmp_path / "always", "always")
    report = shared.pipelines.load_head.remote(str(head)).result(timeout_s=120)
    assert report.folder == str(head)
    assert tokens_of(shared.items(_request(shared, "after the head"))) == undisturbed
