"""Agent that preflight runs on every node, in an actor. A plain class; torch is imported where
needed."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from cluster.link_figures import Operation
from cluster.ports import ClusterPorts
from cluster.preflight.nccl_command import NcclTestsCommand, find_binaries, run_nccl_tests
from cluster.preflight.nccl_tests import BandwidthReport
from cluster.preflight.port_checks import OpenedPorts
from cluster.preflight.port_probe import Listeners, Target, Unreachable, connect_all
from cluster.preflight.probe import (
    ClockOffset,
    NodeFacts,
    WeightsFacts,
    measure_offset,
    probe_node,
    read_weights,
)

_CLOCK_TIMEOUT_S = 10.0


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

    def nccl_binaries(self, option: Path | None) -> Path | None:
        """Returns the folder of nccl-tests on this node; None if there are none."""
        return find_binaries(option)

    def nccl_tests(
        self, binaries: Path, operation: Operation, num_gpus: int, hosts: Sequence[str]
    ) -> BandwidthReport:
        """Runs one of nccl-tests on this node's GPUs; with `hosts` on theirs, by mpirun."""
        command = NcclTestsCommand(binaries=binaries, collective=operation, num_gpus=num_gpus)
        return run_nccl_tests(command, hosts=hosts)
