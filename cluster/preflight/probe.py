"""Facts about this machine: processors, memory, limits, versions, environment.

This module only reads; `cluster.preflight.checks` evaluates. A fact that may be missing on a
healthy machine is empty or zero rather than an error.
"""

import os
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from eesd_dist.provenance import read_hardware

SHARED_MEMORY = Path("/dev/shm")
TOKEN_FILE = Path("~/.ray/auth_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about one node."""

    hostname: str
    address: str | None
    """The address of the node's host name; None if the name does not resolve."""
    num_cpus: int
    gpus: tuple[str, ...]
    memory_bytes: int
    shm_bytes: int
    """Size of /dev/shm; 0 if there is none."""
    open_files: int
    """Soft limit of open files."""
    python: tuple[int, int]
    versions: tuple[tuple[str, str | None], ...]
    """torch and ray; None when not installed."""
    ray_auth_mode: str | None
    has_ray_token: bool
    nccl_environment: tuple[tuple[str, str], ...]
    """NCCL_* and GLOO_* variables that are set."""
    interfaces: tuple[str, ...]


def probe_node() -> NodeFacts:
    hardware = read_hardware()
    hostname = socket.gethostname()
    return NodeFacts(
        hostname=hostname,
        address=_address_of(hostname),
        num_cpus=hardware.num_cpus,
        gpus=hardware.gpus,
        memory_bytes=hardware.memory_bytes,
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        python=(sys.version_info.major, sys.version_info.minor),
        versions=tuple((name, _version_of(name)) for name in ("torch", "ray")),
        ray_auth_mode=os.environ.get("RAY_AUTH_MODE"),
        has_ray_token=_has_ray_token(),
        nccl_environment=tuple(
            sorted((k, v) for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_")))
        ),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def _address_of(hostname: str) -> str | None:
    try:
        return socket.gethostbyname(hostname)
    except OSError:
        return None


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _has_ray_token() -> bool:
    """Looks in the places where Ray looks, in the same order; does not read the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE)
    return path.expanduser().is_file()
