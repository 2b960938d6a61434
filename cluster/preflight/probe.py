"""Facts about this machine: processors, memory, limits, versions, interfaces, environment, the
weights in a model's folder, and its clock.

This module only reads; the checks evaluate. A fact that may be missing on a healthy machine is
empty or zero rather than an error. Torch is imported where weights are read: the driver uses the
result alone.

Clocks differ by what is measured over a connection with an unknown delay (D. Mills, RFC 5905
section 8): the other clock is read between two readings of ours, and is compared with their middle;
the error is at most half of the time between them. Of several readings the quickest is used.
"""

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from eesd_dist.errors import EesdError, os_error_text
from eesd_dist.provenance import read_hardware

SHARED_MEMORY = Path("/dev/shm")
TOKEN_FILE = Path("~/.ray/auth_token")
DISTRIBUTIONS = ("torch", "ray", "eesd-dist")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    is_up: bool
    speed_mbps: int
    """0 if the driver does not say."""
    mtu: int
    addresses: tuple[str, ...]
    """IPv4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about one node."""

    hostname: str
    address: str | None
    """The address of the node's host name; None if the name does not resolve."""
    num_cpus: int
    gpus: tuple[str, ...]
    """Name, memory and driver of each, as the driver prints them."""
    memory_bytes: int
    shm_bytes: int
    """Size of /dev/shm; 0 if there is none."""
    disk_free_bytes: int
    """Free bytes on the file system of the temporary folder, which Ray's sessions are in."""
    disk_folder: str
    open_files: int
    """Soft limit of open files."""
    memlock_bytes: int
    """Soft limit of locked memory; negative without a limit."""
    python: str
    versions: tuple[tuple[str, str | None], ...]
    """torch, ray and eesd-dist; None when not installed."""
    nccl: str | None
    """The version that torch uses; None without a GPU."""
    ray_auth_mode: str | None
    has_ray_token: bool
    nccl_environment: tuple[tuple[str, str], ...]
    """NCCL_* and GLOO_* variables that are set."""
    interfaces: tuple[Interface, ...]
    has_infiniband: bool

    @property
    def driver(self) -> str | None:
        """The version of the GPU driver; None without a GPU."""
        return self.gpus[0].rpartition(",")[2].strip() if self.gpus else None


def probe_node() -> NodeFacts:
    hardware = read_hardware()
    hostname = socket.gethostname()
    folder = tempfile.gettempdir()
    return NodeFacts(
        hostname=hostname,
        address=_address_of(hostname),
        num_cpus=hardware.num_cpus,
        gpus=hardware.gpus,
        memory_bytes=hardware.memory_bytes,
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        disk_free_bytes=shutil.disk_usage(folder).free,
        disk_folder=folder,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        python=platform.python_version(),
        versions=tuple((name, _version_of(name)) for name in DISTRIBUTIONS),
        nccl=_nccl_version() if hardware.gpus else None,
        ray_auth_mode=os.environ.get("RAY_AUTH_MODE"),
        has_ray_token=_has_ray_token(),
        nccl_environment=tuple(
            sorted((k, v) for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_")))
        ),
        interfaces=read_interfaces(),
        has_infiniband=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    )


def read_interfaces() -> tuple[Interface, ...]:
    addresses = psutil.net_if_addrs()
    return tuple(
        Interface(
            name=name,
            is_up=state.isup,
            speed_mbps=state.speed,
            mtu=state.mtu,
            addresses=tuple(
                address.address
                for address in addresses.get(name, ())
                if address.family == socket.AF_INET
            ),
        )
        for name, state in psutil.net_if_stats().items()
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


def _nccl_version() -> str | None:
    """Imports torch, which takes seconds: NCCL may be a library of the system."""
    import torch

    if not torch.cuda.is_available():
        return None
    return ".".join(str(number) for number in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _has_ray_token() -> bool:
    """Looks in the places where Ray looks, in the same order; does not read the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE)
    return path.expanduser().is_file()


DIGITS = 12
"""Digits of a digest in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFacts:
    """A model's folder on one node."""

    folder: str
    digest: str | None
    """None if it cannot be read."""
    problem: str | None
    """Reason why it cannot be read; None if it can."""


def read_weights(model: Path, *, head: Path | None = None) -> WeightsFacts:
    """Digests config and safetensors files by sampled blocks, and the exit head as a whole."""
    from eesd_dist.model.heads.head_files import head_digest
    from eesd_dist.model.weights import weights_digest

    folder = model.expanduser()
    try:
        problem = _missing(folder)
        if problem is not None:
            return WeightsFacts(folder=str(folder), digest=None, problem=problem)
        digest = weights_digest(folder)
        if head is not None:
            folder = head.expanduser()
            if not folder.is_dir():
                missing = "there is no such folder of an exit head"
                return WeightsFacts(folder=str(folder), digest=None, problem=missing)
            digest += head_digest(folder)
    except OSError as error:
        return WeightsFacts(folder=str(folder), digest=None, problem=os_error_text(error))
    except EesdError as error:
        return WeightsFacts(folder=str(folder), digest=None, problem=str(error))
    return WeightsFacts(folder=str(folder), digest=digest, problem=None)


def _missing(folder: Path) -> str | None:
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    if not any(folder.glob("*.safetensors")):
        return "it has no *.safetensors file"
    return None


NUM_READINGS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Seconds that our clock is ahead of the other; negative if it is behind."""

    offset_s: float
    uncertainty_s: float

    @property
    def least_s(self) -> float:
        """The smallest difference that the readings allow."""
        return max(0.0, abs(self.offset_s) - self.uncertainty_s)


def measure_offset(
    read_other: Callable[[], float],
    *,
    read_ours: Callable[[], float],
    num_readings: int = NUM_READINGS,
) -> ClockOffset:
    """Both functions return seconds since the epoch. Raises what `read_other` raises."""
    return _quickest(_reading(read_other, read_ours) for _ in range(num_readings))


def _reading(read_other: Callable[[], float], read_ours: Callable[[], float]) -> ClockOffset:
    before = read_ours()
    other = read_other()
    after = read_ours()
    return ClockOffset(offset_s=(before + after) / 2 - other, uncertainty_s=abs(after - before) / 2)


def _quickest(readings: Iterable[ClockOffset]) -> ClockOffset:
    return min(readings, key=lambda reading: reading.uncertainty_s)
