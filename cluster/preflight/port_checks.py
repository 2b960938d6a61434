"""Which ports each node must reach on which other, and what is said when it does not.

Ray's processes listen already while preflight runs: their own ports are tried. A worker port and an
ephemeral one are opened for the test. Pure: sockets are in `port_probe`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.ports import ClusterPorts
from cluster.preflight.findings import Finding, error, warning
from cluster.preflight.nodes import ClusterNode
from cluster.preflight.port_probe import PortUse, Target, Unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPorts:
    """Ports on which a node listens for the test."""

    ephemeral: int
    worker: int | None
    """A free one of the listed range; None if all are in use."""
    in_use: tuple[PortUse, ...]
    """Ports of `ports_to_be_free` that are in use."""


def ports_to_be_free(node: ClusterNode, *, serve_http: int) -> list[int]:
    """Returns ports that only Ray and Serve may use on a node, once the service runs."""
    return [serve_http] if node.is_head else []


def targets_of(
    node: ClusterNode,
    others: Sequence[ClusterNode],
    opened: Mapping[str, OpenedPorts],
    *,
    gcs_port: int,
) -> list[Target]:
    """Returns all ports that `node` connects to while the service runs.

    `opened`: by node; without an entry, a node has not answered and is left out.
    """
    return [
        Target(node=other.name, address=other.address, port=port, purpose=purpose)
        for other in others
        if other.name != node.name and other.name in opened
        for purpose, port in _ports(node, other, opened[other.name], gcs_port)
        if port
    ]


def _ports(
    source: ClusterNode, target: ClusterNode, opened: OpenedPorts, gcs_port: int
) -> Iterator[tuple[str, int]]:
    if target.is_head:
        yield "GCS", gcs_port
    yield "node manager", target.node_manager_port
    yield "object manager", target.object_manager_port
    if source.is_head:
        yield "dashboard agent", target.dashboard_agent_port
    yield "worker processes", opened.worker or 0
    yield "links and NCCL, an ephemeral port", opened.ephemeral


def check_reachable(unreachable: Mapping[str, Iterable[Unreachable]]) -> Iterator[Finding]:
    """`unreachable`: by the node that tried to connect."""
    for source, failures in unreachable.items():
        for failure in failures:
            target = failure.target
            yield error(
                "ports",
                f"{source} cannot connect to {target.node} port {target.port} ({target.purpose}): "
                f"{failure.reason}",
                fix=f"open TCP {target.port} from {source} to {target.node} (firewall, security "
                "group, network policy)",
                nodes=[source, target.node],
            )


def check_free(opened: Mapping[str, OpenedPorts], ports: ClusterPorts) -> Iterator[Finding]:
    """Ports that the service will need must not be in use by another program."""
    for node, node_ports in opened.items():
        for use in node_ports.in_use:
            if not use.is_ours:
                yield error(
                    "ports",
                    f"port {use.port} (HTTP of Serve) is in use by {use.process}",
                    fix="stop that process, or set another http_options.port",
                    nodes=[node],
                )
        if node_ports.worker is None:
            yield error(
                "ports",
                f"all worker ports {ports.min_worker} to {ports.max_worker} are in use",
                fix="widen --min-worker-port/--max-worker-port in every `ray start`",
                nodes=[node],
            )


def check_listed(nodes: Iterable[ClusterNode], ports: ClusterPorts) -> Iterator[Finding]:
    """Nodes must use the ports of the cluster file, which firewalls are set for."""
    for node in nodes:
        numbers = {
            "node-manager-port": (node.node_manager_port, ports.node_manager),
            "object-manager-port": (node.object_manager_port, ports.object_manager),
        }
        for flag, (actual, expected) in numbers.items():
            if actual != expected:
                yield warning(
                    "ports",
                    f"Ray's {flag} is {actual}, the cluster file lists {expected}",
                    fix=f"restart the node with `ray start --{flag}={expected}`",
                    nodes=[node.name],
                )
