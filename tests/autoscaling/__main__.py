"""A load rises and falls, and pipelines and nodes follow.

    python -m tests.autoscaling [options]

A service from zero to two pipelines on a cluster of this machine with nodes that come and go. Every
text is compared with plain decoding in one process.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.command_line import run_command
from eesd_dist.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import EesdError, EngineError
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from serve_app.config import PipelinesConfig, ServiceConfig
from serve_app.placement_config import PlacementConfig
from serve_app.service.environment import prepare_for_local_ray
from tests.autoscaling.load import Clients, Prompt, Texts
from tests.autoscaling.timeline import PhaseEnd, Sample, Timeline

if TYPE_CHECKING:  # these import Ray, which reads the environment then
    from serve_app.ingress.load_balancing import LoadBalancer
    from serve_app.ingress.pipeline_client import ServiceClient

_PERIOD_S = 0.25
_TURN_S = 1.0
_NUM_PROMPTS = 8
_MOST = 2
_LOW, _HIGH = 2, 8
_NOISE = (5, 6, 7, 6)
_LONG = 4
"""Every second text is so many times as long: some streams are live whenever a pipeline leaves."""
_TARGET = 4.0
_NODE_CPUS = 2.0

Reached = Callable[[Sample], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Pipelines and nodes that follow a load.

    A service of at most two pipelines runs on a cluster of this machine, with nodes added and
    removed by Ray's autoscaler, one for each pipeline. The load begins with two streams while there
    is no pipeline, rises to eight, varies by 17 % up and down, falls to two, ends, and begins
    again; each phase lasts until the fleet has followed it. Every text is compared with plain
    decoding in one process. Exit status 1 when a stream was broken or changed, when the number of
    pipelines was changed under noise, and when the fleet did not follow in time.
    """

    model: Annotated[Path, "folder of the target model (the bundled one)"] = BUNDLED_MODEL
    tokens: Annotated[int, "length of every second text; the others are four times as long"] = 96
    hold_s: Annotated[float, "seconds that a phase goes on after the fleet has followed"] = 5.0
    noise_s: Annotated[float, "seconds of the load that varies"] = 30.0
    idle_s: Annotated[float, "seconds without work after which a node goes"] = 5.0
    timeout_s: Annotated[float, "longest wait for the fleet to follow, and for the last texts"] = (
        180.0
    )
    seed: Annotated[int, "of the prompts"] = 0
    quick: Annotated[bool, "without the second start from zero"] = False
    json: Annotated[bool, "print only the last line, one JSON object"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """Part of the load: so many streams, in turns, until the fleet has answered to it."""

    name: str
    clients: tuple[int, ...]
    reached: Reached
    hold_s: float = 0.0
    """Goes on for so long after that."""


def _phases(options: Options) -> list[_Phase]:
    def one(sample: Sample) -> bool:
        return sample.ready == sample.count == sample.nodes == 1

    def two(sample: Sample) -> bool:
        return sample.ready == 2 and sample.nodes == 2

    def none(sample: Sample) -> bool:
        return sample.count == sample.nodes == 0

    hold_s = options.hold_s
    second_start = _Phase(name="from zero again", clients=(_LOW,), reached=one, hold_s=hold_s)
    return [
        _Phase(name="from zero", clients=(_LOW,), reached=one, hold_s=hold_s),
        _Phase(name="rise", clients=(_HIGH,), reached=two, hold_s=hold_s),
        _Phase(name="noise", clients=_NOISE, reached=two, hold_s=options.noise_s),
        _Phase(name="fall", clients=(_LOW,), reached=one, hold_s=hold_s),
        _Phase(name="to zero", clients=(0,), reached=none, hold_s=hold_s),
        *(() if options.quick else (second_start,)),
    ]


def _service(options: Options) -> ServiceConfig:
    from tests.autoscaling.nodes import HEAD_RESOURCE

    engine = EngineConfig(
        model=ModelConfig(path=options.model),
        cache=CacheConfig(num_pages=1024),
        scheduler=SchedulerConfig(max_running=2 * _HIGH),
    )
    slot = {"num_cpus": _NODE_CPUS / 2}
    return ServiceConfig(
        engine=engine,
        pipelines=PipelinesConfig(
            min_count=0,
            max_count=_MOST,
            target_live_requests=_TARGET,
            # The pipelines of this cluster share the cores of one machine.
            target_utilisation=1.0,
            up_delay_s=2.0,
            down_delay_s=8.0,
            idle_delay_s=6.0,
        ),
        placement=PlacementConfig.model_validate(
            {
                "strategy": "STRICT_PACK",
                "draft": slot,
                "verify": slot,
                "front": {HEAD_RESOURCE: 0.001},
            }
        ),
    )


def _prompts(config: ServiceConfig, options: Options) -> list[Prompt]:
    """Returns requests, with the texts that plain decoding makes of them in this process."""
    rng = Random(options.seed)
    vocab_size = layout_of(config.engine).spec.vocab_size
    lengths = [options.tokens * (_LONG if i % 2 else 1) for i in range(_NUM_PROMPTS)]
    requests = [
        Request(
            request_id=RequestId(f"plain-{i}"),
            prompt=tuple(TokenId(rng.randrange(3, vocab_size)) for _ in range(24)),
            sampling=SamplingParams(temperature=0.8, seed=i, max_tokens=length, min_tokens=length),
            speculation=SpeculationParams(mode="off"),
        )
        for i, length in enumerate(lengths)
    ]
    engine = LocalEngine(config.engine)
    try:
        texts = engine.generate(requests)
    finally:
        engine.close()
    return [
        Prompt(tokens=request.prompt, sampling=request.sampling, text=tuple(text.tokens))
        for request, text in zip(requests, texts, strict=True)
    ]


def _client(config: ServiceConfig) -> "tuple[ServiceClient, LoadBalancer, Any]":
    from ray import serve

    from serve_app.ingress.load_balancing import LoadBalancer
    from serve_app.ingress.pipeline_client import ServiceClient
    from serve_app.router.actor import router_handle

    pipelines = serve.get_deployment_handle("Pipeline", config.app_name)
    balancer = LoadBalancer(config, pipelines=pipelines, ingress="bench")
    balancer.start()
    client = ServiceClient(pipelines, config=config, tracing=Tracing(), load_balancer=balancer)
    return client, balancer, router_handle(config)


async def _watch(timeline: Timeline, clients: Clients, router: Any, *, app: str) -> None:
    from serve_app.router.calls import fleet_of
    from tests.autoscaling.nodes import num_nodes

    while True:
        try:
            state = await fleet_of(router, app=app)
        except EesdError:  # it answers late on a busy machine
            state = None
        if state is not None:
            nodes = await asyncio.to_thread(num_nodes)
            timeline.note(state, num_clients=clients.num_live, nodes=nodes)
        await asyncio.sleep(_PERIOD_S)


def _require_running(watch: "asyncio.Task[None]") -> None:
    """Raises the error of a watch that has failed."""
    if watch.done():
        watch.result()


async def _run_phase(
    phase: _Phase,
    timeline: Timeline,
    clients: Clients,
    *,
    watch: "asyncio.Task[None]",
    timeout_s: float,
) -> None:
    began_s = timeline.clock()
    reached_s: float | None = None
    number = 0
    while reached_s is None or timeline.clock() - reached_s < phase.hold_s:
        clients.keep(phase.clients[number % len(phase.clients)])
        number += 1
        await asyncio.wait({watch}, timeout=_TURN_S)
        _require_running(watch)
        if reached_s is None and timeline.samples and phase.reached(timeline.last):
            reached_s = timeline.clock()
        if reached_s is None and timeline.clock() - began_s > timeout_s:
            seen = timeline.last if timeline.samples else "no sample"
            raise EngineError(f"phase {phase.name!r} not answered within {timeout_s:g} s: {seen}")
    timeline.phases.append(PhaseEnd(name=phase.name, began_s=began_s, ended_s=timeline.clock()))


async def _measure(
    config: ServiceConfig, prompts: Sequence[Prompt], options: Options, *, say: Say
) -> tuple[Timeline, Texts]:
    client, balancer, router = _client(config)
    began_s = time.monotonic()
    timeline = Timeline(clock=lambda: time.monotonic() - began_s)
    clients = Clients(client, prompts)
    watch = asyncio.create_task(_watch(timeline, clients, router, app=config.app_name))
    try:
        async with asyncio.timeout(options.timeout_s):
            while not timeline.samples:  # of the service before the load
                await asyncio.wait({watch}, timeout=_TURN_S)
                _require_running(watch)
        for phase in _phases(options):
            await _run_phase(phase, timeline, clients, watch=watch, timeout_s=options.timeout_s)
            say(_line(phase.name, timeline))
        await clients.end(timeout_s=options.timeout_s)
        _require_running(watch)
    finally:
        watch.cancel()
    return timeline, replace(clients.texts, num_migrated=_num_migrated(balancer.page()))


def _num_migrated(page: bytes) -> int:
    families = text_string_to_metric_families(page.decode())
    name = "eesd_router_migrations_total"
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return int(sum(sample.value for sample in samples))


def _line(name: str, timeline: Timeline) -> str:
    last = timeline.last
    reasons = (
        "; ".join(decision.reason for decision in timeline.decisions_in(name)) or "no decision"
    )
    return (
        f"{last.at_s:6.1f} s  {name:<16} pipelines {last.ready} of {last.count}, nodes "
        f"{last.nodes}: {reasons}"
    )


def _num_flaps(timeline: Timeline) -> int:
    """Returns the decisions under noise: any of them would be one too many."""
    return len(timeline.decisions_in("noise"))


def main(options: Options) -> int:
    say = say_unless(options.json)
    prepare_for_local_ray()
    from tests.autoscaling.nodes import ENVIRONMENT, fake_nodes

    os.environ.update(ENVIRONMENT)
    from ray import serve

    from serve_app.app import build_app

    config = _service(options)
    prompts = _prompts(config, options)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with fake_nodes(cpus=_NODE_CPUS, max_nodes=_MOST + 1, idle_s=options.idle_s):
        serve.start(proxy_location="Disabled")
        serve.run(build_app(config), name=config.app_name, route_prefix=None)
        timeline, texts = asyncio.run(_measure(config, prompts, options, say=say))
    report = {
        "bench": "autoscaling",
        "summary": {
            "streams": texts.num_whole,
            "broken": texts.broken,
            "changed": texts.changed,
            "migrated": texts.num_migrated,
            "decisions_under_noise": _num_flaps(timeline),
            "longest_first_token_s": round(texts.longest_first_token_s, 2),
        },
        "timeline": timeline.as_json(),
        "targets": config.pipelines.model_dump(mode="json"),
    }
    print_report(report, seed=options.seed)
    return int(bool(texts.broken or texts.changed or _num_flaps(timeline)))


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], program="python -m tests.autoscaling"))
