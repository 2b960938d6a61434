"""A rank of a measured group: an actor in a process of its own, which may hold a GPU.

The driver imports this module too, so torch is imported where a group is measured.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

from cluster.preflight.link_checks import Backend, LinkTime
from cluster.preflight.probe import read_interfaces
from eesd_dist.errors import ConfigError

_OPERATION_TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGroup:
    """A group of ranks to measure."""

    address: str
    """Address at which rank 0 listens for the rendezvous."""
    port: int
    num_ranks: int
    backend: Backend
    sizes: tuple[int, ...]
    num_iterations: int


class LinkRank:
    """A rank, on the interface that is measured."""

    def __init__(self, *, node_address: str, interface: str | None) -> None:
        """`interface`: None: the one of `node_address`, over which the service connects its ranks.

        Raises ConfigError if the node has no such interface.
        """
        addresses = [
            (candidate.name, address)
            for candidate in read_interfaces()
            for address in candidate.addresses
            if (address == node_address if interface is None else candidate.name == interface)
        ]
        if not addresses:
            names = ", ".join(candidate.name for candidate in read_interfaces())
            raise ConfigError(
                f"no interface {interface or f'with {node_address}'} with an IPv4 address, this "
                f"node has {names}"
            )
        self._interface, self._address = addresses[0]

    def rendezvous(self) -> tuple[str, int]:
        """Returns an address and a free port for a group in which this is rank 0."""
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return self._address, int(probe.getsockname()[1])

    def measure(self, group: LinkGroup, rank: int) -> tuple[tuple[LinkTime, ...], int]:
        """Joins the group, times all operations and leaves it.

        Returns the times and the number of wrong elements. Only the times of rank 0 count.
        """
        import torch
        import torch.distributed as dist

        from cluster.preflight.link_benchmark import measure_links

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
            rows = measure_links(sizes=group.sizes, num_iterations=group.num_iterations)
        finally:
            dist.destroy_process_group()
        times = tuple(
            LinkTime(
                operation=row.operation,
                size_bytes=row.size_bytes,
                typical_us=row.median_us,
                fastest_us=row.fastest_us,
            )
            for row in rows
        )
        return times, sum(row.num_wrong for row in rows)
