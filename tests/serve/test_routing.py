"""Requests find their pipeline, and leave one that goes; the tokens are the same ones."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from eesd_dist.errors import ConfigError
from eesd_dist.routing.choice import PipelineChoice
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.tenure import placement_groups_named, workers_named
from serve_app.app import application_of
from serve_app.cli.main import main
from serve_app.config import ServiceConfig, service_config
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.pipeline_client import ServiceClient
from serve_app.ingress.retry import Attempts
from serve_app.pipeline.reports import PipelineState
from serve_app.service.connect import ServiceConnection
from serve_app.service.serve_instance import deploy
from tests.support.toy_stages import ToyStages, held, toy_token

NAME = "routed"


@pytest.fixture(scope="module")
def config(ray_port: int, tiny_service: Path) -> Iterator[ServiceConfig]:
    config = _config(tiny_service, num_pipelines=2)
    application = application_of(config, stages=ToyStages())
    deploy(application, name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    yield config
    serve.delete(NAME)
    assert not workers_named(f"{NAME}/", namespace=config.router.namespace)
    assert not placement_groups_named(NAME)
    ray.kill(ray.get_actor(config.router.name, namespace=config.router.namespace))


def _config(model: Path, *, num_pipelines: int) -> ServiceConfig:
    return service_config(
        {
            "engine": {"model": {"path": str(model)}, "cache": {"page_size": 4}},
            "app_name": NAME,
            "num_ingresses": 1,
            "router": {"name": f"{NAME}-router"},
            "pipelines": {"min_count": num_pipelines, "max_count": num_pipelines},
            "recovery": {"drain_s": 30.0, "stream_pause_s": 60.0},
        }
    )


def _request(name: str, *, prompt: Sequence[int] = (1, 2), max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(seed=7, max_tokens=max_tokens),
    )


def _both_serve(num_streams: int) -> Callable[[tuple[PipelineState, ...]], bool]:
    def holds(states: tuple[PipelineState, ...]) -> bool:
        counts = [state.num_live for state in states]
        return min(counts) > 0 and sum(counts) == num_streams

    return holds


def _live(num_streams: int) -> Callable[[tuple[PipelineState, ...]], bool]:
    return lambda states: sum(state.num_live for state in states) == num_streams


def _expected(request: Request) -> list[int]:
    start = len(request.prompt)
    return [toy_token(request, start + i) for i in range(request.sampling.max_tokens)]


class Watched(LoadBalancer):
    """Remembers which pipeline took each request."""

    def __init__(self, config: ServiceConfig, pipelines: Any) -> None:
        super().__init__(config, pipelines=pipelines)
        self.takers: list[str] = []

    @property
    def num_usable(self) -> int:
        """Pipelines that take requests, by the latest answer."""
        return sum(bool(p["is_usable"]) for p in self._chooser.describe())

    @property
    def num_idle(self) -> int:
        """Usable pipelines without a live request, as last heard of."""
        return sum(p["is_usable"] and not p["load"] for p in self._chooser.describe())

    def ask_no_more(self) -> None:
        """To the router it is as good as dead."""
        assert self._polling is not None
        self._polling.cancel()

    def choose(self, attempts: Attempts) -> PipelineChoice | None:
        choice = super().choose(attempts)
        if choice is not None:
            self.takers.append(choice.pipeline)
        return choice


class Sending:
    """An ingress's own way to the pipelines, in the test's process."""

    def __init__(self, config: ServiceConfig) -> None:
        self.handle = serve.get_deployment_handle("Pipeline", config.app_name)
        self.load_balancer = Watched(config, self.handle)
        self._client = ServiceClient(
            self.handle,
            config=config,
            tracing=Tracing(),
            load_balancer=self.load_balancer,
        )

    async def tokens(self, request: Request) -> list[int]:
        return [t async for batch in self._client.stream(request) for e in batch for t in e.tokens]

    async def states(self) -> tuple[PipelineState, ...]:
        states = await self._client.states(timeout_s=20.0)
        return tuple(sorted(states, key=lambda state: state.pipeline))

    async def until(self, holds: Callable[[tuple[PipelineState, ...]], bool]) -> None:
        async with asyncio.timeout(60.0):
            while not holds(await self.states()):  # noqa: ASYNC110  # in other processes
                await asyncio.sleep(0.1)

    async def num_running(self) -> int:
        """Requests in the engines, read by a client or not."""
        return sum(s.num_running for s in await self._client._of_all("stats", timeout_s=20.0))

    async def all_idle(self) -> None:
        """Until nothing of the test before is left in what pipelines have said of themselves."""
        async with asyncio.timeout(60.0):
            while self.load_balancer.num_idle != 2:  # noqa: ASYNC110  # in the router
                await asyncio.sleep(0.05)

    async def known(self, count: int) -> None:
        """Until the lookout knows so many pipelines that take requests."""
        async with asyncio.timeout(60.0):
            while self.load_balancer.num_usable != count:  # noqa: ASYNC110  # in the router
                await asyncio.sleep(0.05)

    def counted(self, name: str) -> float:
        families = text_string_to_metric_families(self.load_balancer.page().decode())
        return next(s.value for f in families for s in f.samples if s.name == name)


class Apart:
    """The same, as an actor: in a process that can be killed."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config

    async def pid(self) -> int:
        return os.getpid()

    async def tokens(self, requests: Sequence[Request]) -> list[list[int]]:
        sending = Sending(self._config)
        sending.load_balancer.start()
        await sending.known(2)  # and so the router knows of it
        return await asyncio.gather(*[sending.tokens(request) for request in requests])


