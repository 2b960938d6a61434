"""Reads `ray up` files: nodes, start commands and their environment.

Checks each file against Ray's schema, with Ray's defaults filled in, and then against a few rules
that Ray does not check. Starts nothing, and does not depend on the machine it runs on.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

import click
import jsonschema
import yaml

from cluster.ports import parts_of
from cluster.ray_compat import prepared_cluster_config
from eesd_dist.errors import ConfigError

AuthMode = Literal["token", "disabled"]

HEALTH_FLAGS = (
    "RAY_health_check_period_ms",
    "RAY_health_check_timeout_ms",
    "RAY_health_check_failure_threshold",
)
"""Set on the head. With Ray's defaults a cut link is detected after 65 s."""


class _Provider(TypedDict):
    type: str


class _NodeEntry(TypedDict):
    resources: dict[str, int]
    min_workers: NotRequired[int]
    max_workers: NotRequired[int]


class _Prepared(TypedDict):
    """The part of a file that is read after it has passed Ray's schema."""

    cluster_name: str
    provider: _Provider
    head_node_type: str
    available_node_types: dict[str, _NodeEntry]
    max_workers: int
    head_start_ray_commands: list[str]
    worker_start_ray_commands: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """A node type of the autoscaler."""

    name: str
    min_workers: int
    max_workers: int
    resources: tuple[tuple[str, int], ...]
    """Declared ones; empty if Ray detects them (always on premises)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A `ray up` file that has passed all checks."""

    path: Path
    name: str
    provider: str
    head_node_type: str
    node_types: tuple[NodeType, ...]
    max_workers: int
    auth_mode: AuthMode
    head_environment: tuple[tuple[str, str], ...]
    """Variables that the start commands of the head export."""
    worker_environment: tuple[tuple[str, str], ...]


def load_cluster_file(path: Path) -> ClusterFile:
    """Reads and checks one file; raises ConfigError, which names the file."""
    prepared = _prepare(path, read_mapping(path))
    try:
        head = exported(prepared["head_start_ray_commands"])
        worker = exported(prepared["worker_start_ray_commands"])
    except ValueError as error:
        raise ConfigError(f"{path}: a start command has a quote without an end") from error
    _require_health_flags(path, head)
    return ClusterFile(
        path=path,
        name=prepared["cluster_name"],
        provider=prepared["provider"]["type"],
        head_node_type=prepared["head_node_type"],
        node_types=_node_types(prepared),
        max_workers=prepared["max_workers"],
        auth_mode=_auth_mode(path, head=head, worker=worker),
        head_environment=tuple(sorted(head.items())),
        worker_environment=tuple(sorted(worker.items())),
    )


def exported(commands: Iterable[str]) -> dict[str, str]:
    """Returns the variables that `export A=b C=d` sets in shell commands; the last value counts.

    Raises ValueError for a quote without an end.
    """
    variables: dict[str, str] = {}
    for command in commands:
        for segment in parts_of(command):
            words = segment.split(maxsplit=1)
            if len(words) == 2 and words[0] == "export":
                pairs = (word.partition("=") for word in shlex.split(words[1]))
                variables.update({name: value for name, sign, value in pairs if sign})
    return variables


def read_mapping(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that cannot be read or is no mapping."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found {type(content).__name__}, expected a mapping of sections")
    return content


def _prepare(path: Path, content: dict[str, object]) -> _Prepared:
    try:
        prepared = prepared_cluster_config(content)
    except jsonschema.ValidationError as error:
        where = "/".join(str(step) for step in error.absolute_path) or "top level"
        raise ConfigError(f"{path}: {where}: {error.message} (Ray's schema)") from error
    except click.ClickException as error:
        raise ConfigError(f"{path}: {error.message} (Ray's loader)") from error
    except KeyError as error:
        raise ConfigError(f"{path}: refused by Ray: it has no {error}") from error
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path}: refused by Ray: {error}") from error
    return cast(_Prepared, prepared)


def _node_types(prepared: _Prepared) -> tuple[NodeType, ...]:
    return tuple(
        NodeType(
            name=name,
            min_workers=entry.get("min_workers", 0),
            max_workers=entry.get("max_workers", 0),
            resources=tuple(sorted(entry["resources"].items())),
        )
        for name, entry in prepared["available_node_types"].items()
    )


def _auth_mode(path: Path, *, head: Mapping[str, str], worker: Mapping[str, str]) -> AuthMode:
    """Must be set: otherwise `ray start` and `ray.init` choose different modes and fail."""
    modes = {"head": head.get("RAY_AUTH_MODE"), "worker": worker.get("RAY_AUTH_MODE")}
    mode = modes["head"]
    if mode != modes["worker"] or mode not in ("token", "disabled"):
        raise ConfigError(
            f"{path}: RAY_AUTH_MODE is {modes['head']} in head_start_ray_commands and "
            f"{modes['worker']} in worker_start_ray_commands: export `token` or `disabled` in both"
        )
    return "token" if mode == "token" else "disabled"


def _require_health_flags(path: Path, head: Mapping[str, str]) -> None:
    missing = [flag for flag in HEALTH_FLAGS if not head.get(flag, "").isdigit()]
    if missing:
        raise ConfigError(
            f"{path}: head_start_ray_commands does not export {', '.join(missing)}: with Ray's "
            "defaults a cut link is detected after 65 s"
        )
