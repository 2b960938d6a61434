"""A client that comes back, at the same ingress or another: the pipeline that keeps its stream is
found, and if there is none its text is made again."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.errors import PeerLost, ResumedElsewhere
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.config import ServiceConfig
from serve_app.ingress.pipeline_client import ServiceClient
from tests.support.in_process import Fault, epoch
from tests.support.toy_stages import held, toy_token
from tests.unit.serve_app.ingress.toy_service import ToyService, config_of, toy_service

_MAX_TOKENS = 40


def _request(*, max_tokens: int = _MAX_TOKENS) -> Request:
    return Request(
        request_id=RequestId("r"),
        prompt=(TokenId(1),),
        sampling=SamplingParams(max_tokens=max_tokens),
        resume_window_s=60.0,
    )


def _resumed(request: Request) -> Request:
    return replace(request, resumption=time.time_ns())


def _text(request: Request) -> list[int]:
    return [toy_token(request, 1 + i) for i in range(request.sampling.max_tokens)]


class _Connection:
    """Reads one stream until it is closed."""

    def __init__(self, client: ServiceClient, request: Request) -> None:
        self.tokens: list[int] = []
        self._arrived = asyncio.Condition()
        self.reading = asyncio.ensure_future(self._read(client, request))

    async def _read(self, client: ServiceClient, request: Request) -> list[int]:
        async for emissions in client.stream(request):
            self.tokens += [token for emission in emissions for token in emission.tokens]
            async with self._arrived:
                self._arrived.notify_all()
        return self.tokens

    async def has_tokens(self, num_tokens: int = 1) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.tokens) >= num_tokens)

    async def close(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)


async def _text_of(client: ServiceClient, request: Request) -> list[int]:
    return [token async for batch in client.stream(request) for e in batch for token in e.tokens]


def _served(service: ToyService) -> dict[str, int]:
    return {name: len(pipeline.served) for name, pipeline in service.pipelines.items()}


def _config(folder: Path) -> ServiceConfig:
    return config_of(engine={"model": {"path": str(folder)}})


@pytest.mark.parametrize("at", ["another ingress", "the same ingress"])
@pytest.mark.parametrize("has_left", [True, False], ids=["has left", "is not known to have left"])
def test_a_stream_goes_on_in_the_pipeline_that_keeps_it(
    at: str, has_left: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = _config(tmp_path)

    async def run() -> None:
        async with toy_service(config, monkeypatch) as service:
            client = service.client if at == "the same ingress" else service.another_ingress()
            with held(config.engine, at=20):
                first = _Connection(service.client, _request())
                await first.has_tokens(20)
                if has_left:
                    await first.close()
                (home,) = [name for name, count in _served(service).items() if count]
                second = _Connection(client, _resumed(_request()))
                await second.has_tokens(20)
                assert second.tokens == first.tokens
            assert await second.reading == _text(_request())
            assert service.pipelines[home].served[-1].resumption > 0
            assert sum(_served(service).values()) == 2
            if not has_left:
                with pytest.raises(ResumedElsewhere):
                    await first.reading

    asyncio.run(run())


def test_a_stream_is_made_again_when_its_pipeline_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            first = _Connection(service.client, _request())
            await first.has_tokens()
            await first.close()
            (home,) = [name for name, count in _served(service).items() if count]
            await service.pipelines[home].lose()
            text = await _text_of(service.another_ingress(), _resumed(_request()))
            assert text == _text(_request())

    asyncio.run(run())


def test_a_pipeline_that_does_not_answer_costs_half_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            await service.tokens(_request())
            for pipeline in service.pipelines.values():
                pipeline.handle.fault = lambda method: (
                    Fault.SILENT if method == "num_kept" else None
                )
            began_s = time.monotonic()
            assert await service.tokens(_resumed(_request())) == _text(_request())
            assert 0.5 < time.monotonic() - began_s < 4.0

    asyncio.run(run())


def test_a_resumed_stream_outlives_its_pipeline_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = _config(tmp_path)

    async def run() -> None:
        async with toy_service(config, monkeypatch, names="a") as service:
            actor = service.pipelines["a"].handle.actor
            with held(config.engine, at=12):
                first = _Connection(service.client, _request())
                await first.has_tokens()
                await first.close()
                second = _Connection(service.another_ingress(), _resumed(_request()))
                await second.has_tokens()
                await actor.leave(PeerLost(peer="rank", operation="receive", reason="dead"))
                await actor.join(epoch(2))
            assert await second.reading == _text(_request())

    asyncio.run(run())


def test_an_ingress_that_has_just_started_finds_the_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = _config(tmp_path)

    async def run() -> None:
        async with toy_service(config, monkeypatch, names="abc") as service:
            with held(config.engine, at=20):
                first = _Connection(service.client, _request())
                await first.has_tokens()
                (home,) = [name for name, count in _served(service).items() if count]
                second = _Connection(service.another_ingress(), _resumed(_request()))
                await second.has_tokens()
            assert await second.reading == _text(_request())
            assert _served(service) == {name: 2 * (name == home) for name in "abc"}
            await first.close()

    asyncio.run(run())
