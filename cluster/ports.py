"""The TCP ports of a cluster: the numbers that our cluster files use, and those that a file sets.

Ray chooses most of its ports at random unless they are given, and a firewall can open fixed ports
only. Connections between ranks (links, NCCL, rendezvous) use ephemeral ports of the system.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from eesd_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPorts:
    """The listed ports. Every node has its own, except those of the head alone."""

    gcs: int = 6379
    """Head: the control service of Ray, which every node connects to."""
    dashboard: int = 8265
    """Head: dashboard and REST API (`serve deploy`, `ray job`)."""
    ray_client: int = 10001
    """Head: `ray.init("ray://...")`."""
    node_manager: int = 6380
    runtime_env_agent: int = 6381
    """Used within a node only."""
    object_manager: int = 8076
    metrics_export: int = 8090
    """Read by Prometheus."""
    dashboard_agent: int = 52365
    min_worker: int = 20000
    """First port of Ray's worker processes, which call each other on all nodes."""
    max_worker: int = 20999
    serve_http: int = 8000
    """Nodes with an HTTP proxy of Serve."""


_FLAGS = {
    "port": "gcs",
    "dashboard-port": "dashboard",
    "ray-client-server-port": "ray_client",
    "node-manager-port": "node_manager",
    "runtime-env-agent-port": "runtime_env_agent",
    "object-manager-port": "object_manager",
    "metrics-export-port": "metrics_export",
    "dashboard-agent-listen-port": "dashboard_agent",
    "min-worker-port": "min_worker",
    "max-worker-port": "max_worker",
}
"""Options of `ray start`, and `rayStartParams` of KubeRay."""
_RAY_START = re.compile(r"\bray\s+start\b(?P<rest>.*)")
_PART = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|[^;&|\n])+""")


def parts_of(command: str) -> list[str]:
    """Returns what stands between `;`, `&`, `|` and line breaks outside of quotes."""
    return _PART.findall(command)


def start_parameters(commands: Iterable[str]) -> list[dict[str, str]]:
    """Returns the options of each `ray start` in shell commands, without their dashes.

    Raises ConfigError for a quote without an end.
    """
    segments = [segment for command in commands for segment in parts_of(" ".join(command.split()))]
    starts = [match["rest"] for segment in segments if (match := _RAY_START.search(segment))]
    return [dict(_options(_words(tail))) for tail in starts]


def ports_of(parameters: Iterable[Mapping[str, str]]) -> ClusterPorts:
    """Returns the ports that these starts set, with our numbers for the others.

    Raises ConfigError if two starts set different numbers, or one is no port.
    """
    ports: dict[str, int] = {}
    for options in parameters:
        for flag, name in _FLAGS.items():
            if flag in options:
                number = _port(flag, options[flag])
                if ports.setdefault(name, number) != number:
                    raise ConfigError(
                        f"--{flag} is {ports[name]} in one start command and {number} in another: "
                        "use one number, so that one firewall rule covers all nodes"
                    )
    return replace(ClusterPorts(), **ports)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"ray start{text}: {error}: close the quote") from error


def _options(words: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yields `--name=value` and `--name value`."""
    name = ""
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            if sign:
                yield name, value
                name = ""
        elif name:
            yield name, word
            name = ""


def _port(flag: str, value: str) -> int:
    if not value.isdigit() or not 1 <= int(value) <= 65535:
        raise ConfigError(f"--{flag} is {value!r}: expected a port, 1 to 65535")
    return int(value)
