"""Processes die; streams pause, and go on with the very tokens they would have had."""

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.tenure import LAST_WAIT_S, placement_groups_named, workers_named
from serve_app.config import service_config
from serve_app.pipeline.deployment import Pipeline
from serve_app.pipeline.reports import Health
from serve_app.service.serve_instance import deploy
from serve_app.service.serving import WaitingLine
from serve_app.service.start_line import StartLine
from tests.support.running import Running, tokens_of, until
from tests.support.toy_poison import POISON, WAYS, PoisonedStages
from tests.support.toy_stages import ToyStages, held, toy_token


@pytest.fixture(scope="module")
def toy(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A pipeline of toys: everything but the model is real."""
    yield _toy_pipeline(
        "toy",
        tmp_path_factory.mktemp("toy"),
        recovery={"max_interruptions": 2, "stream_pause_s": 120.0},
    )
    serve.delete("toy")


def _toy_pipeline(
    name: str,
    folder: Path,
    *,
    stages: type[ToyStages] = ToyStages,
    timeout_s: float | None = None,
    say: Callable[[str], None] = print,
    wait: Callable[[float], bool] | None = None,
    **sections: object,
) -> Running:
    tree: dict[str, object] = {
        "engine": {
            "model": {"path": str(folder)},
            "scheduler": {"max_waiting": 4 if stages is ToyStages else 16},
            "parallel": {
                "verify_tensor_parallel_size": 2,
                **({} if timeout_s is None else {"timeout_s": timeout_s}),
            },
        },
        "app_name": name,
        "router": {"name": f"{name}-router"},
        **sections,
    }
    config = service_config(tree)
    deployment = serve.deployment(
        Pipeline,
        name="Pipeline",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1000,
        max_constructor_retry_count=1,
        health_check_period_s=1.0,
    )
    deploy(
        deployment.bind(config, stages()),
        name=name,
        route_prefix=None,
        wait=wait or Event().wait,
        while_deploying=WaitingLine(config, StartLine(say)),
    )
    return Running(url="", config=config, pipelines=serve.get_deployment_handle("Pipeline", name))


def _request(name: str, *, max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=(TokenId(1), TokenId(2)),
        sampling=SamplingParams(seed=7, max_tokens=max_tokens),
    )


def _expected(request: Request) -> list[int]:
    return [toy_token(request, 2 + i) for i in range(request.sampling.max_tokens)]


def test_a_worker_that_hangs_is_found_out_and_replaced(toy: Running) -> None:
    request = _request("hang", max_tokens=300)
    items = toy.items(request)
    tokens = [token for emission in next(items) for token in emission.tokens]
    before = toy.state()
    pids = {m.name: m.pid for m in before.workers}
    os.kill(pids["verify rank 1"], signal.SIGSTOP)
    os.kill(pids["verify rank 0"], signal.SIGKILL)
    assert tokens + tokens_of(items) == _expected(request)
    after = {m.name: m.pid for m in toy.ready_after(before).workers}
    assert after["drafting actor"] == pids["drafting actor"]
    assert after["verify rank 0"] != pids["verify rank 0"]
    assert after["verify rank 1"] != pids["verify rank 1"]


@pytest.mark.parametrize(
    ("timeout_s", "sections"),
    [
        pytest.param(5.0, {"recovery": {"stream_pause_s": 120.0}}, id="a deadline of 5 s"),
        pytest.param(None, {}, id="the defaults", marks=pytest.mark.slow),
    ],
)
def test_a_drafting_actor_that_freezes_is_named_and_its_stream_goes_on(
    timeout_s: float | None, sections: dict[str, object], ray_port: int, tmp_path: Path
) -> None:
    freezing = _toy_pipeline("freezing", tmp_path, timeout_s=timeout_s, **sections)
    request = _request("frozen", max_tokens=300)
    items = freezing.items(request)
    tokens = tokens_of([next(items)])
    before = freezing.state()
    pid = {worker.name: worker.pid for worker in before.workers}["drafting actor"]
    os.kill(pid, signal.SIGSTOP)
    assert tokens + tokens_of(items) == _expected(request)
    after = freezing.ready_after(before)
    assert re.fullmatch(
        rf"lost drafting actor \(pid {pid} on .*\) during heartbeat \(epoch 1\): "
        rf"no answer within {20 if timeout_s is None else 5} s",
        after.last_trouble,
    ), after.last_trouble
    assert {m.name: m.pid for m in after.workers}["drafting actor"] != pid
    assert after.num_interruptions == 1
    serve.delete("freezing")


def test_drafting_goes_on_without_a_router_and_the_router_comes_back(toy: Running) -> None:
    router = ray.get_actor(toy.config.router.name, namespace=toy.config.router.namespace)
    request = _request("alone", max_tokens=100)
    items = toy.items(request)
    ray.kill(router, no_restart=False)
    assert tokens_of(items) == _expected(request)

    def known() -> Any:
        try:
            return ray.get(router.describe.remote(), timeout=20)["pipelines"]
        except ray.exceptions.RayActorError:  # it is being started again
            return None

    assert len(until(known, timeout_s=60.0)) == 1


def test_one_request_too_many_is_refused_and_the_others_go_on(toy: Running) -> None:
    crowd = [_request(f"crowd-{i}", max_tokens=60) for i in range(4)]
    with held(toy.config.engine):
        streams = [toy.items(request) for request in crowd]
        until(lambda: toy.num_running() == 4)
        refusal = next(toy.items(_request("crowd-5", max_tokens=4)))
        assert type(refusal).__name__ == "QueueFull"
        assert "raise scheduler.max_waiting" in str(refusal)
    for request, stream in zip(crowd, streams, strict=True):
        assert tokens_of(stream) == _expected(request)


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(toy: Running) -> None:
    request = _request("same", max_tokens=60)
    with held(toy.config.engine):
        owner = toy.items(request)
        until(lambda: toy.num_running() == 1)
        refusal = next(toy.items(_request("same", max_tokens=4)))
        assert isinstance(refusal, RequestError)
    assert tokens_of(owner) == _expected(request)


def _has_turned_rounds_since(toy: Running, epoch: int) -> bool:
    state = toy.state()
    if state.epoch == epoch or not state.is_ready:
        return False
    return bool(toy.pipelines.stats.remote().result(timeout_s=30).num_rounds)


def test_a_stream_that_makes_progress_outlives_any_number_of_interruptions(toy: Running) -> None:
    request = _request("stubborn", max_tokens=1500)
    items = toy.items(request)
    before = toy.state()
    limit = toy.config.recovery.max_interruptions
    tokens: list[int] = []
    for _ in range(limit + 1):
        tokens += tokens_of([next(items)])
        epoch = toy.state().epoch
        toy.signal("drafting actor", signal.SIGKILL)
        until(lambda old=epoch: _has_turned_rounds_since(toy, old), timeout_s=60.0)
    assert tokens + tokens_of(items) == _expected(request)
    after = toy.state()
    assert after.pipeline == before.pipeline
    assert after.num_interruptions >= before.num_interruptions + limit
    assert after.recovery_s is not None
    assert 0.0 < after.recovery_s < 120.0


@pytest.fixture(scope="module")
def poisoned(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A pipeline of toys that certain requests break."""
    yield _toy_pipeline(
        "poisoned",
        tmp_path_factory.mktemp("poisoned"),
        stages=PoisonedStages,
        recovery={"stream_pause_s": 60.0},
    )
    serve.delete("poisoned")


def _poison(name: str, *, fault: str) -> Request:
    return replace(_request(name, max_tokens=10), prompt=(POISON, WAYS[fault]))


@pytest.mark.parametrize("fault", WAYS)
def test_poison_is_refused_by_name_and_the_others_finish(fault: str, poisoned: Running) -> None:
    before = poisoned.state().num_interruptions
    good = [_request(f"good-{i}", max_tokens=200) for i in range(6)]
    with held(poisoned.config.engine):
        streams = [poisoned.items(request) for request in good]
        until(lambda: poisoned.num_running() == len(good))
        bad = poisoned.items(_poison("bad", fault=fault))
        until(lambda: poisoned.state().num_interruptions > before)
    (refusal,) = bad
    assert type(refusal).__name__ == "PoisonRequest"
    assert "request bad is refused: the engine broke 3 times under it" in str(refusal)
    for request, stream in zip(good, streams, strict=True):
        assert tokens_of(stream) == _expected(request)
    assert poisoned.state().num_interruptions == before + 3


def test_poison_that_is_alone_is_refused_after_two_engines(poisoned: Running) -> None:
    before = poisoned.state()
    (refusal,) = poisoned.items(_poison("lonely", fault="bug in the drafting actor"))
    assert "request lonely is refused: the engine broke 2 times under it" in str(refusal)
    assert "this token is in no vocabulary" in str(refusal)
    request = _request("after", max_tokens=20)
    assert tokens_of(poisoned.items(request)) == _expected(request)
    after = poisoned.state()
    assert after.pipeline == before.pipeline
    assert after.num_interruptions == before.num_interruptions + 2


def test_health_says_that_a_pipeline_is_being_formed_again_and_why(toy: Running) -> None:
    toy.signal("verify rank 0", signal.SIGKILL)
    until(lambda: not toy.state().is_ready)
    reason = _health(toy).reason
    assert re.match(r"re-forming for \d\.\d s \(epoch \d+\): lost verify rank 0", reason)
    assert until(lambda: _health(toy).is_healthy, timeout_s=90.0)


def _health(running: Running) -> Health:
    health: Health = running.pipelines.health.remote().result(timeout_s=20)
    return health


def test_an_engine_that_breaks_under_every_request_is_given_up_with_a_clear_error(
    ray_port: int, tmp_path: Path
) -> None:
    hopeless = _toy_pipeline(
        "hopeless",
        tmp_path,
        stages=PoisonedStages,
        recovery={"max_interruptions": 1, "stream_pause_s": 120.0},
    )
    before = hopeless.state()
    names = [f"bad-{i}" for i in range(4)]
    with held(hopeless.config.engine, at=0):
        streams = [
            hopeless.items(_poison(name, fault="bug in the drafting actor")) for name in names
        ]
        until(lambda: hopeless.num_running() == len(names))
    messages = [str(error) for stream in streams for error in stream]
    assert sum("is refused" in text for text in messages) == len(names)
    assert hopeless.state().pipeline != before.pipeline, "which was given up"
    serve.delete("hopeless")


def _has_left_nothing(name: str) -> bool:
    """Returns whether no worker and no placement group of the application is there."""
    return not workers_named(f"{name}/", namespace="eesd") and not placement_groups_named(name)


def test_workers_without_a_supervisor_exit_and_one_that_wakes_up_begins_again(
    ray_port: int, tmp_path: Path
) -> None:
    bundle = {"num_cpus": 0.6 * ray.available_resources()["CPU"] / 3}  # there is room for one
    wide: dict[str, object] = {"placement": {"draft": bundle, "verify": bundle}}
    leased = _toy_pipeline("leased", tmp_path, timeout_s=2.0, recovery={"lease_s": 20.0}, **wide)
    request = _request("leased", max_tokens=3000)  # 30 s: it outlasts the lease
    items = leased.items(request)
    tokens = tokens_of([next(items)])
    before = leased.state()
    os.kill(before.pid, signal.SIGSTOP)
    try:
        lines: list[str] = []
        _toy_pipeline("successor", tmp_path, say=lines.append, **wide)
        assert _has_left_nothing("leased")
        assert lines, "its room was held for longer than a replica takes to ask for it"
        matches = [
            re.search(
                r"waiting for room: 3 workers of pipeline (\S+) \(application leased\), which have "
                r"no supervisor, hold CPU \S+ by their lease for at most (\d+) s$",
                line,
            )
            for line in lines
        ]
        name, seconds = next(match.groups() for match in matches if match is not None)
        assert name == before.pipeline
        assert 1 <= int(seconds) <= 20 + LAST_WAIT_S
        serve.delete("successor")
    finally:
        os.kill(before.pid, signal.SIGCONT)
    assert tokens + tokens_of(items) == _expected(request)
    after = leased.state()
    assert not {w.pid for w in before.workers} & {w.pid for w in after.workers}
    serve.delete("leased")
    assert _has_left_nothing("leased")


def test_a_place_that_does_not_exist_is_named_bundle_by_bundle(
    ray_port: int, tmp_path: Path
) -> None:
    has_line = Event()

    def say(line: str) -> None:
        lines.append(line)
        if "no_such_thing" in line:
            has_line.set()

    lines: list[str] = []
    placement = {"verify": {"resources": {"no_such_thing": 1}}}
    _toy_pipeline("nowhere", tmp_path, wait=has_line.wait, say=say, placement=placement)
    assert re.search(
        r"starting for .* verify rank 1 need CPU 0\.5, no_such_thing 1: node", lines[-1]
    )
    status = serve.status().applications["nowhere"]
    assert status.status == ApplicationStatus.DEPLOYING, "waiting is not failing"
    serve.delete("nowhere")
    until(lambda: not placement_groups_named("nowhere/"), timeout_s=60.0)


def test_a_log_level_reaches_the_replica_and_its_workers(toy: Running) -> None:
    namespace = toy.config.router.namespace
    names = workers_named("toy/", namespace=namespace)
    handles = [ray.get_actor(name, namespace=namespace) for name in names]

    def levels() -> set[int]:
        calls = [
            handle.__ray_call__.remote(lambda _: logging.getLogger("eesd_dist").level)
            for handle in handles
        ]
        return set(ray.get(calls, timeout=30))

    def configure(level: str) -> None:
        toy.pipelines.broadcast("reconfigure", {"log_level": level}).results(timeout_s=30)

    assert levels() == {logging.INFO}
    configure("ERROR")
    until(lambda: levels() == {logging.ERROR}, timeout_s=30.0)
    configure("LOUD")  # refused, in the log
    request = _request("levels", max_tokens=4)
    assert tokens_of(toy.items(request)) == _expected(request)
    assert levels() == {logging.ERROR}
    configure("INFO")
    until(lambda: levels() == {logging.INFO}, timeout_s=30.0)


def test_a_model_that_cannot_be_loaded_is_not_tried_again_and_again(
    ray_port: int, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match="found nothing, expected a model folder"):
        _toy_pipeline("empty", tmp_path / "missing")
    assert time.monotonic() - began_s < 200
    serve.delete("empty")
