"""Distillation over the stages of a running service: the target is in no other process."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import ray
import torch
from msgspec import structs
from ray import serve

from eesd_dist.config import ModelConfig, SpeculationConfig
from eesd_dist.distill.features import FeatureStore, identity_of
from eesd_dist.distill.sources import PLAIN, EngineRows, engine_config
from eesd_dist.engine.build import build_local_engine
from eesd_dist.errors import RequestError
from eesd_dist.types import FeatureSpec, Request, RequestId, SamplingParams, TokenId
from serve_app.app import build_app
from serve_app.cli.main import main
from serve_app.config import service_config
from serve_app.distill.jobs import ServedRows
from serve_app.service.connect import service_connection
from serve_app.service.serve_instance import deploy
from tests.support.running import Running, tokens_of
from tests.support.tiny_service import write_tiny_service

NAME = "collector"
EVERY_EXIT = (1, 2, 3)
"""In the draft stage, at its end or in the verify stage, wherever the target is cut."""
WORDS = (
    *("--exit", "2", "--head", "own", "--minutes", "1", "--dtype", "float32"),
    *("--max-tokens", "24", "--max-length", "96", "--chunk-size", "8", "--passes", "3"),
    *("--held-out", "8", "--rows", "4", "--length", "48", "--workers", "1", "--top-k", "8"),
    *("--max-steps", "40", "--rate", "2e-3"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a head: a service of it decodes plainly."""
    folder = write_tiny_service(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "exit_head").rename(folder.parent / "head")
    return folder


@pytest.fixture(scope="module")
def collecting(ray_port: int, target: Path) -> Iterator[Running]:
    config = service_config(
        {
            "engine": {
                "model": {"path": str(target), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 128},
                "scheduler": {"prefill_chunk": 16},
                "parallel": {"verify_tensor_parallel_size": 2, "timeout_s": 20.0},
            },
            "app_name": NAME,
            "num_ingresses": 1,
            "recovery": {"stream_pause_s": 120.0},
            "router": {"name": f"{NAME}-router"},
        }
    )
    deploy(build_app(config), name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    yield Running(
        url=f"http://127.0.0.1:{ray_port}/{NAME}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", NAME),
    )
    serve.delete(NAME)


@pytest.fixture
def rows(collecting: Running) -> Iterator[ServedRows]:
    address = ray.get_runtime_context().gcs_address
    router = collecting.config.router
    with service_connection(address, router=router, app_name=NAME) as connection:
        yield ServedRows(connection)


def asked(name: str, spec: FeatureSpec, **sampling: float) -> Request:
    number = int(name)
    return Request(
        request_id=RequestId(name),
        prompt=tuple(TokenId(5 + (number * 7 + at) % 300) for at in range(20 + number)),
        sampling=SamplingParams(
            temperature=0.9 * (number % 2), seed=number, max_tokens=12 + number
        ),
        speculation=PLAIN,
        features=spec,
    )


def test_a_service_over_two_ranks_returns_the_rows_that_one_process_computes(
    collecting: Running, target: Path, rows: ServedRows
) -> None:
    """Prompt rows included, after every layer; and the texts are those without features."""
    spec = FeatureSpec(exits=EVERY_EXIT, top_k=9)
    requests = [asked(str(number), spec) for number in range(6)]
    rows.require_target(target)
    served = rows.rows_of(requests)
    config = engine_config(
        ModelConfig(path=target, dtype="float32"),
        SpeculationConfig(max_draft_tokens=0),
        batch=4,
        max_length=64,
        threads=1,
    )
    local_rows = EngineRows(build_local_engine(config)).rows_of(requests)
    for request, local, remote in zip(requests, local_rows, served, strict=True):
        assert local.tokens == remote.tokens
        assert remote.num_rows == len(request.prompt) + request.sampling.max_tokens - 1
        for layer in EVERY_EXIT:
            torch.testing.assert_close(
                remote.hidden[layer], local.hidden[layer], atol=1e-4, rtol=1e-4
            )
        torch.testing.assert_close(remote.lse_T, local.lse_T, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(remote.top_logits_TK, local.top_logits_TK, atol=1e-4, rtol=1e-4)
        assert (remote.top_ids_TK == local.top_ids_TK).float().mean() > 0.98
        bare = replace(request, features=None, request_id=RequestId(f"{request.request_id}-bare"))
        assert tokens_of(collecting.items(bare)) == list(remote.tokens[len(request.prompt) :])


def test_features_that_the_service_cannot_return_are_refused(rows: ServedRows) -> None:
    with pytest.raises(RequestError, match="expected layers from 1 to"):
        rows.rows_of([asked("0", FeatureSpec(exits=(99,), top_k=2))])


def test_texts_under_which_a_verify_rank_dies_are_generated_again(
    collecting: Running, rows: ServedRows
) -> None:
    spec = FeatureSpec(exits=(1,), top_k=3)
    requests = [
        replace(request, sampling=structs.replace(request.sampling, max_tokens=200))
        for request in (asked(str(number), spec) for number in range(12))
    ]
    undisturbed = rows.rows_of(requests)
    before = collecting.state()

    def kill() -> None:
        while collecting.num_running() == 0:
            time.sleep(0.01)
        collecting.signal("verify rank 1", signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    disturbed = rows.rows_of(requests)
    killer.join()
    assert collecting.ready_after(before).num_interruptions > before.num_interruptions
    for before_kill, after_kill in zip(undisturbed, disturbed, strict=True):
        assert before_kill.tokens == after_kill.tokens
        assert torch.equal(before_kill.hidden[1], after_kill.hidden[1])


@pytest.mark.timeout(600)
def test_a_head_made_over_a_service_is_as_good_as_one_made_in_one_process(
    collecting: Running, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # this Ray was started without a token
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"class": f"c{n % 2}", "prompt": f"the dog {n} sat on the log"} for n in range(32)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(out: Path, *more: str) -> dict[str, object]:
        files = ("--model", str(target), "--prompts", str(prompts), "--out", str(out))
        assert main(["distill", "run", *files, *WORDS, *more]) == 0
        evaluation: dict[str, object] = json.loads((out / "exit_2" / "evaluation.json").read_text())
        return evaluation

    config = collecting.config
    address = ray.get_runtime_context().gcs_address
    names = ("--app", NAME, "--router", config.router.name, "--namespace", config.router.namespace)
    served = run(tmp_path / "served", "--service", "--address", address, *names)
    local = run(tmp_path / "alone")

    stores = [
        FeatureStore.open(tmp_path / name / "features", expect=identity_of(target))
        for name in ("served", "alone")
    ]
    assert stores[0].manifest.plan_sha256 == stores[1].manifest.plan_sha256
    for theirs, ours in zip(*(store.sequences() for store in stores), strict=True):
        assert torch.equal(theirs.tokens_T, ours.tokens_T)
        assert theirs.num_prompt == ours.num_prompt > 1
    assert served["speed"] is None
    assert local["speed"] is not None
    for remote_at, local_at in zip(served["temperatures"], local["temperatures"], strict=True):  # type: ignore[call-overload]
        rates = [at["acceptance"]["rate"] for at in (remote_at, local_at)]
        count = local_at["acceptance"]["num_judged"]
        error = np.sqrt(max(rates[1] * (1 - rates[1]), 0.01) / count)
        assert abs(rates[0] - rates[1]) < 3 * error
    reliability = json.loads((tmp_path / "served" / "exit_2" / "reliability.json").read_text())
    assert set(reliability["by_class"]) == {"c0", "c1"}
