"""What preflight runs on every node: two actors, both plain classes.

`NodeAgent` reads facts and tries ports. `LinkRank` is a rank of a measured group, in a process of
its own, since it imports torch and may hold a GPU.
"""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import ray

from cluster.link_figures import Operation
from cluster.ports import ClusterPorts
from cluster.preflight.clock import ClockOffset, measure_offset
from cluster.preflight.link_benchmark import LinkRow, measure_links
from cluster.preflight.nccl_command import NcclTestsCommand, find_binaries, run_nccl_tests
from cluster.preflight.nccl_tests import BandwidthReport
from cluster.preflight.port_checks import OpenedPorts
from cluster.preflight.port_probe import Listeners, Target, Unreachable, connect_all
from cluster.preflight.probe import NodeFacts, probe_node, read_interfaces
from cluster.preflight.weights import WeightsFacts, read_weights
from eesd_dist.errors import ConfigError

_CLOCK_TIMEOUT_S = 10.0
_OPERATION_TIMEOUT = timedelta(seconds=20)


class NodeAgent:
    """Reads one node, and connects it to others."""

    def __init__(self) -> None:
        self._listeners = Listeners()

    def facts(self) -> NodeFacts:
        return probe_node()

    def now(self) -> float:
        return time.time()

    def clock_offset(self, head: Any) -> ClockOffset:
        """Compares the clock with that of the head. `head`: the handle of its agent."""
        return measure_offset(
            lambda: float(ray.get(head.now.remote(), timeout=_CLOCK_TIMEOUT_S)),
            read_ours=time.time,
        )

    def weights(self, model: Path, head: Path | None) -> WeightsFacts:
        return read_weights(model, head=head)

    def open_ports(self, to_be_free: Sequence[int], ports: ClusterPorts) -> OpenedPorts:
        """Listens until `close_ports`."""
        return OpenedPorts(
            in_use=tuple(self._listeners.open(to_be_free)),
            worker=self._listeners.open_in(ports.min_worker, ports.max_worker),
            ephemeral=self._listeners.open_ephemeral(),
        )

    def connect(self, targets: Sequence[Target], timeout_s: float) -> list[Unreachable]:
        return connect_all(targets, timeout_s=timeout_s)

    def close_ports(self) -> None:
        self._listeners.close()

    def nccl_binaries(self, given: Path | None) -> Path | None:
        """Returns the folder of nccl-tests on this node; None if there are none."""
        return find_binaries(given)

    def nccl_tests(
        self, binaries: Path, operation: Operation, num_gpus: int, hosts: Sequence[str]
    ) -> BandwidthReport:
        """Runs one of nccl-tests on this node's GPUs; with `hosts` on theirs, by mpirun."""
        command = NcclTestsCommand(binaries=binaries, collective=operation, num_gpus=num_gpus)
        return run_nccl_tests(command, hosts=hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGroup:
    """A group of ranks to measure."""

    address: str
    """Where rank 0 listens for the rendezvous."""
    port: int
    num_ranks: int
    backend: Literal["gloo", "nccl"]
    sizes: tuple[int, ...]
    num_iterations: int


class LinkRank:
    """One rank, on the interface that is measured."""

    def __init__(self, *, node_address: str, interface: str | None) -> None:
        """`interface`: None: the one of `node_address`, over which the service connects its ranks.

        Raises ConfigError if the node has no such interface.
        """
        found = [
            (each.name, address)
            for each in read_interfaces()
            for address in each.addresses
            if (address == node_address if interface is None else each.name == interface)
        ]
        if not found:
            names = ", ".join(each.name for each in read_interfaces())
            raise ConfigError(
                f"no interface {interface or f'with {node_address}'} with an IPv4 address, this "
                f"node has {names}"
            )
        self._interface, self._address = found[0]

    def rendezvous(self) -> tuple[str, int]:
        """Returns an address and a free port for a group in which this is rank 0."""
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return self._address, int(probe.getsockname()[1])

    def measure(self, group: LinkGroup, rank: int) -> list[LinkRow]:
        """Joins the group, times all operations and leaves it. Only rows of rank 0 count."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        for library in ("GLOO", "NCCL"):
            os.environ[f"{library}_SOCKET_IFNAME"] = self._interface
        if group.backend == "nccl":
            torch.cuda.set_device(0)
        dist.init_process_group(
            group.backend,
            init_method=f"tcp://{group.address}:{group.port}",
            rank=rank,
            world_size=group.num_ranks,
            timeout=_OPERATION_TIMEOUT,
        )
        try:
            return measure_links(sizes=group.sizes, num_iterations=group.num_iterations)
        finally:
            dist.destroy_process_group()
