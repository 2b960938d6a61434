"""What a running service believes, keeps and learns: looked at, pinned, recorded, promoted."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import ray
import torch
from ray import serve

from eesd_dist.distill.features import FeatureStore, identity_of
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.head_files import head_digest
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import Emission, Request, RequestId, SamplingParams, SpeculationParams, TokenId
from serve_app.app import build_app
from serve_app.cli.main import main
from serve_app.config import service_config
from serve_app.pipeline.reports import PipelineState
from serve_app.service.connect import ServiceConnection, service_connection
from serve_app.service.promotion import promote
from serve_app.service.serve_instance import deploy
from tests.support.drafters import EXIT_LAYER, save_head, save_target
from tests.support.running import Running, until
from tests.support.tiny_tokenizer import write_byte_level

PROMPT = (TokenId(5), TokenId(9), TokenId(2))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with a head that is never right, and heads to replace it."""
    folder = tmp_path_factory.mktemp("target")
    write_byte_level(folder)
    save_target(folder, vocab_size=320, num_positions=4096)
    heads = tmp_path_factory.mktemp("heads")
    shallow = TrainableExitHead.from_target(folder, ModelSpec.from_folder(folder), 1)
    shallow.save(heads / "shallow", dtype="float32")
    return {
        "target": folder,
        "never": save_head(folder, folder / "exit_head", "never"),
        "always": save_head(folder, heads / "always", "always"),
        "shallow": heads / "shallow",
    }


@pytest.fixture(scope="module")
def learning(
    ray_port: int, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A service of its own, with a recorder, a checkpoint and a head that is never right."""
    folder = tmp_path_factory.mktemp("learning")
    config = service_config(
        {
            "engine": {
                "model": {"path": str(heads["target"]), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 128},
                "speculation": {"controller": "fixed", "fixed_length": 3, "stop_rule": "bernoulli"},
            },
            "app_name": "learning",
            "num_ingresses": 1,
            "recovery": {"stream_pause_s": 120.0},
            "router": {
                "name": "learning-router",
                "checkpoint": str(folder / "beliefs.json"),
                "checkpoint_every_s": 0.1,
            },
            "recorder": {"folder": str(folder / "recording"), "top_k": 4},
        }
    )
    deploy(build_app(config), name="learning", route_prefix="/learning", wait=Event().wait)
    yield Running(
        url=f"http://127.0.0.1:{ray_port}/learning",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", "learning"),
    )
    serve.delete("learning")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, learning: Running) -> list[str]:
    """Words that lead `eesd controllers` to the service."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # this Ray was started without a token
    address = ray.get_runtime_context().gcs_address
    router = learning.config.router
    options = ["--url", learning.url, "--address", address, "--app", "learning"]
    return ["controllers", *options, "--router", router.name, "--namespace", router.namespace]


def _request(name: str, *, max_tokens: int = 40, workload: str = "songs") -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=PROMPT,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        workload=workload,
    )


def _emissions(service: Running, request: Request) -> list[Emission]:
    return [emission for item in service.items(request) for emission in item]


def _tokens(emissions: list[Emission]) -> list[int]:
    return [token for emission in emissions for token in emission.tokens]


