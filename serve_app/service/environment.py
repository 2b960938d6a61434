"""Environment variables that have to be set before Ray is imported.

Ray reads some of them on import and passes the others to the processes it starts, so a command
calls this before anything else does.
"""

import os
import random
import secrets
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

from cluster.ray_compat import HAPROXY, PROXY_CALLBACK

TOKEN = "RAY_AUTH_TOKEN"
_DRAINING_S = "2"
"""Serve gives HAProxies on other nodes half a minute to forget an ingress that ends; this one needs
a tenth of a second."""
_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)
"""Ports of a service with HAProxy in addition to its own and those of its ingresses. The fallback
answers where there is no ingress: one port of two services would mix their requests."""
_PORT_RANGE = range(20_000, 30_000)
_chosen_ports: dict[str, str] = {}
_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray take 127.0.0.1 for the address of its node and listen there, on Linux too; drivers look
for their node by this address."""


def prepare_for_local_ray(*, shows_logs: bool = False) -> None:
    """Sets the environment for a Ray instance of this process, with a token for it alone."""
    _keep_stdout_ours(shows_logs=shows_logs)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            TOKEN: _token(),
            "RAY_USAGE_STATS_ENABLED": "0",
            # The actors of a service are known from the start: idle workers would go unused.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_metrics_collection": "0",
            # Kept in the GCS for a dashboard that does not run: 200 MiB an hour under load.
            "RAY_task_events_report_interval_ms": "0",
            **_ON_LOOPBACK,
            # A process that hangs cannot exit, and its resources are free only after it has ended.
            "RAY_kill_worker_timeout_milliseconds": "1000",
            PROXY_CALLBACK: "serve_app.ingress.proxy_front:proxy_middlewares",
        }
    )
    # Ray's workers have niceness 15 by default: with other work on the cores a rank got 3 % of
    # one, and the replacement of a lost process took several times as long.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # On a busy machine the HTTP proxy takes longer to start than Serve's five seconds, and a late
    # one is killed.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    # Serve replaces a proxy after three failed checks, and checks every ten seconds: without the
    # only proxy no request is served for half a minute.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "0.2")


def prepare_for_haproxy(folder: Path, *, port: int) -> None:
    """Gives a HAProxy of Serve, if it is to run, files and ports that are this service's alone: by
    default all services of a machine share them. Call it before Ray starts; `folder` must be
    private, since every user may write to the socket that administers HAProxy. `port`: of the
    service.
    """
    if not uses_haproxy():
        return
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", _DRAINING_S)
    # An hour by default. It bounds the pauses of heads, bodies and readers, not those of answers.
    os.environ.setdefault("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", "60")
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    os.environ.update(
        {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()}
    )
    # An earlier Ray of this process had other ports, which may be in use now.
    names = [name for name in _PORTS if os.environ.get(name) == _chosen_ports.get(name)]
    _chosen_ports.update(zip(names, _free_ports(len(names), but=port), strict=True))
    os.environ.update({name: _chosen_ports[name] for name in names})


def uses_haproxy() -> bool:
    return os.environ.get(HAPROXY) == "1"


def _free_ports(count: int, *, but: int) -> list[str]:
    """Returns ports that nothing listens on, and that the system gives to no connection: some time
    passes before they are used."""
    ports: list[str] = []
    for port in random.sample(_PORT_RANGE, len(_PORT_RANGE)):
        if port == but:
            continue
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            ports.append(str(port))
        if len(ports) >= count:
            break
    return ports[:count]


def prepare_for_cluster(*, token: str | None = None, shows_logs: bool = False) -> None:
    """Sets the environment for an existing cluster, or with a token for a local Ray of this user.

    The authentication mode is always set: without it, nodes and drivers use different defaults.
    """
    _keep_stdout_ours(shows_logs=shows_logs)
    if token is None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    else:
        os.environ.update({"RAY_AUTH_MODE": "token", TOKEN: token, **_ON_LOOPBACK})


def _keep_stdout_ours(*, shows_logs: bool) -> None:
    """Keeps Ray's reports of dead processes, which every driver prints, out of the results.

    `log_to_driver=False` does not stop them; a skip pattern that every line matches does.
    """
    if not shows_logs:
        os.environ.update({"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"})


@cache
def _token() -> str:
    """Returns one token for all Ray instances of this process: Ray keeps the first it has read."""
    return secrets.token_hex(32)
