"""The nodes of a running Ray cluster, as its control service lists them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.deployment_files import StageNeeds

_HEAD_RESOURCE = "node:__internal_head__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A live node."""

    node_id: str
    name: str
    """The address of its raylet; with the port where several raylets share an address."""
    address: str
    is_head: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    node_manager_port: int
    object_manager_port: int
    dashboard_agent_port: int
    """0 if there is none."""

    @property
    def num_gpus(self) -> int:
        """GPUs that Ray places workers on."""
        return int(self.resources.get("GPU", 0))

    def suits(self, stage: StageNeeds) -> bool:
        """Returns whether a rank of the stage can be placed here, by resources and labels."""
        needs = dict(stage.resources) | ({"GPU": stage.num_gpus} if stage.num_gpus else {})
        return all(self.resources.get(name, 0.0) >= amount for name, amount in needs.items()) and (
            all(_selects(selector, self.labels.get(name)) for name, selector in stage.labels)
        )


def nodes_of(table: Iterable[Mapping[str, Any]]) -> list[ClusterNode]:
    """Returns the live nodes in a table of `ray.nodes()`, the head first."""
    nodes = sorted(
        (_node(entry) for entry in table if entry["Alive"]),
        key=lambda node: (not node.is_head, node.address, node.node_manager_port),
    )
    addresses = [node.address for node in nodes]
    return [
        node
        if addresses.count(node.address) == 1
        else replace(node, name=f"{node.address}:{node.node_manager_port}")
        for node in nodes
    ]


def _node(entry: Mapping[str, Any]) -> ClusterNode:
    return ClusterNode(
        node_id=entry["NodeID"],
        name=entry["NodeManagerAddress"],
        address=entry["NodeManagerAddress"],
        is_head=_HEAD_RESOURCE in entry["Resources"],
        resources=dict(entry["Resources"]),
        labels=dict(entry.get("Labels") or {}),
        node_manager_port=int(entry["NodeManagerPort"]),
        object_manager_port=int(entry["ObjectManagerPort"]),
        dashboard_agent_port=max(0, int(entry.get("DashboardAgentListenPort") or 0)),
    )


def _selects(selector: str, value: str | None) -> bool:
    """Evaluates Ray's label selectors: `x`, `!x`, `in(a,b)`, `!in(a,b)`."""
    if selector.startswith("!"):
        return not _selects(selector[1:], value)
    if selector.startswith("in(") and selector.endswith(")"):
        return value in selector[3:-1].split(",")
    return value == selector
