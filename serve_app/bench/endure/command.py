"""`eesd bench endure`: loads a service for many minutes and reports what grows."""

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eesd_dist.bench.online import read_bodies
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.errors import ConfigError
from eesd_dist.provenance import collect_provenance
from serve_app.bench.chaos.command import config_of
from serve_app.bench.chaos.faults import fault_named
from serve_app.bench.chaos.schedule import bodies_of, schedule
from serve_app.bench.endure.report import (
    Outcome,
    Reading,
    complaints,
    figures_of,
    growth_in_ray,
    table,
)
from serve_app.bench.options import ChaosOptions, EndureOptions
from serve_app.config import ServiceConfig
from serve_app.session.environment import prepare_for_local_ray

if TYPE_CHECKING:  # these import Ray, which reads the environment then
    from serve_app.bench.chaos.run import FaultInjector
    from serve_app.bench.endure.load import Load
    from serve_app.bench.endure.run import Readings

_PATIENCE_S = 50.0
"""The deadline of a hanging process, and thirty seconds."""
_NUM_CHOICES = 3
_NUM_BODIES_WITH_CHOICES = 6


def main(options: EndureOptions) -> int:
    if options.warmup_s >= options.run_s:
        raise ConfigError(
            f"--warmup: found {options.warmup_s / 60:g} minutes, expected less than the "
            f"{options.run_s / 60:g} of the run"
        )
    for kind in options.kinds:
        fault_named(kind)
    prepare_for_local_ray()
    say = say_unless(options.json)
    config = config_of(
        ChaosOptions(
            model=options.model,
            verify_tp=options.verify_tp,
            pipelines=options.pipelines,
            port=options.port,
            set=options.set,
        )
    )
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
            "provenance": collect_provenance(seed=options.seed).as_json(),
        }
    )
    return 1 if problems else 0


def _run(
    config: ServiceConfig, options: EndureOptions, say: Say
) -> "tuple[Readings, Load, FaultInjector]":
    from serve_app.bench.chaos.reach import SignalsOverRay  # Ray reads the environment
    from serve_app.bench.chaos.run import FaultInjector, ServiceUnderTest
    from serve_app.bench.endure.load import Load, not_streamed
    from serve_app.bench.endure.run import ServiceReader, endured, references_of
    from serve_app.operations.serving import served

    url = f"http://{config.host}:{config.port}"
    bodies = bodies_of(
        read_bodies(options.prompts),
        model=config.served_model_name,
        num=options.requests,
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    choices = [not_streamed(body, n=_NUM_CHOICES) for body in bodies[:_NUM_BODIES_WITH_CHOICES]]
    plan = schedule(seed=options.seed, kinds=options.kinds, mean_gap_s=options.gap_s, at_once=0.0)

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


def _setting(options: EndureOptions) -> dict[str, object]:
    setting = {key: each for key, each in asdict(options).items() if not isinstance(each, Path)}
    return setting | {"run_s": options.run_s, "warmup_s": options.warmup_s}


def _write(path: Path, readings: list[Reading]) -> None:
    path.write_text("".join(json.dumps(_row(reading)) + "\n" for reading in readings))


def _row(reading: Reading) -> dict[str, Any]:
    processes = [
        {"pid": pid.number, "started_unix_s": pid.started_s, **asdict(held)}
        for pid, held in reading.processes.items()
    ]
    return {**asdict(reading), "processes": processes}
