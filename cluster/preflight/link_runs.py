"""Measures the links of a cluster: within each node, between pairs of nodes, and over all nodes.

Groups are measured one after the other, so that none disturbs another. The ranks of a group that
fails are replaced: they may still wait for each other when the next group needs them.

With GPUs the backend is NCCL: nccl-tests within a node where their binaries are, and between nodes
where mpirun may be used; torch's NCCL otherwise. Without GPUs it is Gloo.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import ray

from cluster.link_figures import Operation
from cluster.preflight.findings import Finding, error
from cluster.preflight.link_checks import Backend, LinkLimits, LinkTime, MeasuredLink, check_links
from cluster.preflight.link_rank import LinkGroup, LinkRank
from cluster.preflight.nccl_tests import BandwidthReport
from cluster.preflight.nodes import ClusterNode
from cluster.preflight.ray_job import Handle, cause_of, collect, start_on

_MAX_NODES_BY_PAIRS = 8
"""Above, each node is measured with the next one: pairs would be too many."""
_OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_GROUP_TIMEOUT_S = 90.0
_NCCL_TESTS_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Settings of a measurement of links."""

    sizes: tuple[int, ...]
    """Bytes; nccl-tests have their own."""
    interface: str | None
    """None: the interface of the node's address."""
    nccl_tests: Path | None
    """None: what EESD_NCCL_TESTS names on each node."""
    uses_mpirun: bool
    """Runs nccl-tests between nodes too, which needs ssh between them."""
    num_iterations: int
    start_timeout_s: float


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node with its actors."""

    node: ClusterNode
    agent: Handle
    ranks: list[Handle]
    binaries: Path | None = None

    @property
    def num_gpus(self) -> int:
        return self.node.num_gpus

    def replace_ranks(self, settings: LinkSettings) -> None:
        self.kill_ranks()
        self.ranks = _ranks_of(self.node, settings)

    def kill_ranks(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


def measure_cluster(
    nodes: Sequence[ClusterNode],
    agents: dict[str, Handle],
    settings: LinkSettings,
    limits: LinkLimits,
) -> tuple[list[MeasuredLink], list[Finding]]:
    """Measures and judges all links; a link that fails is a finding that names its nodes.

    A link that seems slow is measured once more, and its better times count: hosts may have been
    busy.
    """
    measured, findings = _start(nodes, agents, settings)
    groups = {_names(group): group for group in _groups(measured)}
    links = {}
    for names, group in groups.items():
        link, failed = _measured(group, settings)
        findings += failed
        if link is not None:
            links[names] = link
    for names in {finding.nodes for finding in check_links(list(links.values()), limits)}:
        repeat, failed = _measured(groups[names], settings)
        findings += failed
        if repeat is not None:
            links[names] = links[names].best_of(repeat)
    for member in measured:
        member.kill_ranks()
    results = list(links.values())
    return results, [*findings, *check_links(results, limits)]


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs to measure: all of a few nodes, a ring of many."""
    if len(names) <= _MAX_NODES_BY_PAIRS:
        return list(combinations(names, 2))
    return [(name, names[(i + 1) % len(names)]) for i, name in enumerate(names)]


def _start(
    nodes: Sequence[ClusterNode], agents: dict[str, Handle], settings: LinkSettings
) -> tuple[list[_Node], list[Finding]]:
    started = {
        node.name: _Node(node=node, agent=agents[node.name], ranks=_ranks_of(node, settings))
        for node in nodes
    }
    timeout_s = settings.start_timeout_s
    ready, findings = collect(
        {name: member.ranks[-1].rendezvous.remote() for name, member in started.items()},
        "a rank of the link measurement",
        timeout_s=timeout_s,
    )
    binaries, failed = collect(
        {
            node.name: agents[node.name].nccl_binaries.remote(settings.nccl_tests)
            for node in nodes
            if node.num_gpus and node.name in ready
        },
        "nccl-tests",
        timeout_s=timeout_s,
    )
    for name, folder in binaries.items():
        started[name].binaries = folder
    return [started[node.name] for node in nodes if node.name in ready], [*findings, *failed]


def _ranks_of(node: ClusterNode, settings: LinkSettings) -> list[Handle]:
    """Starts two, or one on a node with one GPU: NCCL has no two ranks on one."""
    return [
        start_on(
            node,
            LinkRank,
            node_address=node.address,
            interface=settings.interface,
            num_gpus=min(1, node.num_gpus),
        )
        for _ in range(1 if node.num_gpus == 1 else 2)
    ]


