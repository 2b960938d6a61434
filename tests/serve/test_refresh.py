"""From tokens that left a running service to the head that it drafts with, without a restart."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import ray
from ray import serve

from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from serve_app.app import build_app
from serve_app.cli.main import main
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.drafters import save_head, save_target
from tests.support.running import Running
from tests.support.tiny_tokenizer import write_byte_level

NAME = "refreshed"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its own head is never right."""
    folder = tmp_path_factory.mktemp("target")
    write_byte_level(folder)
    save_target(folder, vocab_size=320)
    save_head(folder, folder / "exit_head", "never")
    return folder


@pytest.fixture(scope="module")
def recording(
    ray_port: int, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    config = service_config(
        {
            "engine": {
                "model": {"path": str(target), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 128},
                "speculation": {"controller": "fixed", "fixed_length": 3, "stop_rule": "bernoulli"},
            },
            "app_name": NAME,
            "num_ingresses": 1,
            "recovery": {"stream_pause_s": 120.0},
            "router": {"name": f"{NAME}-router"},
            "recorder": {"folder": str(tmp_path_factory.mktemp("kept") / "recording"), "top_k": 8},
        }
    )
    deploy(build_app(config), name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    yield Running(
        url=f"http://127.0.0.1:{ray_port}/{NAME}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", NAME),
    )
    serve.delete(NAME)


def request(number: int) -> Request:
    return Request(
        request_id=RequestId(f"request-{number}"),
        prompt=(TokenId(5), TokenId(number % 300), TokenId(2 + number % 7)),
        sampling=SamplingParams(temperature=0.9, seed=number, max_tokens=40),
    )


def served(service: Running, request: Request) -> tuple[list[int], int]:
    """Tokens, and how many of them had been drafted."""
    emissions = [emission for item in service.items(request) for emission in item]
    tokens = [token for emission in emissions for token in emission.tokens]
    return tokens, sum(emission.num_accepted for emission in emissions)


@pytest.mark.slow
def test_a_service_drafts_with_what_its_own_requests_have_taught(
    recording: Running, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = [request(number) for number in range(60)]
    for sample in traffic:
        served(recording, sample)
    recording.pipelines.flush.remote().result(timeout_s=30)
    plain = replace(
        request(900), request_id=RequestId("plain"), speculation=SpeculationParams(mode="off")
    )
    undisturbed, _ = served(recording, plain)
    before, accepted_before = served(recording, request(900))

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # this Ray was started without a token
    config = recording.config
    words = {
        "--model": target,
        "--recording": config.recorder.folder,
        "--head": target / "exit_head",
        "--out": tmp_path / "new",
        "--steps": 150,
        "--minutes": 2,
        "--rate": 5e-3,
        "--threads": 1,
        "--address": ray.get_runtime_context().gcs_address,
        "--app": NAME,
        "--router": config.router.name,
        "--namespace": config.router.namespace,
    }
    command = ["distill", "refresh", *(str(word) for pair in words.items() for word in pair)]
    assert main([*command, "--promote"]) == 0

    after, accepted_after = served(
        recording, replace(request(900), request_id=RequestId("once more"))
    )
    assert undisturbed == before == after
    assert accepted_after > accepted_before
    report = json.loads((tmp_path / "new" / "refresh.json").read_text())
    assert report["gain"]["low"] > 0.0
    (promoted,) = report["promoted"]
    assert promoted["folder"] == str((tmp_path / "new").resolve())
