"""Options of `eesd preflight`, and what it requires of a node; the docstring of the options is the
help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from cluster.topology import AuthMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements of one node."""

    num_cpus: int = 1
    num_gpus: int = 0
    shm_bytes: int = 2 * 2**30
    """Ray's object store and NCCL's shared-memory transport both use /dev/shm."""
    disk_free_bytes: int = 5 * 2**30
    """Ray's logs and spilled objects, and the cache of compiled kernels."""
    open_files: int = 65_536
    auth_mode: "AuthMode | None" = None
    """None accepts any explicit choice."""
    spans_nodes: bool = False
    """True if ranks on other machines must reach this one."""
    interface: str | None = None
    """The interface that ranks use; None: the one of the node's address."""


_WANTED = Requirements()
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """Checks this node, or all nodes of a cluster (--address).

    Of a cluster, the links between the nodes are measured too. The exit status is 1 if the service
    would not start, else 0, also with warnings.
    """

    address: Annotated[str | None, "--address HOST:PORT: a Ray cluster, or `auto`: all nodes"] = (
        None
    )
    cluster_file: Annotated[
        Path | None, "a `ray up` file, a RayService or a Serve file: what it needs is checked"
    ] = None
    model: Annotated[Path | None, "folder of the weights, on every node"] = None
    cpus: Annotated[int, "CPUs required"] = _WANTED.num_cpus
    gpus: Annotated[int, "GPUs required"] = _WANTED.num_gpus
    shm_gib: Annotated[float, "size of /dev/shm required, GiB"] = _WANTED.shm_bytes / _GIB
    disk_gib: Annotated[float, "free disk required for temporary files, GiB"] = (
        _WANTED.disk_free_bytes / _GIB
    )
    open_files: Annotated[int, "limit of open files"] = _WANTED.open_files
    spans_nodes: Annotated[bool, "ranks run on other nodes too"] = _WANTED.spans_nodes
    interface: Annotated[str | None, "interface between ranks; default: the node's address"] = None
    max_skew_s: Annotated[float, "difference of a clock to that of the head"] = 1.0
    timeout_s: Annotated[float, "longest wait for a node, in each step"] = 60.0
    connect_timeout_s: Annotated[float, "longest wait for a connection to a port"] = 3.0
    skip_links: Annotated[bool, "measure no links"] = False
    link_bytes: Annotated[tuple[int, ...], "sizes of the measured messages"] = (
        *(4 * 2**10, 20 * 2**10, 160 * 2**10, 2**20),
    )
    iterations: Annotated[int, "calls measured for each operation and size"] = 20
    slow_factor: Annotated[float, "a link is slow at this multiple of the others' median"] = 3.0
    max_link_us: Annotated[float | None, "latency allowed between two nodes"] = None
    min_link_gbps: Annotated[float | None, "bandwidth required between two nodes, GB/s"] = None
    nccl_tests: Annotated[
        Path | None, "folder of nccl-tests on the nodes; default: their EESD_NCCL_TESTS"
    ] = None
    mpirun: Annotated[bool, "run nccl-tests between nodes too, by mpirun over ssh"] = False
    json: Annotated[bool, "print JSON, which `eesd plan` reads the links of"] = False