@asynccontextmanager
async def _sending(config: ServiceConfig) -> AsyncIterator[Sending]:
    sending = Sending(config)
    sending.load_balancer.start()
    await sending.all_idle()
    yield sending


def test_a_conversation_stays_with_its_pipeline(config: ServiceConfig) -> None:
    async def story() -> None:
        async with _sending(config) as sending:
            for i in range(4):
                first = _request(f"turn-1-{i}", prompt=range(i, i + 40), max_tokens=12)
                reply = await sending.tokens(first)
                assert reply == _expected(first)
                await sending.all_idle()
                prompt = [*first.prompt, *reply, 5, 6]
                second = _request(f"turn-2-{i}", prompt=prompt, max_tokens=12)
                assert await sending.tokens(second) == _expected(second)
                assert sending.load_balancer.takers[-1] == sending.load_balancer.takers[-2]
                assert sending.counted("eesd_router_prefix_hits_total") == i + 1
            # All of the first turn but what does not fill a page of 4: 52 of 54 tokens.
            assert sending.counted("eesd_router_prefix_tokens_total") == 4 * 52
            assert sending.counted("eesd_router_requests_total") == 8

    asyncio.run(story())


def test_a_crowd_is_spread_over_the_pipelines_before_they_have_said_a_word(
    config: ServiceConfig,
) -> None:
    async def story() -> None:
        async with _sending(config) as sending:
            crowd = [
                _request(f"crowd-{i}", prompt=range(9 * i, 9 * i + 9), max_tokens=10)
                for i in range(12)
            ]
            texts = await asyncio.gather(*[sending.tokens(request) for request in crowd])
            assert texts == [_expected(request) for request in crowd]
            # The latest status of a pipeline may still count requests that are over.
            counts = Counter(sending.load_balancer.takers)
            assert min(counts.values()) >= 5
            assert counts.total() == 12

    asyncio.run(story())


def test_a_drained_pipeline_migrates_its_streams_and_takes_no_more_until_it_is_told_to(
    config: ServiceConfig,
) -> None:
    async def story() -> None:
        async with _sending(config) as sending:
            crowd = [_request(f"drained-{i}", max_tokens=400) for i in range(8)]
            with held(config.engine):
                streams = [asyncio.ensure_future(sending.tokens(request)) for request in crowd]
                await sending.until(_both_serve(len(crowd)))
                first_pipeline, second_pipeline = await sending.states()
                operator = ServiceConnection(router=None, app_name=NAME)
                drained = await asyncio.to_thread(operator.drain, first_pipeline.pipeline)
                assert drained.num_migrated == first_pipeline.num_live
                with pytest.raises(ConfigError, match="no other pipeline takes requests"):
                    await asyncio.to_thread(operator.drain, second_pipeline.pipeline)
                await sending.until(lambda states: [s.num_live for s in states] == [0, 8])
                await sending.known(1)
                newcomer = _request("late", max_tokens=8)
                assert await sending.tokens(newcomer) == _expected(newcomer)
                assert sending.load_balancer.takers[-1] == second_pipeline.pipeline
            assert await asyncio.gather(*streams) == [_expected(request) for request in crowd]
            assert sending.counted("eesd_router_migrations_total") == first_pipeline.num_live
            assert (await sending.states())[0].draining == "drained by hand"
            await asyncio.to_thread(operator.undrain, first_pipeline.pipeline)
            await sending.known(2)
            more = [_request(f"more-{i}", max_tokens=20) for i in range(4)]
            await asyncio.gather(*[sending.tokens(request) for request in more])
            assert first_pipeline.pipeline in sending.load_balancer.takers[-4:]
            with pytest.raises(ConfigError, match="no pipeline 'nobody'"):
                await asyncio.to_thread(operator.drain, "nobody")

    asyncio.run(story())


