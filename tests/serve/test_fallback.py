"""The draft stage dies; plain decoding goes on in the verify ranks, then all is as before."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import httpx
import pytest
import ray
from ray import serve

from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams
from serve_app.app import build_app
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.running import Running, tokens_of, until

MAX_TOKENS = 300


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one draft rank"),
        pytest.param(2, id="two draft ranks", marks=pytest.mark.slow),
    ],
)
def relieved(
    request: pytest.FixtureRequest, ray_port: int, tiny_service: Path
) -> Iterator[Running]:
    """A pipeline with fallbacks in its two verify ranks' processes."""
    name = f"relieved-{request.param}"
    config = service_config(
        {
            "engine": {
                "model": {"path": str(tiny_service), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 128},
                "parallel": {
                    "draft_tensor_parallel_size": request.param,
                    "verify_tensor_parallel_size": 2,
                    "fallback": True,
                },
            },
            "app_name": name,
            "num_ingresses": 1,
            "router": {"name": f"{name}-router"},
            # A busy machine takes its time to start a process.
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    deploy(build_app(config), name=name, route_prefix=f"/{name}", wait=Event().wait)
    yield Running(
        url=f"http://127.0.0.1:{ray_port}/{name}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", name),
    )
    serve.delete(name)
    ray.kill(ray.get_actor(f"{name}-router", namespace=config.router.namespace))


def _request(relieved: Running, name: str) -> Request:
    prompt = Tokenizer.load(relieved.config.engine.model.path).encode("the lazy dog")
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=4)
    # Of fixed length: on a busy machine the others find, rightly, that drafting does not pay.
    speculation = SpeculationParams(controller="fixed")
    return Request(
        request_id=RequestId(name), prompt=prompt, sampling=sampling, speculation=speculation
    )


def _full(relieved: Running) -> bool:
    state = relieved.state()
    return state.is_ready and not state.is_degraded


def _metrics(relieved: Running) -> str:
    page: bytes = relieved.pipelines.metrics.remote().result(timeout_s=20).text
    return page.decode()


def test_tokens_come_while_the_drafting_actor_is_replaced(relieved: Running) -> None:
    undisturbed = tokens_of(relieved.items(_request(relieved, "one")))
    before = until(lambda: state if _full(relieved) and (state := relieved.state()) else None)
    assert "eesd_degraded 0" in _metrics(relieved)

    items = relieved.items(_request(relieved, "two"))
    tokens = tokens_of([next(items)])
    relieved.signal("drafting actor", signal.SIGKILL)
    until(lambda: relieved.state().is_degraded)
    assert "eesd_degraded 1" in _metrics(relieved)
    answer = httpx.get(f"{relieved.url}/health", timeout=60)
    assert answer.status_code == 200
    assert "degraded: plain decoding on the verify ranks" in answer.text
    others = relieved.items(_request(relieved, "asked meanwhile"))
    other_tokens = tokens_of([next(others)])
    assert _drafted(relieved) == 0
    assert relieved.state().is_degraded, "the first token came from the fallbacks"
    assert tokens + tokens_of(items) == undisturbed
    assert other_tokens + tokens_of(others) == undisturbed

    assert until(lambda: _full(relieved), timeout_s=90.0)
    after = relieved.state()
    assert after.num_interruptions == before.num_interruptions + 1
    assert after.epoch == before.epoch + 2
    assert after.degraded_s > 0.0
    assert tokens_of(relieved.items(_request(relieved, "three"))) == undisturbed
    assert _drafted(relieved) > 0
    assert httpx.get(f"{relieved.url}/health", timeout=60).text == ""


def _drafted(relieved: Running) -> int:
    """Tokens drafted by the present leader."""
    rounds = relieved.pipelines.rounds.remote().result(timeout_s=20)
    return sum(stats.num_drafted for stats in rounds)


def test_a_verify_rank_that_dies_then_is_replaced_too(relieved: Running) -> None:
    undisturbed = tokens_of(relieved.items(_request(relieved, "four")))
    assert until(lambda: _full(relieved), timeout_s=90.0)
    before = relieved.state()
    pids = {worker.name: worker.pid for worker in before.workers}
    os.kill(pids["drafting actor"], signal.SIGKILL)
    until(lambda: relieved.state().is_degraded)
    items = relieved.items(_request(relieved, "five"))
    tokens = tokens_of([next(items)])
    os.kill(pids["verify rank 0"], signal.SIGKILL)
    assert tokens + tokens_of(items) == undisturbed
    assert until(lambda: _full(relieved), timeout_s=90.0)
    after = relieved.state()
    assert after.num_interruptions == before.num_interruptions + 2
    changed = {m.name for m in after.workers if m.pid != pids[m.name]}
    assert changed == {"drafting actor", "verify rank 0"}
