"""A client over pipelines that are lost, full, draining or not ready: its texts go on, or end with
one clear error."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EesdError, EngineError, Migrated, PeerLost, PoisonRequest, QueueFull
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.ingress.replicas import answered
from tests.support.in_process import epoch
from tests.support.toy_poison import POISON, WAYS, PoisonedStages
from tests.support.toy_stages import toy_token
from tests.unit.serve_app.ingress.toy_service import ToyService, config_of, toy_service


def _request(
    name: str = "r", *, max_tokens: int = 40, prompt: tuple[TokenId, ...] = (TokenId(1),)
) -> Request:
    return Request(
        request_id=RequestId(name), prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )


def _text(request: Request) -> list[int]:
    start = len(request.prompt)
    return [toy_token(request, start + i) for i in range(request.sampling.max_tokens)]


def _ran_in(service: ToyService) -> str:
    return "".join(name for name, pipeline in service.pipelines.items() if pipeline.served)


async def _begun(service: ToyService, request: Request) -> tuple["asyncio.Task[list[int]]", str]:
    """Starts to read a text; returns the reading and its pipeline once it has tokens."""
    reading = asyncio.ensure_future(service.tokens(request))
    await service.has_submitted.wait()
    await asyncio.sleep(0.1)
    return reading, _ran_in(service)


def test_a_text_goes_on_in_another_pipeline_when_its_own_is_lost_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            reading, name = await _begun(service, _request())
            await service.pipelines[name].lose()
            assert await reading == _text(_request())
            (other,) = {"a", "b"} - {name}
            (resumed,) = service.pipelines[other].served
            (first,) = service.pipelines[name].served
            assert 0 < len(resumed.generated) < 40
            assert resumed.generated == tuple(_text(_request())[: len(resumed.generated)])
            assert resumed.submission > first.submission

    asyncio.run(run())


def test_a_text_goes_on_in_the_same_pipeline_after_an_epoch_that_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch, names="a") as service:
            reading, _ = await _begun(service, _request())
            actor = service.pipelines["a"].handle.actor
            await actor.leave(PeerLost(peer="verify rank 0", operation="receive", reason="dead"))
            await asyncio.sleep(0.3)
            assert not reading.done()
            await actor.join(epoch(2))
            assert await reading == _text(_request())

    asyncio.run(run())


def test_a_migrated_stream_goes_on_in_the_pipeline_that_expects_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch, names="abcdef") as service:
            reading, name = await _begun(service, _request())
            target = sorted(service.pipelines.keys() - {name})[2]
            service.pipelines[target].draining = True  # it expects this one stream
            await asyncio.sleep(0.1)
            moved = Migrated(by=name, to=target, reason="drained by hand")
            await service.pipelines[name].handle.actor.evict(None, moved)
            assert await reading == _text(_request())
            assert _ran_in(service) == "".join(sorted(name + target))
            assert b'eesd_router_migrations_total{ingress=""} 1.0' in service.load_balancer.page()

    asyncio.run(run())


def test_a_stream_that_was_sent_on_returns_only_if_no_other_pipeline_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            request = _request(max_tokens=80)
            reading, name = await _begun(service, request)
            (other,) = {"a", "b"} - {name}

            async def send_on(by: str) -> None:
                moved = Migrated(by=by, to=None, reason="drained by hand")
                assert await service.pipelines[by].handle.actor.evict(None, moved) == 1

            await send_on(name)
            await asyncio.sleep(0.3)
            service.pipelines[name].is_ready = False
            await asyncio.sleep(0.2)
            await send_on(other)
            assert await reading == _text(request)
            assert [len(service.pipelines[n].served) for n in (name, other)] == [1, 2]

    asyncio.run(run())


def test_a_draining_pipeline_gets_a_request_only_if_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            service.pipelines["a"].draining = True
            await asyncio.gather(
                *[service.tokens(_request(str(i), max_tokens=4)) for i in range(10)]
            )
            assert _ran_in(service) == "b"
            service.pipelines["b"].is_ready = False
            await asyncio.sleep(0.2)
            assert len(await service.tokens(_request(max_tokens=4))) == 4
            assert len(service.pipelines["a"].served) == 1

    asyncio.run(run())


def test_without_a_ready_pipeline_a_request_waits_and_then_ends_with_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        config = config_of(recovery={"stream_pause_s": 1.0})
        async with toy_service(config, monkeypatch, names="a") as service:
            service.pipelines["a"].is_ready = False
            began_s = time.monotonic()
            with pytest.raises(EngineError, match="no pipeline is ready after 1 s"):
                await service.tokens(_request())
            assert time.monotonic() - began_s >= 1.0
            waiting = asyncio.ensure_future(service.tokens(_request()))
            await asyncio.sleep(0.5)
            service.pipelines["a"].is_ready = True
            assert await waiting == _text(_request())

    asyncio.run(run())


def test_without_a_ready_pipeline_as_many_requests_wait_as_in_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        config = config_of(engine={"scheduler": {"max_waiting": 2}})
        async with toy_service(config, monkeypatch, names="a") as service:
            service.pipelines["a"].is_ready = False
            names = ("first", "second")
            waiting = [asyncio.ensure_future(service.tokens(_request(name))) for name in names]
            await asyncio.sleep(0.2)
            with pytest.raises(QueueFull, match="2"):
                await service.tokens(_request("third"))
            resumed = replace(
                _request("begun"), generated=tuple(map(TokenId, _text(_request("begun"))[:3]))
            )
            suffix = asyncio.ensure_future(service.tokens(resumed))
            await asyncio.sleep(0.2)
            service.pipelines["a"].is_ready = True
            assert await asyncio.gather(*waiting) == [_text(_request(name)) for name in names]
            assert await suffix == _text(_request("begun"))[3:]
            assert await service.tokens(_request("third")) == _text(_request("third"))

    asyncio.run(run())


def test_a_stream_whose_pipeline_does_not_come_back_ends_with_the_reason_of_its_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        config = config_of(recovery={"stream_pause_s": 1.0})
        async with toy_service(config, monkeypatch, names="a") as service:
            reading, _ = await _begun(service, _request(max_tokens=100_000))
            await service.pipelines["a"].lose()
            with pytest.raises(EngineError, match=r"no pipeline is ready after 1 s: .*lost a"):
                await reading

    asyncio.run(run())


def test_a_full_queue_refuses_a_new_request_at_once_and_is_waited_for_by_a_resumed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        config = config_of()
        small = config.engine.model_copy(
            update={"scheduler": config.engine.scheduler.model_copy(update={"max_waiting": 1})}
        )
        engines: dict[str, EngineConfig] = {"a": small}
        async with toy_service(config, monkeypatch, engines=engines) as service:
            small_queue, large = service.pipelines["a"], service.pipelines["b"]
            large.draining = True
            occupant, name = await _begun(service, _request("occupant", max_tokens=120))
            assert name == "a"
            with pytest.raises(QueueFull):
                await service.tokens(_request("new"))
            large.draining, small_queue.draining = False, True
            await asyncio.sleep(0.2)
            resumed = asyncio.ensure_future(service.tokens(_request("resumed")))
            await asyncio.sleep(0.2)
            assert len(large.served) == 1
            small_queue.draining = False
            await large.lose()
            assert await resumed == _text(_request("resumed"))
            assert await occupant == _text(_request("occupant", max_tokens=120))
            assert [r.request_id for r in small_queue.served].count(RequestId("resumed")) > 1

    asyncio.run(run())


def test_a_reader_that_leaves_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch, names="a") as service:
            reading, _ = await _begun(service, _request(max_tokens=100_000))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await asyncio.sleep(0.3)
            assert await service.pipelines["a"].handle.actor.live() == ()

    asyncio.run(run())


def test_a_poison_request_is_refused_and_the_texts_of_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        config = config_of(engine={"model": {"path": str(tmp_path)}})
        stages = PoisonedStages()
        async with toy_service(config, monkeypatch, names="a", stages=stages) as service:
            recovering = asyncio.ensure_future(service.pipelines["a"].recover_forever())
            others = [_request(str(i), max_tokens=60) for i in range(3)]
            reading = [asyncio.ensure_future(service.tokens(request)) for request in others]
            await asyncio.sleep(0.3)
            poison = _request("poison", prompt=(POISON, WAYS["bug in the drafting actor"]))
            with pytest.raises(PoisonRequest, match="no vocabulary"):
                await service.tokens(poison)
            assert await asyncio.gather(*reading) == [_text(request) for request in others]
            tries = [r for r in service.pipelines["a"].served if r.request_id == "poison"]
            # It comes again while another suspect is tested.
            assert [r.is_suspect for r in tries[:3]] == [False, False, True]
            assert all(r.is_suspect for r in tries[2:])
            assert not recovering.done()

    asyncio.run(run())


def test_answers_are_taken_and_frozen_pipelines_are_left_out() -> None:
    async def says(answer: object) -> object:
        if isinstance(answer, EesdError):
            raise answer
        return answer

    async def ask() -> None:
        lost = PeerLost(peer="p", operation="state", reason="dead")
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        frozen = asyncio.Event().wait()
        assert await answered([says(1), frozen, says(lost)], timeout_s=0.1) == (1, lost)
        frozen = asyncio.Event().wait()
        assert await answered([says(2), frozen], timeout_s=60.0, grace_s=0.05) == (2,)
        assert loop.time() - since_s < 10.0
        with pytest.raises(TimeoutError):
            await answered([asyncio.Event().wait()], timeout_s=0.05)
        assert await answered([], timeout_s=0.05) == ()

    asyncio.run(ask())
