"""Judges measured links, and turns them into the figures that `eesd plan` reads.

Pure. A link is judged by its fastest times: they show what it can do, while medians also contain
the work of a busy host.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.link_figures import CollectiveFigures, Operation, Scope
from cluster.preflight.findings import Finding, error

Backend = Literal["gloo", "nccl"]
Source = Literal["nccl-tests", "torch"]

_NOISE_US = {"gloo": 1000.0, "nccl": 30.0}
"""Differences below this come from the hosts, not from the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """Times of an operation at one size: of sendrecv one way, of the others one call."""

    operation: Operation
    size_bytes: int
    typical_us: float
    """The median of single calls, or the mean that nccl-tests print."""
    fastest_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The times among ranks on one node, or on several."""

    nodes: tuple[str, ...]
    num_ranks: int
    backend: Backend
    source: Source
    times: tuple[LinkTime, ...]
    num_wrong: int
    """Elements that arrived with a wrong value."""

    @property
    def scope(self) -> Scope:
        return "node" if len(self.nodes) == 1 else "nodes"

    @property
    def name(self) -> str:
        return f"within {self.nodes[0]}" if len(self.nodes) == 1 else " - ".join(self.nodes)

    def best_of(self, repeat: "MeasuredLink") -> "MeasuredLink":
        """Returns the better times of two measurements of this link; wrong values add up."""
        times = tuple(
            replace(
                time,
                typical_us=min(time.typical_us, other.typical_us),
                fastest_us=min(time.fastest_us, other.fastest_us),
            )
            for time, other in zip(self.times, repeat.times, strict=True)
        )
        return replace(self, times=times, num_wrong=self.num_wrong + repeat.num_wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Limits that a link must meet."""

    slow_factor: float
    """Times the median of the other links."""
    max_latency_us: float | None
    """Latency of the smallest message between two nodes; None: no limit."""
    min_bandwidth_gbps: float | None
    """GB/s of the largest message between two nodes; None: no limit."""


def check_links(links: Sequence[MeasuredLink], limits: LinkLimits) -> list[Finding]:
    """Names each link that lost data, is slower than the others, or misses a limit."""
    findings = [finding for link in links for finding in _check_values(link)]
    for kind in _kinds(links):
        for link in kind:
            others = [other for other in kind if other is not link]
            slow = _slower_than(link, others, limits.slow_factor) or _missed(link, limits)
            if slow is not None:
                findings.append(_slow(link, slow))
    return findings


def figures_of(links: Sequence[MeasuredLink]) -> list[CollectiveFigures]:
    """Returns the figures of a typical link: at each size, the median over the links of a kind."""
    return [
        CollectiveFigures(
            operation=operation,
            scope=kind[0].scope,
            num_ranks=kind[0].num_ranks,
            backend=kind[0].backend,
            times=tuple(_typical(kind, operation)),
        )
        for kind in _kinds(links)
        for operation in dict.fromkeys(time.operation for time in kind[0].times)
    ]


def _kinds(links: Iterable[MeasuredLink]) -> list[list[MeasuredLink]]:
    """Groups links that can be compared."""
    kinds: dict[tuple[object, ...], list[MeasuredLink]] = {}
    for link in links:
        key = (link.scope, link.num_ranks, len(link.nodes), link.backend, link.source)
        kinds.setdefault(key, []).append(link)
    return list(kinds.values())


def _typical(kind: Sequence[MeasuredLink], operation: Operation) -> Iterator[tuple[int, float]]:
    times: dict[int, list[float]] = {}
    for link in kind:
        for time in link.times:
            if time.operation == operation:
                times.setdefault(time.size_bytes, []).append(time.typical_us)
    for size, times_us in sorted(times.items()):
        yield size, statistics.median(times_us) * 1e-6


def _check_values(link: MeasuredLink) -> Iterator[Finding]:
    if link.num_wrong:
        yield error(
            "links",
            f"{link.name}: {link.num_wrong} elements arrived with a wrong value ({link.backend})",
            fix="test memory and network card of these nodes; with NCCL try NCCL_P2P_DISABLE=1",
            nodes=link.nodes,
        )


def _slower_than(link: MeasuredLink, others: Sequence[MeasuredLink], factor: float) -> str | None:
    """Compares with the lower median of the others: with few links, half of them may be slow."""
    worst: tuple[float, str] | None = None
    for time in link.times:
        usual = [
            other_time.fastest_us
            for other in others
            for other_time in other.times
            if (other_time.operation, other_time.size_bytes) == (time.operation, time.size_bytes)
        ]
        if not usual:
            continue
        median_us = statistics.median_low(usual)
        ratio = time.fastest_us / median_us
        if ratio > factor and time.fastest_us - median_us > _NOISE_US[link.backend]:
            message = (
                f"{time.operation} of {_size(time.size_bytes)} takes {_ms(time.fastest_us)} at "
                f"best, {_ms(median_us)} on the other links (median); up to {factor:g} times that "
                "expected"
            )
            worst = max(worst or (0.0, ""), (ratio, message))
    return None if worst is None else worst[1]


def _missed(link: MeasuredLink, limits: LinkLimits) -> str | None:
    """Applies the limits, which are those of two nodes."""
    times = [time for time in link.times if time.operation == "sendrecv"]
    if len(link.nodes) != 2 or not times:
        return None
    smallest = min(times, key=lambda time: time.size_bytes)
    largest = max(times, key=lambda time: time.size_bytes)
    bandwidth = largest.size_bytes / (largest.fastest_us * 1e3)
    if limits.max_latency_us is not None and smallest.fastest_us > limits.max_latency_us:
        return (
            f"{_size(smallest.size_bytes)} take {_ms(smallest.fastest_us)} one way at best, at "
            f"most {_ms(limits.max_latency_us)} expected (--max-link-us)"
        )
    if limits.min_bandwidth_gbps is not None and bandwidth < limits.min_bandwidth_gbps:
        return (
            f"{_size(largest.size_bytes)} move at {bandwidth:.3f} GB/s at best, at least "
            f"{limits.min_bandwidth_gbps:g} GB/s expected (--min-link-gbps)"
        )
    return None


def _slow(link: MeasuredLink, what: str) -> Finding:
    if len(link.nodes) == 1:
        fix = "compare `nvidia-smi topo -m`, CPU governor and load of this node with the others"
    else:
        fix = (
            "compare cable, negotiated speed (`ethtool`), MTU, errors (`ip -s link`) and route of "
            "these nodes with the others, or name another --interface"
        )
    return error("links", f"{link.name} is slow: {what}", fix=fix, nodes=link.nodes)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:g} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:g} KiB"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.3f} ms"
