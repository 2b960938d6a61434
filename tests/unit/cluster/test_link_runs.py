"""Groups of links, with toys for actors: a group that fails spoils no other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from cluster.preflight import link_runs
from cluster.preflight.link_checks import LinkLimits, LinkTime
from cluster.preflight.link_runs import LinkSettings, measure_cluster
from cluster.preflight.nodes import ClusterNode
from tests.support.cluster_facts import cluster_node

NODES = [cluster_node("a"), cluster_node("b")]
SETTINGS = LinkSettings(
    sizes=(4096,),
    interface=None,
    nccl_tests=None,
    uses_mpirun=False,
    num_iterations=1,
    start_timeout_s=60.0,
)
LIMITS = LinkLimits(slow_factor=3.0, max_latency_us=None, min_bandwidth_gbps=None)
TIME = LinkTime(operation="sendrecv", size_bytes=4096, typical_us=9.0, fastest_us=9.0)


@dataclass(frozen=True)
class _Method:
    remote: Callable[..., object]


@dataclass(eq=False)
class _Rank:
    """Answers at once, with an exception for `ray.get` to raise where it has a fault."""

    node: str
    faults: dict[str, Exception]
    num_measured: int = 0

    @property
    def rendezvous(self) -> _Method:
        return _Method(lambda: self.faults.get("rendezvous", ("127.0.0.1", 1)))

    @property
    def measure(self) -> _Method:
        return _Method(self._measure)

    def _measure(self, group: object, rank: int) -> object:
        self.num_measured += 1
        return self.faults.get("measure", ((TIME,), 0))


@dataclass
class _Cluster:
    faults: dict[str, Exception]
    """Of the first ranks of node a."""
    ranks: list[_Rank] = field(default_factory=list)
    killed: list[_Rank] = field(default_factory=list)

    def start_on(self, node: ClusterNode, kind: type, **_: object) -> _Rank:
        is_first = sum(rank.node == node.name for rank in self.ranks) < 2
        faults = self.faults if node.name == "a" and is_first else {}
        self.ranks.append(_Rank(node.name, faults))
        return self.ranks[-1]

    def get(self, calls: Any, *, timeout: float) -> Any:
        for call in calls if isinstance(calls, list) else [calls]:
            if isinstance(call, Exception):
                raise call
        return calls

    def kill(self, rank: _Rank) -> None:
        self.killed.append(rank)


def _measured(monkeypatch: pytest.MonkeyPatch, **faults: Exception) -> tuple[_Cluster, Any, Any]:
    cluster = _Cluster(faults)
    monkeypatch.setattr(ray, "get", cluster.get)
    monkeypatch.setattr(ray, "kill", cluster.kill)
    monkeypatch.setattr(link_runs, "start_on", cluster.start_on)
    monkeypatch.setattr(link_runs, "collect", lambda calls, what, timeout_s: (calls, []))
    links, findings = measure_cluster(NODES, {"a": None, "b": None}, SETTINGS, LIMITS)
    return cluster, links, findings


@pytest.mark.parametrize(
    ("method", "failure", "message"),
    [
        ("measure", ray.exceptions.GetTimeoutError(), "the measurement: no answer within 90 s"),
        ("measure", ray.exceptions.RayError("Connection closed by peer"), "closed by peer"),
        ("rendezvous", ray.exceptions.GetTimeoutError(), "rank 0: no answer within 60 s"),
    ],
)
def test_a_group_that_fails_is_named_and_its_ranks_measure_no_other(
    method: str, failure: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, links, findings = _measured(monkeypatch, **{method: failure})
    (finding,) = findings
    assert finding.nodes == ("a",)
    assert message in finding.message
    assert [link.nodes for link in links] == [("b",), ("a", "b")]
    first = [rank for rank in cluster.ranks if rank.node == "a"][:2]
    assert all(rank.num_measured <= 1 for rank in first)


def test_no_rank_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, links, _ = _measured(monkeypatch, measure=ray.exceptions.GetTimeoutError())
    assert len(cluster.ranks) == 6  # two of each node, and two instead of those of a
    assert sorted(map(id, cluster.killed)) == sorted(map(id, cluster.ranks))
    healthy, links, findings = _measured(monkeypatch)
    assert findings == []
    assert len(healthy.ranks) == 4
    assert len(links) == 3
