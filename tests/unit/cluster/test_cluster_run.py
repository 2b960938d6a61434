"""The steps of a check of a cluster, with toys for agents: what is reported as checked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cluster.deployment_files import load_deployment
from cluster.preflight import cluster_run
from cluster.preflight.cluster_run import ClusterRequest, check_cluster
from cluster.preflight.link_checks import LinkLimits
from cluster.preflight.nodes import ClusterNode
from cluster.preflight.options import Requirements
from cluster.preflight.port_checks import OpenedPorts
from cluster.preflight.probe import ClockOffset, WeightsFacts
from cluster.preflight.report import Report
from tests.support.cluster_facts import HEALTHY, cluster_node

ONPREM = Path(__file__).parents[3] / "cluster" / "configs" / "onprem.yaml"
REQUEST = ClusterRequest(
    address="auto",
    requirements=Requirements(),
    deployment=None,
    model=None,
    head=None,
    max_skew_s=1.0,
    timeout_s=1.0,
    connect_timeout_s=1.0,
    links=None,
    limits=LinkLimits(slow_factor=3.0, max_latency_us=None, min_bandwidth_gbps=None),
)
ALWAYS = {"software", "cpu", "gpu", "shm", "disk", "open_files", "memlock", "auth"}
ALWAYS |= {"answer", "versions", "clock", "ports"}


@dataclass(frozen=True)
class _Method:
    remote: Callable[..., object]


class _Agent:
    """Answers every call of `NodeAgent` at once."""

    facts = _Method(lambda: replace(HEALTHY, address=None))
    clock_offset = _Method(lambda head: ClockOffset(offset_s=0.0, uncertainty_s=0.0))
    weights = _Method(lambda model, head: WeightsFacts(folder="x", digest="1", problem=None))
    open_ports = _Method(lambda free, ports: OpenedPorts(ephemeral=1, worker=2, in_use=()))
    connect = _Method(lambda targets, timeout_s: [])
    close_ports = _Method(lambda: None)


def _checked(monkeypatch: pytest.MonkeyPatch, request: ClusterRequest, *, num_nodes: int) -> Report:
    head = {"CPU": 1.0, "node:__internal_head__": 1.0}
    workers = [cluster_node(f"10.0.0.{2 + number}") for number in range(num_nodes - 1)]

    @contextmanager
    def connected(address: str, *, timeout_s: float) -> Iterator[list[ClusterNode]]:
        yield [cluster_node("10.0.0.1", Resources=head), *workers]

    monkeypatch.setattr(cluster_run, "connected", connected)
    monkeypatch.setattr(cluster_run, "start_on", lambda node, kind, **settings: _Agent())
    monkeypatch.setattr(cluster_run, "collect", lambda calls, what, timeout_s: (calls, []))
    monkeypatch.setattr(cluster_run, "gcs_port_of_cluster", lambda: 6379)
    return check_cluster(request)


def test_what_was_not_asked_for_is_not_reported_as_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_checked(monkeypatch, REQUEST, num_nodes=1).checks) == ALWAYS


def test_several_nodes_are_asked_about_their_network(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _checked(monkeypatch, REQUEST, num_nodes=2)
    assert set(report.checks) == ALWAYS | {"name", "interface"}
    assert [finding.nodes for finding in report.findings if finding.check == "name"] == [
        ("10.0.0.1",),
        ("10.0.0.2",),
    ]


def test_a_cluster_file_adds_its_nodes_its_placement_and_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = load_deployment(ONPREM)
    request = replace(REQUEST, deployment=deployment, model=Path("model"))
    report = _checked(monkeypatch, request, num_nodes=2)
    checks = {"nodes", "placement", "weights"}
    assert set(report.checks) == ALWAYS | {"name", "interface"} | checks
    assert "placement" in {finding.check for finding in report.findings}
