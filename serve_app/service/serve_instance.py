"""The Serve instance of a Ray, and the applications that run on it."""

import logging
import re
import socket
from collections.abc import Callable
from contextlib import suppress

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.config import ProxyLocation
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from cluster.ray_compat import HAPROXY, ServeStatus, is_serve_running, serve_status
from eesd_dist.errors import ConfigError, EesdError, EngineError
from serve_app.config import RouterConfig, ServiceConfig
from serve_app.service.environment import uses_haproxy
from serve_app.service.ray_failures import reason_of

_QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
_POLL_S = 0.25
_HAPROXY_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
_OURS = re.compile(r"eesd_dist\.errors\.(\w+): (.*)")


def require_free(config: ServiceConfig) -> None:
    """Raises ConfigError if this machine cannot listen there."""
    if uses_haproxy() and config.host not in _HAPROXY_HOSTS:
        raise ConfigError(
            f"host: found {config.host} with {HAPROXY}=1, expected one of "
            f"{', '.join(_HAPROXY_HOSTS)}: HAProxy reaches the ingresses of its own node there"
        )
    # As in Serve, which looks up names in IPv4 only.
    family = socket.AF_INET6 if _is_ipv6(config.host) else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host_port(config.host, config.port)}: {error.strerror}; choose "
            "another with --host or --port"
        ) from error


def start_serve(config: ServiceConfig, *, updates: bool) -> str:
    """Starts Serve unless it runs; returns the URL of the service.

    Raises ConfigError when Serve cannot listen there, listens at another address, or has a
    conflicting application; what already runs stays as it is. With `updates`, this service may run
    already.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if serve_status() is None:
        _start_new_serve(config)
    running = serve_status()
    assert running is not None, "it has just been started, or was there"
    require_place(config, running, updates=updates)
    return url_of(config, has_tls=running.has_tls)


def _start_new_serve(config: ServiceConfig) -> None:
    try:
        serve.start(
            http_options={"host": config.host, "port": config.port},
            proxy_location=config.proxy_location,
            logging_config=_QUIET,
        )
    except RayTaskError as error:
        serve.shutdown()  # or it would keep this address
        raise ConfigError(
            f"cannot listen on {host_port(config.host, config.port)} of the cluster's head "
            f"({reason_of(error)}): choose another with --host or --port"
        ) from error


def require_place(config: ServiceConfig, running: ServeStatus, *, updates: bool) -> None:
    """Raises ConfigError if the running Serve cannot serve this configuration.

    Serve keeps the options that it was first started with, and replaces an application of the same
    name: only with `updates`, and only one at the same route.
    """
    if running.proxy_location == ProxyLocation.Disabled:
        raise ConfigError(
            "Serve runs in this cluster without HTTP (proxy_location Disabled): end it with `serve "
            "shutdown`, and a new one will listen"
        )
    if (running.host, running.port) != (config.host, config.port):
        raise ConfigError(
            f"Serve runs in this cluster and listens on {host_port(running.host, running.port)}, "
            f"expected {host_port(config.host, config.port)}: give --host {running.host} --port "
            f"{running.port}, or end it and all that it serves with `serve shutdown`"
        )
    for name, route in running.route_prefixes.items():
        is_itself = name == config.app_name
        if updates and is_itself and route == "/":
            continue
        if is_itself or route == "/":
            raise ConfigError(
                f"Serve runs in this cluster and has application {name!r} at {route}, expected "
                f"none at / and none named {config.app_name!r}: stop it first, with `eesd stop` or "
                "`serve shutdown`"
            )


def deploy(
    application: serve.Application,
    *,
    name: str,
    route_prefix: str | None,
    wait: Callable[[float], bool],
    while_deploying: Callable[[], None] = lambda: None,
) -> None:
    """Deploys an application; returns when it runs, or when `wait` (seconds) returns True.
    `while_deploying` is called now and then until then.

    Raises the project's error that kept it from running, as ConfigError or EngineError.
    """
    serve.run_many(
        [
            serve.RunTarget(
                target=application, name=name, route_prefix=route_prefix, logging_config=_QUIET
            )
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    while not wait(_POLL_S):
        status = serve.status().applications.get(name)
        if status is None or status.status == ApplicationStatus.DEPLOYING:
            while_deploying()
            continue
        if status.status == ApplicationStatus.RUNNING:
            return
        raise _failure(status)


def failure_of(app_name: str) -> EesdError | None:
    """Returns why Serve has given an application up; None while it has not."""
    status = serve.status().applications.get(app_name) if is_serve_running() else None
    failed = status is not None and status.status == ApplicationStatus.DEPLOY_FAILED
    return _failure(status) if status is not None and failed else None


def remove_application(app_name: str, router: RouterConfig) -> None:
    """Deletes an application and its router; Serve stays."""
    serve.delete(app_name)
    remove_router(router)


def remove_router(router: RouterConfig) -> None:
    """Ends a router, if there is one."""
    with suppress(ValueError):  # no pipeline got as far as starting one
        ray.kill(ray.get_actor(router.name, namespace=router.namespace))


def _failure(status: ApplicationStatusOverview) -> EesdError:
    """Returns the reason: the last error of this project in the traceback that Serve reports."""
    message = "\n".join([status.message, *(d.message for d in status.deployments.values())])
    errors = _OURS.findall(message)
    if errors:
        kind, text = errors[-1]
        return (
            ConfigError(text) if kind in ("ConfigError", "CheckpointError") else EngineError(text)
        )
    lines = [line for line in message.strip().splitlines() if line.strip()]
    return EngineError(f"the service could not be started: {lines[-1] if lines else 'no reason'}")


def url_of(config: ServiceConfig, *, has_tls: bool = False) -> str:
    return f"http{'s' if has_tls else ''}://{host_port(config.host, config.port)}"


def url_of_application(name: str) -> str:
    """Returns the URL of a service on the cluster that this process is connected to. Raises
    ConfigError where Serve has no such application, or no HTTP."""
    status = serve_status()
    routes = {} if status is None else status.route_prefixes
    route = routes.get(name)
    if status is None or route is None:
        names = ", ".join(sorted(name for name, route in routes.items() if route)) or "none"
        raise ConfigError(f"no service {name!r} in this cluster: found {names}")
    host = status.host
    if host in ("0.0.0.0", "::"):
        host = ray.util.get_node_ip_address()
    scheme = "https" if status.has_tls else "http"
    return f"{scheme}://{host_port(host, status.port)}{route.rstrip('/')}"


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if _is_ipv6(host) else f"{host}:{port}"


def _is_ipv6(host: str) -> bool:
    return ":" in host
