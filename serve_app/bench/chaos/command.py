"""Streams while processes die, hang and lose their links: is one token lost, twice there, another?

    eesd bench chaos [--quick] [--json]

A real service is started (the bundled model, two verify ranks, unless told otherwise) and asked the
same seeded requests twice over HTTP: undisturbed, and while a seeded schedule kills verify ranks,
drafting actors, the router and pipeline replicas, hangs ranks and cuts connections, some of them
before the one before is mended. Streams are compared token for token. recovery_p50_s and
recovery_p95_s are over kills: seconds from the kill to the next token of the slowest stream that
the struck pipeline had; first_stream_* are those of its quickest. Router kills are counted and in
no recovery time: no stream waits for a router. alone_* leave out kills whose streams waited for
another one's end as well; a kill after which no stream of its pipeline spoke again counts as
infinite. The last line is one JSON object. Exit status 1 when a stream was lost, repeated or
changed, when nothing was killed, when a kill went unnoticed, and when the schedule ended early
because the service was not whole again in time.
"""

import argparse
import asyncio
import json
import math
import socket
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from eesd_dist.bench.online import read_bodies
from eesd_dist.bench.prompts import SHIPPED_PROMPTS
from eesd_dist.errors import ConfigError
from eesd_dist.provenance import collect_provenance
from serve_app.bench.chaos.faults import FAULT_KINDS, PlannedFault
from serve_app.bench.chaos.report import complaints, rows_of, summarise, table
from serve_app.bench.chaos.schedule import bodies_of, schedule
from serve_app.config import BUNDLED_MODEL, ServiceConfig, service_config
from serve_app.session.environment import prepare_for_cluster, prepare_for_local_ray

_REQUESTS = 200
_QUICK_REQUESTS = 40
_FINDING_OUT_S = 30.0
"""How much longer than the deadline it may take until one that hangs is replaced."""
_SETTING = (
    "kinds",
    "gap_s",
    "at_once",
    "concurrency",
    "max_tokens",
    "deadline_s",
    "verify_tp",
    "pipelines",
    "set",
    "address",
    "cut_s",
)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if (options.link_down is None) != (options.link_up is None):
        raise ConfigError("--link-down and --link-up: give both, or neither")
    config = config_of(options)
    if options.address is None:
        prepare_for_local_ray()
    else:
        prepare_for_cluster()
    report = _run(config, options)
    report["provenance"] = collect_provenance(seed=options.seed).as_json()
    sys.stdout.write(json.dumps(_plain(report), allow_nan=False) + "\n")
    return 1 if complaints(report) else 0


def _plain(value: Any) -> Any:
    """JSON has no infinity: a silence without an end is "inf"."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return "inf" if value == math.inf else value


def config_of(options: argparse.Namespace) -> ServiceConfig:
    """The service that is broken: defaults, but a short deadline and patience for many kills."""
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
        "port": options.port or _free_port(host),
        "pipelines": {"min_count": options.pipelines, "max_count": options.pipelines},
        # Whoever kills from outside looks like a request that does, and kills more often than any.
        "recovery": {"max_interruptions": 50, "suspect_after": 5, "stream_pause_s": 120.0},
    }
    for setting in options.set:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: expected KEY=VALUE")
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = yaml.safe_load(value)
    return service_config(tree)


def _run(config: ServiceConfig, options: argparse.Namespace) -> dict[str, Any]:
    from serve_app.bench.chaos.reach import (  # Ray reads the environment
        SignalsByCommand,
        SignalsOverRay,
    )
    from serve_app.bench.chaos.run import FaultInjector, LinkCommands, Service, compared
    from serve_app.operations.serving import served

    links = (
        None
        if options.link_down is None
        else LinkCommands(down=options.link_down, up=options.link_up, cut_s=options.cut_s)
    )

    def say(text: str) -> None:
        if not options.json:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    say(f"starting {config.served_model_name} ...")
    with served(config, address=options.address):
        injector = FaultInjector(
            Service(config),
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
                plan=_plan(options),
                say=say,
            )
        )
    injected = injector.injected
    report = summarise(undisturbed, disturbed, injected.faults)
    report |= {
        "seed": options.seed,
        "setting": {key: getattr(options, key) for key in _SETTING},
        "faults": rows_of(injected.faults, disturbed),
        "recovery": config.recovery.model_dump(mode="json"),
        "interruptions_undisturbed": injected.interruptions_before,
        "unnoticed": injected.unnoticed,
        "missed": injected.missed,
        "ended_early": injected.ended_early,
    }
    say(table(report))
    return report


def _bodies(options: argparse.Namespace, *, model: str) -> list[dict[str, object]]:
    return bodies_of(
        read_bodies(options.prompts),
        model=model,
        num=options.requests or (_QUICK_REQUESTS if options.quick else _REQUESTS),
        seed=options.seed,
        max_tokens=options.max_tokens,
    )


def _plan(options: argparse.Namespace) -> Iterator[PlannedFault]:
    plan = schedule(
        seed=options.seed, kinds=options.kinds, mean_gap_s=options.gap_s, at_once=options.at_once
    )
    return islice(plan, options.kills)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"no port on {host}: {error.strerror}; run this where the cluster's head runs"
            ) from error
        port: int = probe.getsockname()[1]
        return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eesd bench chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{_QUICK_REQUESTS} requests, not {_REQUESTS}")
    add("--json", action="store_true", help="only the last line")
    add("--seed", type=int, default=0, help="of requests and schedule")
    add("--requests", type=_positive, help="another number of them")
    add("--max-tokens", type=_positive, default=192, help="of the longest requests (192)")
    add("--concurrency", type=_positive, default=8, help="streams at the same time (8)")
    add("--prompts", type=Path, default=SHIPPED_PROMPTS)
    add("--kills", type=_positive, help="no more than so many; as long as streams run")
    add(
        "--kinds",
        nargs="+",
        choices=list(FAULT_KINDS),
        default=list(FAULT_KINDS),
        help="what is done (all)",
    )
    add("--gap-s", type=float, default=2.0, help="mean peace between being whole and a kill (2)")
    add("--at-once", type=float, default=0.25, help="share of kills that do not wait (0.25)")
    add("--model", type=Path, default=BUNDLED_MODEL, help="folder of the model (the bundled one)")
    add("--verify-tp", type=_positive, default=2, help="ranks of the verify stage (2)")
    add("--pipelines", type=_positive, default=1, help="how many pipelines serve (1)")
    add("--deadline-s", type=float, default=5.0, help="of every wait between ranks (5)")
    add("--port", type=_positive, help="where the service listens (a free one)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of a service")
    add("--address", help="HOST:PORT of a Ray cluster to join; run this on its head's host")
    add("--kill", metavar="CMD", help="{host} {pid} {signal}; how processes there are signalled")
    add("--link-down", metavar="CMD", help="{host}; cuts its link instead of connections here")
    add("--link-up", metavar="CMD", help="{host}; mends it")
    add("--cut-s", type=float, default=8.0, help="how long a link stays down (8)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text}, expected 1 or more")
    return number