def _groups(nodes: Sequence[_Node]) -> list[tuple[_Node, ...]]:
    by_name = {member.node.name: member for member in nodes}
    within = [(member,) for member in nodes if len(member.ranks) > 1]
    between = [(by_name[first], by_name[second]) for first, second in pairs(list(by_name))]
    return [*within, *between, *([tuple(nodes)] if len(nodes) > 2 else [])]


def _measured(
    group: tuple[_Node, ...], settings: LinkSettings
) -> tuple[MeasuredLink | None, list[Finding]]:
    try:
        return _measure(group, settings), []
    except (ray.exceptions.RayError, TimeoutError, ValueError) as failure:
        for member in group:
            member.replace_ranks(settings)
        return None, [_failed(group, cause_of(failure))]


def _answer(calls: Handle, what: str, *, timeout_s: float) -> Any:
    """Waits for one call or several. Raises TimeoutError with the limit that has passed."""
    try:
        return ray.get(calls, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"{what}: no answer within {timeout_s:g} s") from None


def _measure(group: tuple[_Node, ...], settings: LinkSettings) -> MeasuredLink:
    with_tests = all(member.binaries is not None for member in group)
    if with_tests and (len(group) == 1 or settings.uses_mpirun):
        return _by_nccl_tests(group)
    return _by_torch(group, settings)


def _by_torch(group: tuple[_Node, ...], settings: LinkSettings) -> MeasuredLink:
    ranks = group[0].ranks[:2] if len(group) == 1 else [member.ranks[0] for member in group]
    backend: Backend = "nccl" if all(member.num_gpus for member in group) else "gloo"
    address, port = _answer(
        ranks[0].rendezvous.remote(), "a port for rank 0", timeout_s=settings.start_timeout_s
    )
    link_group = LinkGroup(
        address=address,
        port=port,
        num_ranks=len(ranks),
        backend=backend,
        sizes=settings.sizes,
        num_iterations=settings.num_iterations,
    )
    calls = [rank.measure.remote(link_group, number) for number, rank in enumerate(ranks)]
    times, num_wrong = _answer(calls, "the measurement", timeout_s=_GROUP_TIMEOUT_S)[0]
    return MeasuredLink(
        nodes=_names(group),
        num_ranks=len(ranks),
        backend=backend,
        source="torch",
        times=times,
        num_wrong=num_wrong,
    )


def _by_nccl_tests(group: tuple[_Node, ...]) -> MeasuredLink:
    num_gpus = min(member.num_gpus for member in group)
    hosts = [] if len(group) == 1 else [member.node.address for member in group]
    reports: dict[Operation, BandwidthReport] = {}
    for operation in _OPERATIONS:
        call = group[0].agent.nccl_tests.remote(group[0].binaries, operation, num_gpus, hosts)
        what = f"nccl-tests {operation}"
        reports[operation] = _answer(call, what, timeout_s=_NCCL_TESTS_TIMEOUT_S)
    return link_of(reports, nodes=_names(group), num_ranks=num_gpus * len(group))


def link_of(
    reports: dict[Operation, BandwidthReport], *, nodes: tuple[str, ...], num_ranks: int
) -> MeasuredLink:
    """Returns the times of nccl-tests as a link. Raises ValueError for a run that is not usable."""
    for operation, report in reports.items():
        if report.failures or report.separate_runs or not report.rows:
            what = "; ".join(report.failures) or (
                "separate runs: a build without MPI" if report.separate_runs else "no row"
            )
            raise ValueError(f"nccl-tests {operation}: {what}")
    return MeasuredLink(
        nodes=nodes,
        num_ranks=num_ranks,
        backend="nccl",
        source="nccl-tests",
        times=tuple(
            time for operation, report in reports.items() for time in _times(operation, report)
        ),
        num_wrong=sum(report.num_out_of_bounds or 0 for report in reports.values()),
    )


def _times(operation: Operation, report: BandwidthReport) -> Iterable[LinkTime]:
    for row in report.rows:
        in_place = row.out_of_place if row.in_place is None else row.in_place
        if row.size_bytes:
            yield LinkTime(
                operation=operation,
                size_bytes=row.size_bytes,
                typical_us=row.out_of_place.time_us,
                fastest_us=min(row.out_of_place.time_us, in_place.time_us),
            )


def _failed(group: tuple[_Node, ...], reason: str) -> Finding:
    names = _names(group)
    return error(
        "links",
        f"{' - '.join(names)}: no figures: {reason}",
        fix="open the ephemeral ports between these nodes, and name the --interface that both "
        "reach each other by",
        nodes=names,
    )


def _names(group: Sequence[_Node]) -> tuple[str, ...]:
    return tuple(member.node.name for member in group)
