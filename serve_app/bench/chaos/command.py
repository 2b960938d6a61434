"""`eesd bench chaos`: breaks processes and links of a service and compares its streams."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from eesd_dist.bench.load_client import read_bodies
from eesd_dist.bench.output import print_report, say_unless
from eesd_dist.errors import ConfigError
from serve_app.bench.chaos.faults import FAULT_KINDS, PlannedFault, fault_named
from serve_app.bench.chaos.report import complaints, rows_of, summarise, table
from serve_app.bench.chaos.schedule import bodies_of, schedule
from serve_app.bench.chaos.threads import why_untraceable
from serve_app.bench.options import ChaosOptions
from serve_app.config import ServiceConfig, service_config
from serve_app.service.environment import prepare_for_cluster, prepare_for_local_ray
from serve_app.service.settings import apply_settings

_REQUESTS = 200
_QUICK_REQUESTS = 40
_FINDING_OUT_S = 30.0
"""Longest time beyond the deadline until a process that hangs is replaced."""


def main(options: ChaosOptions) -> int:
    if (options.link_down is None) != (options.link_up is None):
        raise ConfigError("--link-down and --link-up: give both, or neither")
    config = config_of(options)
    kinds, left_out = possible_kinds(options.kinds)
    if options.address is None:
        prepare_for_local_ray()
    else:
        prepare_for_cluster()
    report = _run(config, options, kinds, left_out)
    print_report(report, seed=options.seed)
    return 1 if complaints(report) else 0


def possible_kinds(requested: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Returns the kinds to inject, and why others are left out. Raises ConfigError for a
    requested kind that is unknown or impossible on this machine."""
    kinds = tuple(requested or FAULT_KINDS)
    traced = [kind for kind in kinds if fault_named(kind).needs_tracing]
    why = why_untraceable() if traced else ""
    if why and requested:
        raise ConfigError(f"found fault kind {traced[0]!r}, which needs ptrace: {why}")
    if not why:
        return kinds, []
    return tuple(k for k in kinds if k not in traced), [f"{kind}: {why}" for kind in traced]


def config_of(options: ChaosOptions) -> ServiceConfig:
    """Returns the service under test, with the defaults that a service has."""
    host = "127.0.0.1" if options.address is None else options.address.rpartition(":")[0]
    tree: dict[str, Any] = {
        "engine": {
            "model": {"path": str(options.model)},
            "parallel": {
                "verify_tensor_parallel_size": options.verify_tp,
                "timeout_s": options.deadline_s,
            },
        },
        "host": host,
        "port": options.port or free_port(host),
        "pipelines": {"min_count": options.pipelines, "max_count": options.pipelines},
    }
    apply_settings(tree, options.set)
    return service_config(tree)


def _run(
    config: ServiceConfig, options: ChaosOptions, kinds: Sequence[str], left_out: Sequence[str]
) -> dict[str, Any]:
    from serve_app.bench.chaos.reach import (  # Ray reads the environment
        SignalsByCommand,
        SignalsOverRay,
    )
    from serve_app.bench.chaos.run import FaultInjector, LinkCommands, ServiceUnderTest, compared
    from serve_app.service.serving import served

    links = (
        LinkCommands(down=options.link_down, up=options.link_up, cut_s=options.cut_s)
        if options.link_down is not None and options.link_up is not None
        else None
    )
    say = say_unless(options.json)
    say(f"starting {config.served_model_name} ...")
    with served(config, address=options.address):
        injector = FaultInjector(
            ServiceUnderTest(config),
            signals=SignalsOverRay() if options.kill is None else SignalsByCommand(options.kill),
            links=links,
            patience_s=options.deadline_s + _FINDING_OUT_S,
        )
        undisturbed, disturbed = asyncio.run(
            compared(
                f"http://{config.host}:{config.port}",
                _bodies(options, model=config.served_model_name),
                concurrency=options.concurrency,
                injector=injector,
                plan=_plan(options, kinds),
                say=say,
            )
        )
    injected = injector.injected
    report = summarise(undisturbed, disturbed, injected.faults, injected.noticed)
    setting = {
        key: option for key, option in asdict(options).items() if not isinstance(option, Path)
    }
    report |= {
        "seed": options.seed,
        "setting": setting | {"kinds": kinds},
        "faults": rows_of(injected.faults, disturbed, injected.noticed),
        "recovery": config.recovery.model_dump(mode="json"),
        "interruptions_undisturbed": injected.interruptions_before,
        "unnoticed": injected.unnoticed,
        "missed": injected.missed,
        "left_out": left_out,
        "ended_early": injected.ended_early,
    }
    say(table(report))
    return report


def _bodies(options: ChaosOptions, *, model: str) -> list[dict[str, object]]:
    return bodies_of(
        read_bodies(options.prompts),
        model=model,
        num=options.requests or (_QUICK_REQUESTS if options.quick else _REQUESTS),
        seed=options.seed,
        max_tokens=options.max_tokens,
    )


def _plan(options: ChaosOptions, kinds: Sequence[str]) -> Iterator[PlannedFault]:
    plan = schedule(
        seed=options.seed, kinds=kinds, mean_gap_s=options.gap_s, at_once=options.at_once
    )
    return islice(plan, options.kills)


def free_port(host: str) -> int:
    """Returns a TCP port that nothing has bound. Raises ConfigError for another machine's host."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"no port on {host}: {error.strerror}; run this where the cluster's head runs"
            ) from error
        port: int = probe.getsockname()[1]
        return port
