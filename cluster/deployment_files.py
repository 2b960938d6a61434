"""Reads what a deployment needs from any of our cluster files.

`ray up` files (through `cluster.topology`, with Ray's own checks), KubeRay's RayService, and the
configuration of Serve with our application. A `ray up` file names its Serve file in the command
that deploys it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from cluster.ports import ClusterPorts, ports_of, start_parameters
from cluster.topology import AuthMode, ClusterFile, load_cluster_file, read_mapping
from eesd_dist.errors import ConfigError

_SERVE_DEPLOY = re.compile(r"\bserve\s+deploy\s+(?P<path>[^\s;&|'\"]+)")
_IMPORT_PATH = "serve_app.app:build_app"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """Resources and labels that one rank of a stage needs on its node."""

    name: Literal["draft", "verify"]
    num_gpus: float
    resources: tuple[tuple[str, float], ...]
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """Our application in a Serve configuration."""

    model: Path
    """Folder of the target on every node that has a rank; `~` is the home of that node's user."""
    head: Path | None
    """Folder of the exit head; None: within that of the model."""
    stages: tuple[StageNeeds, ...]
    serve_http_port: int | None
    """None: not in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Contents of a cluster file about nodes, ports, authentication and the application."""

    path: Path
    min_nodes: int
    """Nodes that must exist, the head included."""
    spans_nodes: bool
    """True if there can be more than one."""
    auth_mode: AuthMode | None
    """None: not in the file."""
    ports: ClusterPorts
    lists_ports: bool
    """True if the file gives the ports of Ray."""
    application: Application | None
    """None: the file deploys none, or its Serve file is not on this machine."""


def load_deployment(path: Path) -> Deployment:
    """Reads one file of any kind. Raises ConfigError, which names the file and what is wrong."""
    content = read_mapping(path)
    if content.get("kind") in ("RayService", "RayCluster"):
        return _kuberay(path, content)
    if "applications" in content:
        return _serve(path, content)
    if "cluster_name" in content or "provider" in content:
        return _ray_up(load_cluster_file(path), content)
    raise ConfigError(
        f"{path}: found the keys {', '.join(sorted(map(str, content)))}: expected a `ray up` file "
        "(cluster_name), a RayService (kind) or a Serve configuration (applications)"
    )


def _ray_up(cluster: ClusterFile, content: Mapping[str, Any]) -> Deployment:
    head = [str(command) for command in content.get("head_start_ray_commands", [])]
    worker = [str(command) for command in content.get("worker_start_ray_commands", [])]
    with _naming(cluster.path):
        parameters = start_parameters([*head, *worker])
        ports = ports_of(parameters)
    return Deployment(
        path=cluster.path,
        min_nodes=1 + sum(node_type.min_workers for node_type in cluster.node_types),
        spans_nodes=cluster.max_workers > 0,
        auth_mode=cluster.auth_mode,
        ports=ports,
        lists_ports=any("node-manager-port" in options for options in parameters),
        application=_deployed(cluster.path, head),
    )


def _deployed(path: Path, commands: list[str]) -> Application | None:
    """Returns the application of the Serve file that the head deploys.

    Its path is relative to the checkout: here, the folder the command runs in, or the folder of the
    cluster file.
    """
    names = [match["path"] for command in commands for match in _SERVE_DEPLOY.finditer(command)]
    for name in names:
        for candidate in (Path(name).expanduser(), path.parent / Path(name).name):
            if candidate.is_file():
                return _application(candidate, read_mapping(candidate))
    return None


def _kuberay(path: Path, content: Mapping[str, Any]) -> Deployment:
    try:
        spec = content["spec"]
        cluster = spec["rayClusterConfig"] if content["kind"] == "RayService" else spec
        head = cluster["headGroupSpec"]
        groups = cluster.get("workerGroupSpecs", [])
        starts = [_text_of(group.get("rayStartParams") or {}) for group in (head, *groups)]
        with _naming(path):
            ports = ports_of(starts)
        serve = yaml.safe_load(spec.get("serveConfigV2", "{}"))
        return Deployment(
            path=path,
            min_nodes=1 + sum(int(group.get("replicas", 0)) for group in groups),
            spans_nodes=bool(groups),
            auth_mode=_container_auth_mode(head),
            ports=ports,
            lists_ports=any("node-manager-port" in start for start in starts),
            application=_application(path, serve) if serve else None,
        )
    except (LookupError, TypeError, AttributeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a RayService: {error!r}") from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the file's name to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _container_auth_mode(group: Mapping[str, Any]) -> AuthMode | None:
    containers = group["template"]["spec"]["containers"]
    environment = {
        variable["name"]: variable.get("value") for variable in containers[0].get("env", [])
    }
    mode = environment.get("RAY_AUTH_MODE")
    return mode if mode in ("token", "disabled") else None


def _serve(path: Path, content: Mapping[str, Any]) -> Deployment:
    return Deployment(
        path=path,
        min_nodes=1,
        spans_nodes=True,
        auth_mode=None,
        ports=ClusterPorts(),
        lists_ports=False,
        application=_application(path, content),
    )


def _application(path: Path, serve: Mapping[str, Any]) -> Application:
    applications = serve.get("applications") or []
    if not isinstance(applications, list):
        kind = type(applications).__name__
        raise ConfigError(f"{path}: applications: found {kind}, expected a list")
    ours = [
        application
        for application in applications
        if isinstance(application, dict) and application.get("import_path") == _IMPORT_PATH
    ]
    if not ours:
        raise ConfigError(f"{path}: no application has the import_path {_IMPORT_PATH}")
    arguments = ours[0].get("args") or {}
    try:
        model = arguments["engine"]["model"]
        port = (serve.get("http_options") or {}).get("port")
        return Application(
            model=Path(model["path"]),
            head=Path(model["head"]) if model.get("head") else None,
            stages=tuple(_stages(arguments.get("placement") or {})),
            serve_http_port=None if port is None else int(port),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: args of the application: {error!r} is missing or wrong") from (
            error
        )


def _stages(placement: Mapping[str, Any]) -> Iterator[StageNeeds]:
    for name in ("draft", "verify"):
        bundle = placement.get(name) or {}
        yield StageNeeds(
            name=name,
            num_gpus=float(bundle.get("num_gpus") or 0),
            resources=tuple(sorted((bundle.get("resources") or {}).items())),
            labels=tuple(sorted((bundle.get("labels") or {}).items())),
        )


def _text_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in parameters.items()}
