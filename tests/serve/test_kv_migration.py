"""A drained pipeline's streams go on in the other one, from the pages that were copied to it."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import ray
from ray import serve

from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.app import build_app
from serve_app.config import ServiceConfig, service_config
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.pipeline_client import ServiceClient
from serve_app.pipeline.drain import Drained
from serve_app.pipeline.kv_migration import Contacts, MigrationReport, migrate
from serve_app.pipeline.reports import PipelineState
from serve_app.service.connect import ServiceConnection
from serve_app.service.serve_instance import deploy

NAME = "handed"
PAGE = 16
PROMPT = 300
MAX_TOKENS = 2000
"""More than a stream has by the time it is migrated; three of them have room in one pipeline."""


@pytest.fixture(scope="module")
def config(ray_port: int, tiny_service: Path) -> Iterator[ServiceConfig]:
    config = service_config(
        {
            "engine": {
                "model": {"path": str(tiny_service), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 512, "page_size": PAGE},
                "parallel": {"verify_tensor_parallel_size": 2, "timeout_s": 20.0},
            },
            "app_name": NAME,
            "num_ingresses": 1,
            "router": {"name": f"{NAME}-router"},
            "pipelines": {"min_count": 2, "max_count": 2},
            "placement": {"draft": {"num_cpus": 0.2}, "verify": {"num_cpus": 0.2}},
            # A busy machine takes its time to start a process.
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    deploy(build_app(config), name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    yield config
    serve.delete(NAME)
    ray.kill(ray.get_actor(config.router.name, namespace=config.router.namespace))


class Sending:
    """An ingress's own way to the pipelines, in the test's process."""

    def __init__(self, config: ServiceConfig) -> None:
        self.handle = serve.get_deployment_handle("Pipeline", config.app_name)
        self.load_balancer = LoadBalancer(config, pipelines=self.handle)
        self._client = ServiceClient(
            self.handle,
            config=config,
            tracing=Tracing(),
            load_balancer=self.load_balancer,
        )
        self.num_tokens: dict[RequestId, int] = {}
        self._enough = MAX_TOKENS

    async def tokens(self, request: Request) -> list[int]:
        """Its first ones, until there are enough."""
        tokens: list[int] = []
        stream = self._client.stream(request)
        assert isinstance(stream, AsyncGenerator)
        async with aclosing(stream) as batches:
            async for emissions in batches:
                tokens += [token for emission in emissions for token in emission.tokens]
                self.num_tokens[request.request_id] = len(tokens)
                if len(tokens) >= self._enough:
                    break
        return tokens[: self._enough]

    async def states(self) -> tuple[PipelineState, ...]:
        return await self._client.states(timeout_s=60.0)

    async def contacts(self) -> dict[str, Contacts]:
        contacts: list[Contacts] = await self.handle.broadcast("contacts").results_async()
        return {contact.pipeline: contact for contact in contacts}

    async def under_way(self, requests: list[Request], *, num_tokens: int) -> None:
        """Until each of them has so many tokens."""
        await _until(
            lambda: all(self.num_tokens.get(r.request_id, 0) >= num_tokens for r in requests)
        )

    async def gone_on(self, num_requests: int) -> None:
        """Waits until so many streams were migrated; then some tokens more are enough for all."""
        await _until(lambda: self._num_moves() >= num_requests)
        self._enough = min(MAX_TOKENS, max(self.num_tokens.values()) + 200)

    def _num_moves(self) -> int:
        sample = re.search(
            rb"^eesd_router_migrations_total\S* (\S+)$", self.load_balancer.page(), re.MULTILINE
        )
        assert sample is not None
        return int(float(sample[1]))


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not holds():  # noqa: ASYNC110  # a state of other processes
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _sending(config: ServiceConfig) -> AsyncIterator[Sending]:
    sending = Sending(config)
    sending.load_balancer.start()
    chooser = sending.load_balancer._chooser
    await _until(lambda: sum(bool(p["is_usable"]) for p in chooser.describe()) == 2)
    yield sending


def _requests(tag: str, count: int, *, topic: int) -> list[Request]:
    """`topic`, modulo 300: no page of one is a page of another."""
    return [
        Request(
            request_id=RequestId(f"{tag}-{i}"),
            prompt=tuple(TokenId(3 + (topic + 7 * i + j * j) % 300) for j in range(PROMPT)),
            sampling=SamplingParams(temperature=0.8, seed=i, max_tokens=MAX_TOKENS),
        )
        for i in range(count)
    ]


async def _begun(
    sending: Sending, requests: list[Request]
) -> tuple[list[asyncio.Future[list[int]]], list[PipelineState]]:
    """Their streams under way, and the two pipelines, the busier one first."""
    streams = [asyncio.ensure_future(sending.tokens(request)) for request in requests]
    await sending.under_way(requests, num_tokens=5)
    return streams, sorted(await sending.states(), key=lambda state: -state.num_live)


def test_drained_under_load_every_stream_takes_its_pages_along_and_has_the_same_text(
    config: ServiceConfig,
) -> None:
    async def story() -> None:
        async with _sending(config) as sending:
            streams, (source, target) = await _begun(sending, _requests("migrated", 3, topic=0))
            operator = ServiceConnection(router=None, app_name=NAME)
            drained: Drained = await asyncio.to_thread(operator.drain, source.pipeline)
            report = drained.migration
            assert report is not None
            assert (report.by, report.to, report.how) == (source.pipeline, target.pipeline, "pages")
            assert report.reason == ""
            assert drained.num_migrated == report.num_requests > 0
            # Each stream took at least its prompt, and each of the three ranks its part of it.
            assert report.num_bytes > report.num_pages * 1000
            assert all(move.num_pages >= PROMPT // PAGE for move in report.streams)
            await sending.gone_on(report.num_requests)
            migrated = await asyncio.gather(*streams)
            assert {s.pipeline: s.num_live for s in await sending.states()}[source.pipeline] == 0
            await asyncio.to_thread(operator.undrain, source.pipeline)
            twins = _requests("undisturbed", 3, topic=0)
            assert migrated == await asyncio.gather(*[sending.tokens(request) for request in twins])

    asyncio.run(story())


class _Doomed:
    """An actor that dies when it is called for something for the n-th time."""

    def __init__(self, handle: Any, *, by: str, at_call: int) -> None:
        self._handle = handle
        self._by = by
        self._num_left = at_call

    def __getattr__(self, name: str) -> Any:
        if name == self._by:
            self._num_left -= 1
            if self._num_left == 0:
                ray.kill(self._handle)
        return getattr(self._handle, name)


@pytest.mark.parametrize("at_call", [1, 3])
def test_a_rank_that_dies_while_pages_are_copied_costs_no_stream_and_none_that_was_copied(
    config: ServiceConfig, at_call: int
) -> None:
    """The first stream has 18 pages and more: a part of 8, and one with the others."""

    async def story() -> None:
        async with _sending(config) as sending:
            topic = 50 * at_call
            requests = _requests(f"recomputed {at_call}", 3, topic=topic)
            streams, (first_pipeline, second_pipeline) = await _begun(sending, requests)
            contacts = await sending.contacts()
            source, target = contacts[first_pipeline.pipeline], contacts[second_pipeline.pipeline]
            ranks = dict(target.ranks)
            ranks["verify rank 1"] = _Doomed(
                ranks["verify rank 1"], by="receive_pages", at_call=at_call
            )
            report: MigrationReport = await migrate(
                source, Contacts(pipeline=target.pipeline, ranks=ranks), timeout_s=20.0
            )
            first, *others = report.streams
            assert (first.num_pages >= PROMPT // PAGE) == (at_call == 3)
            assert all(move.num_pages == 0 for move in others)
            assert report.how == ("pages" if at_call == 3 else "recomputed")
            assert "verify rank 1" in report.reason
            # The first one may have come back from the pipeline that was interrupted.
            assert report.num_requests >= first_pipeline.num_live
            await sending.gone_on(report.num_requests)
            migrated = await asyncio.gather(*streams)
            twins = _requests(f"also undisturbed {at_call}", 3, topic=topic)
            assert migrated == await asyncio.gather(*[sending.tokens(request) for request in twins])

    asyncio.run(story())
