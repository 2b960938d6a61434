"""All uses of private Ray interfaces, in one place.

Written for Ray 2.60. Each function has a test in `tests/serve/shared/test_ray_compat.py` or
`tests/unit/cluster/test_ray_compat.py` that fails when Ray changes the interface. Ray reads the
environment when it is imported, so the imports are inside the functions.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.job_config import JobConfig

PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Environment variable of nodes with an HTTP proxy: a function that each proxy calls when it starts
and that returns middlewares. They run before Serve reads the headers."""

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""Environment variable of all nodes: "1" puts HAProxy in the place of Serve's own HTTP proxies."""

_NAMELESS_TYPE = re.compile(r"node_[0-9a-f]{56}")
"""The type of a node that no autoscaler has started: its id."""


@cache
def actor_class(of: type[Any]) -> Any:
    """Returns Ray's actor class of a plain class, one of each in a process.

    Ray keeps every class that `ray.remote` returns: in its head, and with the signatures of all
    methods in every process that gets a handle to an actor of it. A class for each replaced worker
    would make the router and the ingresses grow for as long as they live.
    """
    import ray

    return ray.remote(of)


def job_with_installed_code() -> "JobConfig":
    """Returns a job that lets its workers import what is installed on their node, and nothing else.

    Ray puts the driver's working directory, and the folder of its script, first on the module path
    of every worker, unless the job brings a working directory.
    """
    from ray.job_config import JobConfig

    class InstalledCode(JobConfig):  # type: ignore[misc, unused-ignore]  # Ray is not analysed
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return InstalledCode()


@contextmanager
def rays_signal_handlers_unused() -> Iterator[None]:
    """Within the block `ray.init` leaves the handler of SIGTERM as it is.

    Its own handlers end the process from within the handler, after up to 30 seconds of draining, by
    a SystemExit that is raised wherever this process happens to be.
    """
    from ray._private import utils

    install = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = install


def available_resources() -> Mapping[str, Mapping[str, float]]:
    """Returns the free resources of each live node, by node id.

    `ray.available_resources()` sums over nodes. The state API needs the dashboard, which the local
    Ray of this project does not start.
    """
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())


def is_actor_dead(actor_id: str) -> bool:
    """Returns whether the actor with this id (hex) has died; one that Ray has forgotten has, too.

    The state API needs the dashboard.
    """
    from ray._private.state import actors

    return bool(actors(actor_id).get("State", "DEAD") == "DEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """A kind of node that an autoscaler can start."""

    name: str
    resources: Mapping[str, float]


def reported_node_types() -> tuple[NodeType, ...]:
    """Returns the node types that the cluster's operator has reported to Ray.

    Managed Ray reports them; the open-source autoscalers do not, and then there are none.
    """
    from ray._private.state import state

    config = state.get_cluster_config()
    return tuple(
        NodeType(name=group.name, resources=dict(group.resources))
        for group in (() if config is None else config.node_group_configs)
        if group.max_count != 0
    )


def autoscaler_news() -> tuple[str, ...]:
    """Returns which nodes Ray's autoscaler is starting, and which it could not start; nothing
    without an autoscaler. Reads the reports of both of Ray's autoscalers."""
    import ray

    return (*_news_of_v1(), *_news_of_v2(ray.get_runtime_context().gcs_address))


def has_autoscaler() -> bool:
    """Returns whether one of Ray's autoscalers manages nodes of the cluster: without one, nodes
    have no types, or types named after their ids."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    names = [node.ray_node_type_name for node in (*status.active_nodes, *status.idle_nodes)]
    names += _report_of_v1().get("active_nodes") or ()
    return bool(reported_node_types()) or not all(map(_NAMELESS_TYPE.fullmatch, names))


def _report_of_v1() -> dict[str, Any]:
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    page = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or b"{}")
    return page.get("autoscaler_report") or {}


def _news_of_v1() -> Iterator[str]:
    report = _report_of_v1()
    for name, count in (report.get("pending_launches") or {}).items():
        yield f"{count} x {name} requested"
    for address, name, status in report.get("pending_nodes") or ():
        yield f"{name} at {address} is {status}"
    for address, name in report.get("failed_nodes") or ():
        yield f"{name} at {address} has failed"


def _news_of_v2(gcs_address: str) -> Iterator[str]:
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(gcs_address)
    for launch in status.pending_launches:
        yield f"{launch.count} x {launch.ray_node_type_name} requested"
    for node in status.pending_nodes:
        yield f"{node.ray_node_type_name} is starting ({node.details or 'no details'})"
    for launch in status.failed_launches:
        details = launch.details or "no details"
        yield f"{launch.count} x {launch.ray_node_type_name} could not be started: {details}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeStatus:
    """The Serve instance of the connected cluster."""

    host: str
    port: int
    has_tls: bool
    proxy_location: str
    route_prefixes: Mapping[str, str | None]
    """Route prefixes by application name."""


def serve_status() -> ServeStatus | None:
    """Returns None if Serve is not running. `serve.status()` starts it, and gives no addresses."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    details = client.get_serve_details()
    return ServeStatus(
        host=client.http_config.host,
        port=client.http_config.port,
        has_tls=client.http_config.ssl_certfile is not None,
        proxy_location=details["proxy_location"],
        route_prefixes={name: app["route_prefix"] for name, app in details["applications"].items()},
    )


def dead_ray_processes() -> frozenset[str]:
    """Returns which of Ray's own processes that this process has started have died, such as
    `raylet` or `gcs_server`; none of a Ray that it is only connected to."""
    from ray._private.worker import _global_node

    return (
        frozenset()
        if _global_node is None
        else frozenset(name for name, _ in _global_node.dead_processes())
    )


def is_serve_running() -> bool:
    """Returns whether there is a Serve controller, were it being restarted. `serve.status()` raises
    once Serve has been shut down from another process."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.util import list_named_actors

    controller = {"name": SERVE_CONTROLLER_NAME, "namespace": SERVE_NAMESPACE}
    return controller in list_named_actors(all_namespaces=True)


def proxy_actors() -> list[Any]:
    """Returns the handles of Serve's HTTP proxies."""
    return _serve_actors(_serve_details()["proxies"].values())


def replica_actors(app: str, deployment: str) -> list[Any]:
    """Returns the handles of a deployment's replicas."""
    return _serve_actors(
        _serve_details()["applications"][app]["deployments"][deployment]["replicas"]
    )


def _serve_details() -> Any:
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve has a controller"
    return client.get_serve_details()


def _serve_actors(details: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Returns the handles of actors of Serve; not of those that have just ended."""
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    actors = []
    for actor in details:
        with suppress(ValueError):
            actors.append(ray.get_actor(actor["actor_name"], namespace=SERVE_NAMESPACE))
    return actors


def prepared_cluster_config(content: Mapping[str, object]) -> dict[str, Any]:
    """Returns a cluster file with the defaults of `ray up`; raises Ray's errors for a bad one."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(content)
    validate_config(prepared)
    return prepared
