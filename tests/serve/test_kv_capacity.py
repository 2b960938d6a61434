"""A service with KV pages that are sized from a budget, and a rank that reads other weights."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import httpx
import pytest
import ray
from ray import serve

from eesd_dist.model.rank_memory import kv_page_bytes
from eesd_dist.model.weights import weights_digest
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.app import build_app
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.drafters import EXIT_LAYER
from tests.support.running import Running, tokens_of, until
from tests.support.tiny_checkpoints import tiny_model
from tests.support.tiny_service import VOCAB_SIZE

PAGE = 16
NAME = "sized"
NUM_PAGES = 40


@pytest.fixture(scope="module")
def own_model(tiny_service: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(tiny_service, tmp_path_factory.mktemp("own") / "tiny")


def _page_bytes(folder: Path, *, num_layers: int, num_ranks: int) -> int:
    config = json.loads((folder / "config.json").read_text())
    return kv_page_bytes(
        num_layers=num_layers,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        page_size=PAGE,
        num_ranks=num_ranks,
        bytes_per_value=4,
    )


@pytest.fixture(scope="module")
def sized(ray_port: int, own_model: Path) -> Iterator[Running]:
    """Two verify ranks; the drafting actor has the larger pages, and room for 40 of them."""
    budget = NUM_PAGES * _page_bytes(own_model, num_layers=EXIT_LAYER + 1, num_ranks=1) + 100
    config = service_config(
        {
            "engine": {
                "model": {"path": str(own_model), "dtype": "float32", "device": "cpu"},
                "cache": {"kv_cache_bytes": budget, "page_size": PAGE},
                "parallel": {"verify_tensor_parallel_size": 2},
            },
            "app_name": NAME,
            "model_name": "tiny",
            "num_ingresses": 1,
            "router": {"name": f"{NAME}-router"},
            # A busy machine takes its time to start a process.
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    deploy(build_app(config), name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    yield Running(
        url=f"http://127.0.0.1:{ray_port}/{NAME}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", NAME),
    )
    serve.delete(NAME)
    ray.kill(ray.get_actor(f"{NAME}-router", namespace=config.router.namespace))


def _request(name: str) -> Request:
    prompt = tuple(TokenId(1 + at % 300) for at in range(30))
    sampling = SamplingParams(max_tokens=60, temperature=0.9, seed=4)
    return Request(request_id=RequestId(name), prompt=prompt, sampling=sampling)


def test_the_capacity_is_that_of_the_rank_with_the_largest_pages_and_requests_know_it(
    sized: Running, own_model: Path
) -> None:
    capacity = sized.state().kv_cache
    assert capacity is not None
    assert (capacity.num_pages, capacity.num_tokens) == (NUM_PAGES, NUM_PAGES * PAGE)
    num_layers = json.loads((own_model / "config.json").read_text())["num_hidden_layers"]
    draft = _page_bytes(own_model, num_layers=EXIT_LAYER + 1, num_ranks=1)
    verify = _page_bytes(own_model, num_layers=num_layers - EXIT_LAYER, num_ranks=2)
    assert capacity.rank_bytes == {
        "drafting actor": NUM_PAGES * draft,
        "verify rank 0": NUM_PAGES * verify,
        "verify rank 1": NUM_PAGES * verify,
    }
    card = until(
        lambda: [
            model
            for model in httpx.get(f"{sized.url}/v1/models", timeout=30).json()["data"]
            if model["max_model_len"] == capacity.num_tokens
        ]
    )
    assert card[0]["id"] == "tiny"
    answer = httpx.post(
        f"{sized.url}/v1/completions",
        json={"model": "tiny", "prompt": [5] * capacity.num_tokens, "max_tokens": 1},
        timeout=30,
    )
    assert answer.status_code == 400
    assert str(capacity.num_tokens - 1) in answer.json()["error"]["message"]


def test_a_replaced_rank_keeps_the_number_and_one_with_other_weights_is_refused_with_both_digests(
    sized: Running, own_model: Path
) -> None:
    undisturbed = tokens_of(sized.items(_request("one")))
    before = sized.state()
    sized.signal("verify rank 1", signal.SIGKILL)
    after = sized.ready_after(before)
    assert after.kv_cache == before.kv_cache
    assert tokens_of(sized.items(_request("two"))) == undisturbed

    first = weights_digest(own_model)
    other = tiny_model(
        "llama", num_hidden_layers=4, vocab_size=VOCAB_SIZE, max_position_embeddings=4096
    )
    other.save_pretrained(own_model)
    second = weights_digest(own_model)
    assert first != second
    sized.signal("verify rank 0", signal.SIGKILL)

    def refused() -> str:
        reason = str(sized.pipelines.health.remote().result(timeout_s=30).reason)
        return reason if "other weights" in reason else ""

    reason = until(refused, timeout_s=120.0)
    assert "verify rank 0 has read other weights than drafting actor" in reason
    assert f"{second[:12]} and {first[:12]}" in reason