def _controllers(service: Running) -> Any:
    answer = httpx.get(f"{service.url}/debug/controllers", timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _pools(service: Running) -> Any:
    """What the router believes, once it has heard of every request's end."""
    state = until(lambda: state if not (state := _controllers(service))["num_live"] else None)
    return {name: dict(pool) for name, pool in state["workloads"].items()}


def _serve(service: Running, name: str, workload: str) -> None:
    """One request, heard of by the router from its beginning to its end."""
    before = _pools(service).get(workload, {}).get("num_rounds", 0)
    _emissions(service, _request(name, workload=workload))
    if not _controllers(service)["pinned"]:
        until(lambda: _pools(service).get(workload, {}).get("num_rounds", 0) > before)


def test_controllers_say_what_is_believed_and_what_decides(learning: Running) -> None:
    body = {"prompt": "x", "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    httpx.post(
        f"{learning.url}/v1/completions",
        json=body,
        headers={"x-eesd-workload": "team/poems"},
        timeout=60,
    ).raise_for_status()
    httpx.post(f"{learning.url}/v1/completions", json=body, timeout=60).raise_for_status()
    pools = until(
        lambda: (
            pools if {"team/poems", "completion/t0"} <= (pools := _pools(learning)).keys() else None
        )
    )
    poems = pools["team/poems"]
    assert poems["num_rounds"] >= 20
    assert poems["mean"] < 0.3  # a head that is never right
    assert poems["weight"] > 5
    state = _controllers(learning)
    assert state["pinned"] is False
    assert state["default"]["controller"] == "fixed"
    assert state["default"]["parameters"]["fixed_length"] == 3
    (pipeline,) = state["pipelines"]
    assert pipeline["head"]["exit_layer"] == EXIT_LAYER
    assert len(pipeline["head"]["sha256"]) == 64
    assert pipeline["head"]["pipeline"] == pipeline["pipeline"]
    assert pipeline["cost"]["draft_step_s"] > 0
    assert min(pipeline["cost"]["verify_s"]) > 0
    assert pipeline["calibration"]["num_judged"] == 0
    positions = pipeline["acceptance_by_position"]
    assert [at["position"] for at in positions] == [1, 2, 3]
    assert positions[0]["num_drafted"] >= 40
    assert positions[0]["rate"] == positions[0]["num_accepted"] / positions[0]["num_drafted"]


def test_the_command_shows_the_same(
    learning: Running, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _serve(learning, "shown", "team/shown")
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "team/shown" in table
    assert "learning, kept in" in table
    assert main([*command, "--json"]) == 0
    assert "team/shown" in json.loads(capsys.readouterr().out)["workloads"]


def test_pinned_beliefs_do_not_change_until_they_are_unpinned(
    learning: Running, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _serve(learning, "before", "songs")
    before = _pools(learning)
    file = tmp_path / "priors.json"
    assert main([*command, "save", str(file)]) == 0
    assert main([*command, "pin"]) == 0
    _serve(learning, "pinned", "songs")
    assert _controllers(learning)["pinned"] is True
    assert _pools(learning) == before

    content = json.loads(file.read_text())
    assert content["pools"].keys() == before.keys()
    content["pools"] = {"only": content["pools"]["songs"]}
    file.write_text(json.dumps(content))
    assert main([*command, "pin", "--file", str(file)]) == 0
    assert _pools(learning).keys() == {"only"}
    file.write_text('{"version": 9}')
    assert main([*command, "load", str(file)]) == 2
    assert "version 9" in capsys.readouterr().err
    assert _pools(learning).keys() == {"only"}

    assert main([*command, "unpin"]) == 0
    _serve(learning, "unpinned", "songs")
    assert _pools(learning).keys() == {"only", "songs"}


def test_beliefs_outlive_the_router(learning: Running) -> None:
    _serve(learning, "outlived", "evergreen")
    before = _pools(learning)
    router = ray.get_actor(learning.config.router.name, namespace=learning.config.router.namespace)
    file = Path(str(learning.config.router.checkpoint))
    until(lambda: json.loads(file.read_text())["pools"].keys() == before.keys())
    ray.kill(router, no_restart=False)

    def recalled() -> bool:
        answer = httpx.get(f"{learning.url}/debug/controllers", timeout=30)
        return answer.status_code == 200 and answer.json()["workloads"] == before

    until(recalled)


def test_the_recorder_holds_the_tokens_that_left_and_the_rows_they_were_chosen_from(
    learning: Running, heads: dict[str, Path]
) -> None:
    requests = [
        replace(_request(f"kept-{i}", workload="kept"), prompt=(*PROMPT, TokenId(i + 3)))
        for i in range(3)
    ]
    served = {r.request_id: _tokens(_emissions(learning, r)) for r in requests}
    learning.pipelines.flush.remote().result(timeout_s=30)
    folder = learning.config.recorder.folder
    assert folder is not None
    store = FeatureStore.open(folder, expect=identity_of(heads["target"]))
    sequences = [s for s in store.sequences() if s.workload == "kept"]
    assert len(sequences) == len(requests)
    frozen = FrozenTarget(heads["target"], ModelSpec.from_folder(heads["target"]), [EXIT_LAYER])
    for request in requests:
        generated = served[request.request_id]
        text = [*request.prompt, *generated[:-1]]
        # Prompt rows are recorded from the end of a cached prefix on.
        (sequence,) = [
            s
            for s in sequences
            if len(generated) <= len(s.tokens_T) and s.tokens_T.tolist() == text[-len(s.tokens_T) :]
        ]
        (view,) = frozen.view([text], top_k=4)
        rows_TD = view.hidden[EXIT_LAYER][-len(sequence.tokens_T) :]
        torch.testing.assert_close(
            sequence.hidden[EXIT_LAYER].float(), rows_TD, atol=2e-2, rtol=1e-2
        )
        assert sequence.top_ids_TK[-len(generated) :, 0].tolist() == generated  # greedy
    names = {request.request_id for request in requests}
    content = b"".join(file.read_bytes() for file in folder.glob("shard-*"))
    assert not any(name.encode() in content for name in names)
    page = httpx.get(f"{learning.url}/metrics", timeout=30).text
    assert "eesd_recorder_dropped_total" in page
    assert _controllers(learning)["pipelines"][0]["recorder"]["num_written"] >= 3


def _joined(service: Running) -> Any:
    return service_connection(
        "here", router=service.config.router, app_name=service.config.app_name
    )


def _sha(service: Running) -> str:
    sha: str = _controllers(service)["pipelines"][0]["head"]["sha256"]
    return sha


def test_a_head_is_promoted_under_a_running_stream_and_the_text_stays(
    learning: Running, heads: dict[str, Path]
) -> None:
    long = _request("long", max_tokens=1000)
    plain = replace(long, speculation=SpeculationParams(mode="off"))
    undisturbed = _tokens(_emissions(learning, replace(plain, request_id=RequestId("plain"))))
    before = _sha(learning)

    items = learning.items(long)
    emissions = [emission for _, item in zip(range(6), items, strict=False) for emission in item]
    admin: ServiceConnection
    with _joined(learning) as admin:
        (report,) = admin.load_head(str(heads["always"]))
    for item in items:
        emissions += item
    assert _tokens(emissions) == undisturbed
    assert sum(e.num_accepted for e in emissions[:5]) == 0
    assert all(e.num_accepted == e.num_drafted == 3 for e in emissions[-10:-1])
    assert report.sha256 == _sha(learning) != before
    assert report.folder == str(heads["always"])


def test_a_head_that_does_not_fit_is_refused_and_the_service_goes_on(
    learning: Running, command: list[str], heads: dict[str, Path], tmp_path: Path
) -> None:
    before = _sha(learning)
    address = command[command.index("--address") + 1]
    where: dict[str, Any] = {
        "address": address,
        "app_name": "learning",
        "router": learning.config.router,
    }
    with pytest.raises(ConfigError, match=r"exit_layer 1.*expected 2"):
        promote(heads["shallow"], **where)
    torn = tmp_path / "torn"
    shutil.copytree(heads["always"], torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="torn"), _joined(learning) as admin:
        admin.load_head(str(torn))
    with pytest.raises(ConfigError, match="nothing"), _joined(learning) as admin:
        admin.load_head(str(tmp_path / "nothing"))
    assert _sha(learning) == before
    assert len(_tokens(_emissions(learning, _request("goes on")))) == 40


def test_a_head_takes_the_place_only_of_the_one_it_was_compared_with(
    learning: Running, command: list[str], heads: dict[str, Path]
) -> None:
    with _joined(learning) as admin:
        admin.load_head(str(heads["never"]))
    never, always = head_digest(heads["never"]), head_digest(heads["always"])
    assert _sha(learning) == never
    address = command[command.index("--address") + 1]
    where: dict[str, Any] = {
        "address": address,
        "app_name": "learning",
        "router": learning.config.router,
    }
    with pytest.raises(ConfigError, match=rf"not promoted: .*{never[:12]}.*compared with"):
        promote(heads["always"], **where, instead_of=[always, "0" * 64])
    assert _sha(learning) == never
    (report,) = promote(heads["always"], **where, instead_of=[always, never])
    assert report.sha256 == _sha(learning) == always


@pytest.mark.parametrize("victim", ["drafting actor", "pipeline replica"])
def test_a_promoted_head_survives_the_death_of(
    victim: str, learning: Running, heads: dict[str, Path]
) -> None:
    with _joined(learning) as admin:
        (report,) = admin.load_head(str(heads["always"]))
    before, cost = learning.state(), _controllers(learning)["pipelines"][0]["cost"]
    if victim == "drafting actor":
        learning.signal(victim, signal.SIGKILL)
    else:
        os.kill(before.pid, signal.SIGKILL)

    def reborn(before: PipelineState) -> bool:
        try:
            state = learning.state()
        except ray.exceptions.RayError:  # asked while it is being restarted
            return False
        return state.is_ready and (state.pid, state.epoch) != (before.pid, before.epoch)

    until(lambda: reborn(before), timeout_s=120)
    assert _sha(learning) == report.sha256
    if victim == "pipeline replica":  # the one after it knows of the head from the workers
        claimed = learning.state()
        assert claimed.epoch == before.epoch
        learning.signal("drafting actor", signal.SIGKILL)
        until(lambda: reborn(claimed), timeout_s=120)
        assert _sha(learning) == report.sha256
    else:
        assert _controllers(learning)["pipelines"][0]["cost"] == cost, "it was not measured again"
    emissions = _emissions(learning, _request(f"after {victim}"))
    assert all(e.num_accepted == e.num_drafted for e in emissions[:-1])


def test_a_promoted_head_that_has_gone_is_given_up_for_the_configured_one(
    learning: Running, heads: dict[str, Path], tmp_path: Path
) -> None:
    passing = tmp_path / "passing"
    shutil.copytree(heads["always"], passing)
    with _joined(learning) as admin:
        admin.load_head(str(passing))
    before = learning.state()
    shutil.rmtree(passing)
    learning.signal("drafting actor", signal.SIGKILL)
    until(
        lambda: (state := learning.state()).is_ready and state.epoch > before.epoch,
        timeout_s=120,
    )
    assert _controllers(learning)["pipelines"][0]["head"]["folder"] == str(heads["never"])
    assert len(_tokens(_emissions(learning, _request("on the old head")))) == 40
