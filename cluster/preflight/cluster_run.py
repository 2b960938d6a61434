"""`eesd preflight --address`: the steps of a check of all nodes, and what each has found."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.deployment_files import Deployment, StageNeeds
from cluster.ports import ClusterPorts
from cluster.preflight import cluster_checks, port_checks
from cluster.preflight.findings import Finding
from cluster.preflight.link_checks import LinkLimits, MeasuredLink
from cluster.preflight.link_runs import LinkSettings, measure_cluster
from cluster.preflight.node_agent import NodeAgent
from cluster.preflight.node_checks import check_node
from cluster.preflight.nodes import ClusterNode
from cluster.preflight.options import Requirements
from cluster.preflight.probe import Interface, NodeFacts
from cluster.preflight.ray_job import Handle, collect, connected, gcs_port_of_cluster, start_on
from cluster.preflight.report import Report, node_checks

_AGENT_CALLS = 4
"""Calls that an agent runs at the same time: it answers other agents while it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """Scope of a check."""

    address: str
    requirements: Requirements
    deployment: Deployment | None
    model: Path | None
    """Folder of the weights; None: no weights are compared."""
    head: Path | None
    max_skew_s: float
    timeout_s: float
    """Longest time of each step, on each node."""
    connect_timeout_s: float
    links: LinkSettings | None
    """None: links are not measured."""
    limits: LinkLimits

    @property
    def stages(self) -> tuple[StageNeeds, ...]:
        application = self.deployment.application if self.deployment else None
        return application.stages if application else ()

    @property
    def ports(self) -> ClusterPorts:
        if self.deployment is None:
            return ClusterPorts()
        application = self.deployment.application
        http = application.serve_http_port if application else None
        return replace(self.deployment.ports, **({"serve_http": http} if http else {}))


def check_cluster(request: ClusterRequest) -> Report:
    """Runs all checks on all nodes. Raises ConfigError if there is no cluster at the address."""
    with connected(request.address, timeout_s=request.timeout_s) as nodes:
        run = _Run(request, nodes)
        run.read_facts()
        run.compare_clocks()
        run.compare_weights()
        run.try_ports()
        run.measure_links()
        return run.report()


class _Run:
    """A check of a cluster. Nodes that fail to answer a step are left out of the later ones."""

    def __init__(self, request: ClusterRequest, nodes: list[ClusterNode]) -> None:
        requirements = request.requirements
        self._request = request
        self._requirements = replace(
            requirements, spans_nodes=requirements.spans_nodes or len(nodes) > 1
        )
        self._nodes = nodes
        self._agents: dict[str, Handle] = {
            node.name: start_on(node, NodeAgent, max_concurrency=_AGENT_CALLS) for node in nodes
        }
        self._all = tuple(node.name for node in nodes)
        self._facts: dict[str, NodeFacts] = {}
        self._links: list[MeasuredLink] = []
        self._findings: list[Finding] = []
        self._checks: list[str] = []
        """Names of the checks that were made so far."""
        if request.deployment is not None:
            self._checks.append("nodes")
            self._add(cluster_checks.check_number(nodes, request.deployment))
            if request.deployment.lists_ports:
                self._add(port_checks.check_listed(nodes, request.ports))
        if request.stages:
            self._checks.append("placement")
            self._add(cluster_checks.check_stages(nodes, request.stages))

    def report(self) -> Report:
        return Report(
            checks=tuple(self._checks),
            nodes=self._all,
            facts=tuple(self._facts.items()),
            links=tuple(self._links),
            findings=tuple(self._findings),
        )

    def read_facts(self) -> None:
        """Reads every node, and checks it alone and against the others."""
        calls = {name: agent.facts.remote() for name, agent in self._agents.items()}
        facts = self._facts = self._ask(calls, "its facts")
        for node in self._nodes:
            own = check_node(facts[node.name], self._requirements)
            self._add(replace(finding, nodes=(node.name,)) for finding in own)
            self._add(cluster_checks.check_gpus(node, facts[node.name]))
        self._checks += [
            *node_checks(spans_nodes=self._requirements.spans_nodes),
            *("answer", "versions"),
        ]
        self._add(cluster_checks.check_versions(facts))
        self._add(cluster_checks.check_mtus(self._interfaces(facts)))

    def compare_clocks(self) -> None:
        if not (self._nodes and self._nodes[0].is_head):
            return  # the head has not answered: nothing to compare with
        head, *others = self._nodes
        calls = {
            node.name: self._agents[node.name].clock_offset.remote(self._agents[head.name])
            for node in others
        }
        offsets = self._ask(calls, "its clock")
        self._checks.append("clock")
        self._add(cluster_checks.check_clocks(offsets, max_skew_s=self._request.max_skew_s))

    def compare_weights(self) -> None:
        model = self._request.model
        if model is None:
            return
        calls = {
            node.name: self._agents[node.name].weights.remote(model, self._request.head)
            for node in self._rank_nodes()
        }
        self._checks.append("weights")
        self._add(cluster_checks.check_weights(self._ask(calls, "a digest of its weights")))

    def try_ports(self) -> None:
        """Listens on every node, then connects from each one to all others."""
        request, ports = self._request, self._request.ports
        opened: dict[str, port_checks.OpenedPorts] = self._ask(
            {
                node.name: self._agents[node.name].open_ports.remote(
                    port_checks.ports_to_be_free(node, serve_http=ports.serve_http), ports
                )
                for node in self._nodes
            },
            "open ports",
        )
        self._checks.append("ports")
        self._add(port_checks.check_free(opened, ports))
        gcs_port = gcs_port_of_cluster()
        unreachable = self._ask(
            {
                node.name: self._agents[node.name].connect.remote(
                    port_checks.targets_of(node, self._nodes, opened, gcs_port=gcs_port),
                    request.connect_timeout_s,
                )
                for node in self._nodes
            },
            "connections to the others",
        )
        self._add(port_checks.check_reachable(unreachable))
        self._ask({node.name: self._agents[node.name].close_ports.remote() for node in self._nodes})

    def measure_links(self) -> None:
        if self._request.links is None:
            return
        links, findings = measure_cluster(
            self._rank_nodes(), self._agents, self._request.links, self._request.limits
        )
        self._links = links
        if links or findings:
            self._checks.append("links")
        self._add(findings)

    def _rank_nodes(self) -> list[ClusterNode]:
        """Returns the nodes that ranks can be placed on; all of them without a placement."""
        stages = self._request.stages
        suited = [node for node in self._nodes if any(node.suits(stage) for stage in stages)]
        return suited or self._nodes

    def _interfaces(self, facts: Mapping[str, NodeFacts]) -> dict[str, Interface]:
        """Returns the interface of each node that ranks use."""
        name = self._requirements.interface
        return {
            node.name: interface
            for node in self._nodes
            for interface in facts[node.name].interfaces
            if (interface.name == name if name else node.address in interface.addresses)
        }

    def _ask(self, calls: dict[str, Handle], what: str = "the end") -> dict[str, Any]:
        answers, findings = collect(calls, what, timeout_s=self._request.timeout_s)
        self._add(findings)
        silent = calls.keys() - answers.keys()
        self._nodes = [node for node in self._nodes if node.name not in silent]
        return answers

    def _add(self, findings: Iterable[Finding]) -> None:
        self._findings += findings
