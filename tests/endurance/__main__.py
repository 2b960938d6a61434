"""Loads a service for many minutes and reports what grows.

python -m tests.endurance [--minutes 20] [options]
"""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from eesd_dist.bench.load_client import read_bodies
from eesd_dist.bench.options import SHIPPED_PROMPTS
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.command_line import run_command
from serve_app.bench.chaos.command import config_of
from serve_app.bench.chaos.schedule import bodies_of, schedule
from serve_app.bench.options import ChaosOptions
from serve_app.config import ServiceConfig
from serve_app.service.environment import prepare_for_local_ray
from tests.endurance.report import (
    Outcome,
    Reading,
    complaints,
    figures_of,
    growth_in_ray,
    table,
)

if TYPE_CHECKING:  # these import Ray, which reads the environment then
    from serve_app.bench.chaos.run import FaultInjector
    from tests.endurance.load import Load
    from tests.endurance.run import Readings

_KINDS = ("verify rank", "drafting actor", "pipeline", "router")
_PATIENCE_S = 50.0
"""The deadline of a hanging process, and thirty seconds."""
_NUM_CHOICES = 3
_NUM_BODIES_WITH_CHOICES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Finds what grows while a service is busy.

    A real service is started on this machine. Clients stream, leave in the middle of streams (15 %
    of the requests), ask for three choices and send bad requests, while a seeded schedule kills
    verify ranks, drafting actors, pipeline replicas and the router; every answer is compared with
    that of the same request before. Memory, file handles, sockets and threads of every role of
    process, /dev/shm, actors and processes are read every two seconds, and the KV pages in use
    whenever the clients pause, every thirty.

    After the warm-up each figure gets a slope with a 95 % confidence interval that allows for
    correlated noise (`slopes`); a replaced process starts at another level and does not count until
    it is --settle-s old. A figure passes if its interval contains zero or lies below 1 MiB (memory)
    or 4 (counts) in an hour.

    Exit status 1 when a figure grows, an answer is wrong, pages are in use without a request, or a
    fault was not recovered from. What grows in processes without code of this project (Serve's
    controller, raylet, GCS, Ray's agents and log monitor) is reported apart.
    """

    minutes: Annotated[float, "of load, of which a quarter is the warm-up"] = 20.0
    settle_s: Annotated[float, "age from which on a process counts"] = 60.0
    seed: Annotated[int, "of requests and schedule"] = 0
    requests: Annotated[int, "different streamed requests"] = 24
    max_tokens: Annotated[int, "of the longest requests"] = 192
    concurrency: Annotated[int, "requests at the same time"] = 8
    gap_s: Annotated[float, "mean time between recovery and the next fault"] = 60.0
    readings: Annotated[Path | None, "file for all readings, as JSON lines"] = None
    json: Annotated[bool, "print only the last line, one JSON object"] = False

    @property
    def run_s(self) -> float:
        return 60.0 * self.minutes

    @property
    def warmup_s(self) -> float:
        return self.run_s / 4.0


def main(options: Options) -> int:
    prepare_for_local_ray()
    say = say_unless(options.json)
    config = config_of(ChaosOptions())
    readings, load, injector = _run(config, options, say)
    injected = injector.injected
    outcome = Outcome(
        figures=figures_of(
            readings.busy, readings.idle, warmup_s=options.warmup_s, settle_s=options.settle_s
        ),
        idle=readings.idle,
        answers=load.answers,
        unnoticed=injected.unnoticed,
        ended_early=injected.ended_early,
    )
    faults = Counter(fault.kind for fault in injected.faults)
    say(table(outcome, faults))
    if options.readings is not None:
        _write(options.readings, readings.busy)
    problems = complaints(outcome)
    print_report(
        {
            "passed": not problems,
            "complaints": problems,
            "growth_in_ray": growth_in_ray(outcome),
            "figures": [figure.as_json() for figure in outcome.figures],
            "idle_pages_in_use": [reading.pages_in_use for reading in readings.idle],
            "requests": dict(load.answers.counts),
            "tokens": load.answers.num_tokens,
            "wrong": dict(load.answers.wrong),
            "wrong_examples": load.answers.examples,
            "faults": dict(faults),
            "missed": injected.missed,
            "setting": _setting(options),
        },
        seed=options.seed,
    )
    return 1 if problems else 0


def _run(
    config: ServiceConfig, options: Options, say: Say
) -> "tuple[Readings, Load, FaultInjector]":
    from serve_app.bench.chaos.reach import SignalsOverRay  # Ray reads the environment
    from serve_app.bench.chaos.run import FaultInjector, ServiceUnderTest
    from serve_app.service.serving import served
    from tests.endurance.load import Load, not_streamed
    from tests.endurance.run import ServiceReader, endured, references_of

    url = f"http://{config.host}:{config.port}"
    bodies = bodies_of(
        read_bodies(SHIPPED_PROMPTS),
        model=config.served_model_name,
        num=options.requests,
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    choices = [not_streamed(body, n=_NUM_CHOICES) for body in bodies[:_NUM_BODIES_WITH_CHOICES]]
    plan = schedule(seed=options.seed, kinds=_KINDS, mean_gap_s=options.gap_s, at_once=0.0)

    async def run() -> "tuple[Readings, Load, FaultInjector]":
        say(f"{len(bodies)} requests, undisturbed ...")
        references = await references_of(url, bodies, choices, concurrency=options.concurrency)
        load = Load(url, references, concurrency=options.concurrency, seed=options.seed)
        injector = FaultInjector(
            ServiceUnderTest(config),
            signals=SignalsOverRay(),
            links=None,
            patience_s=_PATIENCE_S,
        )
        readings = await endured(
            load,
            ServiceReader(config.app_name),
            injector=injector,
            plan=plan,
            run_s=options.run_s,
            say=say,
        )
        return readings, load, injector

    say(f"starting {config.served_model_name} ...")
    with served(config, address=None):
        return asyncio.run(run())


def _setting(options: Options) -> dict[str, object]:
    setting = {
        key: option for key, option in asdict(options).items() if not isinstance(option, Path)
    }
    return setting | {"run_s": options.run_s, "warmup_s": options.warmup_s}


def _write(path: Path, readings: list[Reading]) -> None:
    path.write_text("".join(json.dumps(_row(reading)) + "\n" for reading in readings))


def _row(reading: Reading) -> dict[str, Any]:
    processes = [
        {"pid": pid.number, "started_unix_s": pid.started_s, **asdict(held)}
        for pid, held in reading.processes.items()
    ]
    return {**asdict(reading), "processes": processes}


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], program="python -m tests.endurance"))
