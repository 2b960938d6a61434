"""`eesd bench migration`: streams that leave a pipeline, with their KV pages and without.

Two pipelines of one model on a separate Ray instance, without HTTP. `eesd bench migration --help`
defines the pause of a stream, and says what it is compared with.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)
from eesd_dist.engine.build import layout_of
from eesd_dist.errors import ConfigError, EesdError, EngineError
from eesd_dist.provenance import collect_provenance
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.bench.options import MigrationOptions
from serve_app.config import PipelinesConfig, ServiceConfig
from serve_app.session.environment import prepare_for_local_ray

if TYPE_CHECKING:  # these import Ray, which reads the environment then
    from serve_app.pipeline.kv_migration import Contacts, How, MigrationReport, StreamMove

_PAGE_SIZE = 32
_TOKENS_BEFORE = 8
"""Tokens that every stream has before the migration begins."""
_ANSWER_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 300.0


@dataclass(slots=True, kw_only=True)
class _Stream:
    """One request as its client sees it."""

    request: Request
    tokens: list[int]
    arrivals_s: list[float]
    error: str | None = None

    def longest_wait_s(self, *, since_s: float) -> float:
        """Returns the longest time between two arrivals, the later one after `since_s`."""
        waits = [b - a for a, b in pairwise(self.arrivals_s) if b > since_s]
        return max(waits, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Migration:
    """One KV migration of all streams, and the same requests undisturbed."""

    report: "MigrationReport"
    pause_of_s: dict[RequestId, float]
    undisturbed_s: tuple[float, ...]
    num_broken: int
    num_changed: int


class _Clients:
    """The client of an ingress, for the two pipelines."""

    def __init__(self, config: ServiceConfig) -> None:
        from ray import serve

        from serve_app.ingress.load_balancing import LoadBalancer
        from serve_app.ingress.pipeline_client import ServiceClient
        from serve_app.operations.connect import ServiceConnection

        self._operator = ServiceConnection(router=None, app_name=config.app_name)
        self._pipelines: Any = serve.get_deployment_handle("Pipeline", config.app_name)
        self._load_balancer = LoadBalancer(config, pipelines=self._pipelines)
        self._client = ServiceClient(
            self._pipelines,
            config=config,
            tracing=Tracing(),
            load_balancer=self._load_balancer,
        )

    async def ready(self) -> None:
        self._load_balancer.start()
        await self._until_usable(2)

    async def follow(self, stream: _Stream) -> None:
        try:
            async for emission in self._client.stream(stream.request):
                if emission.tokens:
                    stream.tokens += emission.tokens
                    stream.arrivals_s.append(time.monotonic())
        except EesdError as error:
            stream.error = str(error)

    async def contacts(self) -> "list[Contacts]":
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            found: list[Contacts] = await self._pipelines.broadcast("contacts").results_async()
        return sorted(found, key=lambda each: each.pipeline)

    async def close(self, pipeline: str) -> None:
        """Drains the pipeline: no stream goes there."""
        await asyncio.to_thread(self._operator.drain, pipeline)
        await self._until_usable(1)

    async def open(self, pipeline: str) -> None:
        await asyncio.to_thread(self._operator.undrain, pipeline)
        await self._until_usable(2)

    async def _until_usable(self, count: int) -> None:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while self._load_balancer.num_usable != count:  # noqa: ASYNC110  # in other processes
                await asyncio.sleep(0.05)


async def _move_once(clients: _Clients, requests: Sequence[Request], *, how: "How") -> _Migration:
    from serve_app.pipeline.kv_migration import migrate

    source, target = await clients.contacts()
    await clients.close(target.pipeline)
    streams, tasks = _started(clients, requests)
    async with asyncio.timeout(_START_TIMEOUT_S):
        while any(len(stream.tokens) < _TOKENS_BEFORE for stream in streams):
            if any(task.done() for task in tasks):
                raise EngineError("a stream ended before it was migrated: give --tokens more")
            await asyncio.sleep(0.01)
    await clients.open(target.pipeline)
    began_s = time.monotonic()
    report = await migrate(source, target, how=how)
    await asyncio.gather(*tasks)
    undisturbed, tasks = _started(clients, [_renamed(request) for request in requests])
    await asyncio.gather(*tasks)
    return _Migration(
        report=report,
        pause_of_s={s.request.request_id: s.longest_wait_s(since_s=began_s) for s in streams},
        undisturbed_s=tuple(stream.longest_wait_s(since_s=0.0) for stream in undisturbed),
        num_broken=sum(stream.error is not None for stream in streams),
        num_changed=sum(
            stream.error is None and stream.tokens != right.tokens
            for stream, right in zip(streams, undisturbed, strict=True)
        ),
    )


def _started(
    clients: _Clients, requests: Sequence[Request]
) -> "tuple[list[_Stream], list[asyncio.Task[None]]]":
    streams = [_Stream(request=request, tokens=[], arrivals_s=[]) for request in requests]
    return streams, [asyncio.ensure_future(clients.follow(stream)) for stream in streams]


def _requests(options: MigrationOptions, *, vocab_size: int, tag: str) -> list[Request]:
    """Returns requests with prompts that are in no cache; equal seeds give equal requests."""
    rng = Random(f"{options.seed} {tag}")
    return [
        Request(
            request_id=RequestId(f"{tag}-{i}"),
            prompt=tuple(
                TokenId(rng.randrange(3, vocab_size)) for _ in range(options.prompt_tokens)
            ),
            sampling=SamplingParams(temperature=0.8, seed=i, max_tokens=options.tokens),
        )
        for i in range(options.requests)
    ]


def _renamed(request: Request) -> Request:
    return Request(
        request_id=RequestId(f"{request.request_id} undisturbed"),
        prompt=request.prompt,
        sampling=request.sampling,
    )


async def _measure(
    config: ServiceConfig, options: MigrationOptions, *, vocab_size: int, say: Say
) -> "dict[How, list[_Migration]]":
    clients = _Clients(config)
    await clients.ready()
    found: dict[How, list[_Migration]] = {"pages": [], "recompute": []}
    orders: tuple[tuple[How, How], ...] = (("pages", "recompute"), ("recompute", "pages"))
    for repeat in range(options.repeats):
        for how in orders[repeat % 2]:
            tag = f"{how}-{repeat}"
            requests = _requests(options, vocab_size=vocab_size, tag=tag)
            found[how].append(await _move_once(clients, requests, how=how))
            say(_line(tag, found[how][-1]))
    return found


def _line(tag: str, each: _Migration) -> str:
    report, pauses_s = each.report, tuple(each.pause_of_s.values())
    return (
        f"{tag:<14} {report.num_requests:>3} streams {report.num_pages:>5} pages "
        f"{report.num_bytes / 2**20:>7.1f} MiB copied in {report.copy_s:>5.2f} s, pause p50 "
        f"{_quantile(pauses_s, 0.5):>5.2f} s, p95 {_quantile(pauses_s, 0.95):>5.2f} s"
        f"{'; ' + report.reason if report.reason and report.how != 'recomputed' else ''}"
    )


def _summary(migrations: Sequence[_Migration]) -> dict[str, object]:
    pauses_s = [pause for each in migrations for pause in each.pause_of_s.values()]
    undisturbed_s = [wait for each in migrations for wait in each.undisturbed_s]
    num_bytes = sum(each.report.num_bytes for each in migrations)
    copy_s = sum(each.report.copy_s for each in migrations)
    return {
        "migrations": len(migrations),
        "streams": len(pauses_s),
        "broken": sum(each.num_broken for each in migrations),
        "changed": sum(each.num_changed for each in migrations),
        "pause_p50_s": _quantile(pauses_s, 0.5),
        "pause_p95_s": _quantile(pauses_s, 0.95),
        "undisturbed_wait_p50_s": _quantile(undisturbed_s, 0.5),
        "undisturbed_wait_p95_s": _quantile(undisturbed_s, 0.95),
        "pages": sum(each.report.num_pages for each in migrations),
        "bytes": num_bytes,
        "copy_s": copy_s,
        "seconds": sum(each.report.seconds for each in migrations),
        "order": [[_stream_row(move, each) for move in each.report.streams] for each in migrations],
        "how": sorted({each.report.how for each in migrations}),
        "reasons": sorted({each.report.reason for each in migrations if each.report.reason}),
    }


def _stream_row(move: "StreamMove", migration: _Migration) -> dict[str, object]:
    return {
        "request": move.request_id,
        "pages": move.num_pages,
        "found": move.num_found,
        "bytes": move.num_bytes,
        "copy_s": move.copy_s,
        "pause_s": migration.pause_of_s[move.request_id],
    }


def _quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that `share` of the values do not exceed; 0 if there is none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _service(options: MigrationOptions) -> tuple[ServiceConfig, int]:
    """Two pipelines that hold all streams twice over, and the size of their vocabulary."""
    longest = options.prompt_tokens + options.tokens
    num_pages = 2 * options.requests * (-(-longest // _PAGE_SIZE) + 1) + 8
    engine = EngineConfig(
        model=ModelConfig(path=options.model),
        cache=CacheConfig(num_pages=num_pages, page_size=_PAGE_SIZE),
        parallel=ParallelConfig(verify_tensor_parallel_size=options.verify_tp),
        speculation=SpeculationConfig(max_draft_tokens=4),
    )
    layout = layout_of(engine)
    if longest > layout.max_model_len:
        raise ConfigError(
            f"--prompt-tokens {options.prompt_tokens} and --tokens {options.tokens} are {longest} "
            f"together, and this model's texts end at {layout.max_model_len}: give less"
        )
    config = ServiceConfig(engine=engine, pipelines=PipelinesConfig(min_count=2, max_count=2))
    return config, layout.spec.vocab_size


def main(options: MigrationOptions) -> int:
    say = say_unless(options.json)
    config, vocab_size = _service(options)
    prepare_for_local_ray()
    from ray import serve

    from serve_app.app import build_app
    from serve_app.session.local_ray import local_ray

    provenance = collect_provenance(seed=options.seed)
    for line in provenance.lines():
        say(line)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with local_ray(config, shows_logs=False):
        serve.start(proxy_location="Disabled")
        try:
            serve.run(build_app(config), name=config.app_name, route_prefix=None)
            found = asyncio.run(_measure(config, options, vocab_size=vocab_size, say=say))
        finally:
            serve.shutdown()
    summary = {how: _summary(migrations) for how, migrations in found.items()}
    report = {
        "bench": "migration",
        "summary": summary,
        "setting": {
            name: getattr(options, name)
            for name in ("requests", "prompt_tokens", "tokens", "repeats", "verify_tp", "seed")
        },
        "provenance": provenance.as_json(),
    }
    print_report(report)
    return int(any(each["broken"] or each["changed"] for each in summary.values()))