def test_streams_of_a_broken_pipeline_go_on_in_another_while_it_is_mended(
    config: ServiceConfig,
) -> None:
    async def story() -> None:
        async with _sending(config) as sending:
            crowd = [
                _request(f"broken-{i}", prompt=range(9 * i, 9 * i + 9), max_tokens=400)
                for i in range(6)
            ]
            with held(config.engine):
                streams = [asyncio.ensure_future(sending.tokens(request)) for request in crowd]
                await sending.until(_both_serve(len(crowd)))
                first_pipeline, second_pipeline = await sending.states()
                (drafter,) = [m for m in first_pipeline.workers if m.name == "drafting actor"]
                os.kill(drafter.pid, signal.SIGKILL)
                await sending.until(lambda states: [s.num_live for s in states] == [0, 6])
            assert await asyncio.gather(*streams) == [_expected(request) for request in crowd]
            assert sending.load_balancer.takers.count(second_pipeline.pipeline) == len(crowd)
            await sending.known(2)
            after = {state.pipeline: state for state in await sending.states()}
            assert after[first_pipeline.pipeline].recovery_s is not None
            assert (
                after[first_pipeline.pipeline].num_interruptions
                == first_pipeline.num_interruptions + 1
            )
            assert (
                after[second_pipeline.pipeline].num_interruptions
                == second_pipeline.num_interruptions
            )

    asyncio.run(story())


def test_streams_of_a_killed_ingress_end_and_those_of_a_frozen_or_a_mute_one_go_on(
    config: ServiceConfig,
) -> None:
    async def story() -> None:
        async with _sending(config) as sending:
            killed, frozen = [ray.remote(Apart).options(num_cpus=0).remote(config) for _ in "12"]
            pid, frozen_pid = await killed.pid.remote(), await frozen.pid.remote()
            mute = Sending(config)
            mute.load_balancer.start()
            await mute.known(2)
            crowd = [_request(f"unread-{i}", max_tokens=400) for i in range(6)]
            own, delayed, lone = [_request(name, max_tokens=40) for name in ("own", "late", "lone")]
            try:
                with held(config.engine):
                    owned = asyncio.ensure_future(sending.tokens(own))
                    lone_stream = asyncio.ensure_future(mute.tokens(lone))
                    unread, paused = killed.tokens.remote(crowd), frozen.tokens.remote([delayed])
                    await sending.until(_live(9))
                    os.kill(frozen_pid, signal.SIGSTOP)
                    os.kill(pid, signal.SIGKILL)
                    mute.load_balancer.ask_no_more()
                    await sending.until(_live(2))
                    assert await sending.num_running() == 2
                    with pytest.raises(ray.exceptions.RayActorError):
                        await unread
                    os.kill(frozen_pid, signal.SIGCONT)
                    await sending.until(_live(3))
                assert await owned == _expected(own)
                assert await lone_stream == _expected(lone)
                assert await paused == [_expected(delayed)]
            finally:
                os.kill(frozen_pid, signal.SIGKILL)

    asyncio.run(story())


def test_the_command_lists_pipelines_and_drains_them(
    config: ServiceConfig,
    ray_port: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    url = f"http://127.0.0.1:{ray_port}/{NAME}"
    where = ["--app", NAME, "--address", "auto", "--url", url]
    where += ["--router", config.router.name]

    def listed() -> list[dict[str, Any]]:
        assert main(["pipelines", *where, "--json"]) == 0
        pipelines: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["pipelines"]
        return pipelines

    names = [pipeline["pipeline"] for pipeline in listed()]
    assert len(names) == 2
    assert main(["pipelines", "drain", names[0], *where]) == 0
    assert f"{names[0]} takes no more requests; 0 streams continue in other pipelines" in (
        capsys.readouterr().out
    )
    assert {e["pipeline"]: e["draining"] for e in listed()} == {
        names[0]: "drained by hand",
        names[1]: "",
    }
    assert main(["pipelines", *where]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in names)
    assert "drained by hand" in table
    assert main(["pipelines", *where, "undrain", names[0]]) == 0
    assert f"{names[0]} takes requests again" in capsys.readouterr().out
    assert not any(pipeline["draining"] for pipeline in listed())


def test_redeployed_with_one_replica_less_no_stream_is_broken(
    config: ServiceConfig, tiny_service: Path
) -> None:
    async def story() -> None:
        async with _sending(config) as sending:
            old = {state.pipeline for state in await sending.states()}
            crowd = [_request(f"redeployed-{i}", max_tokens=400) for i in range(6)]
            with held(config.engine):
                streams = [asyncio.ensure_future(sending.tokens(request)) for request in crowd]
                await sending.until(_both_serve(len(crowd)))
                fewer = application_of(_config(tiny_service, num_pipelines=1), stages=ToyStages())
                await asyncio.to_thread(
                    deploy, fewer, name=NAME, route_prefix=f"/{NAME}", wait=Event().wait
                )
                await sending.until(
                    lambda states: len(states) == 1 and states[0].pipeline not in old
                )
            assert await asyncio.gather(*streams) == [_expected(request) for request in crowd]
            migrations.append(sending.counted("eesd_router_migrations_total"))

    migrations: list[float] = []
    asyncio.run(story())
    assert migrations[0] > 0  # streams that were migrated, not only resumed after a death
