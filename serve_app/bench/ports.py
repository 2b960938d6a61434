"""Ports of services that a benchmark starts."""

import socket

from eesd_dist.errors import ConfigError


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
