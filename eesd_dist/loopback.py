"""Connections to this machine go through no proxy.

A proxy that the environment names is for other hosts: it cannot reach a loopback address of ours.
HTTP clients, exporters and gRPC read the same variables.
"""

import os

_HOSTS = ("localhost", "127.0.0.1", "::1")
_OF_GRPC = "no_grpc_proxy"
"""gRPC reads it, where it is set, instead of the others."""


def bypass_proxies() -> None:
    """Adds the loopback addresses to the hosts without a proxy, for this process and for those that
    it starts. Other hosts keep their proxy."""
    # Clients prefer one spelling to the other; with equal ones it does not matter which.
    hosts = _hosts_of("no_proxy") + _hosts_of("NO_PROXY")
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = _joined(hosts)
    if grpc := _hosts_of(_OF_GRPC):
        os.environ[_OF_GRPC] = _joined(grpc)


def _hosts_of(name: str) -> list[str]:
    return [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]


def _joined(hosts: list[str]) -> str:
    # "*" is no proxy at all, but only where it stands alone.
    return "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, *_HOSTS]))
