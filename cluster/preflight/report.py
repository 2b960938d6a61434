"""The result of preflight, as one table and as JSON."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.link_figures import write_links
from cluster.preflight.findings import Finding, Severity, errors_first, has_errors
from cluster.preflight.link_checks import LinkTime, MeasuredLink, figures_of
from cluster.preflight.probe import NodeFacts

if TYPE_CHECKING:
    from rich.table import Table

_OWN_CHECKS = ("software", "cpu", "gpu", "shm", "disk", "open_files", "memlock", "auth")
"""Checks of every node."""
_NETWORK_CHECKS = ("name", "interface")
"""Checks of nodes with ranks that reach other nodes."""
_WIDTH = 160
"""Width of a table that no terminal shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one run has found."""

    checks: tuple[str, ...]
    """Names of the checks that were run."""
    nodes: tuple[str, ...]
    facts: tuple[tuple[str, NodeFacts], ...]
    """Facts by node; none of a node that did not answer."""
    findings: tuple[Finding, ...]
    links: tuple[MeasuredLink, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """True if there are no errors; there may be warnings."""
        return not has_errors(self.findings)

    def as_json(self) -> dict[str, Any]:
        """Returns the report for `json.dumps`; `links` is what `eesd plan` reads."""
        return {
            "healthy": self.is_healthy,
            "checks": list(self.checks),
            "nodes": list(self.nodes),
            "findings": [
                {**asdict(finding), "severity": finding.severity.value}
                for finding in errors_first(self.findings)
            ],
            "facts": {name: asdict(facts) for name, facts in self.facts},
            "links": write_links(figures_of(self.links)),
            "measured_links": [asdict(link) for link in self.links],
        }


def node_checks(*, spans_nodes: bool) -> tuple[str, ...]:
    """Returns the checks that `check_node` makes."""
    return (*_OWN_CHECKS, *(_NETWORK_CHECKS if spans_nodes else ()))


def print_report(report: Report) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(_table(report))
    console.print(_summary(report))


def _table(report: Report) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "nodes", "state", "found", "what to do")
    for row in _rows(report):
        table.add_row(*(escape(word) for word in row))
    return table


def _rows(report: Report) -> Iterator[tuple[str, str, str, str, str]]:
    for finding, nodes in _merged(report.findings):
        yield (
            finding.check,
            ", ".join(nodes) or "all",
            finding.severity.value,
            finding.message,
            finding.fix,
        )
    failed = {finding.check for finding in report.findings}
    for check in report.checks:
        if check not in failed and not (check == "links" and report.links):
            yield check, "all", "ok", "", ""
    slow = {finding.nodes for finding in report.findings if finding.check == "links"}
    for link in report.links:
        if link.nodes not in slow:
            yield "links", link.name, "ok", _times(link), ""


def _merged(findings: Iterable[Finding]) -> Iterable[tuple[Finding, list[str]]]:
    """Returns findings, errors first, and the nodes of those that differ in nothing else."""
    merged: dict[Finding, list[str]] = {}
    for finding in errors_first(findings):
        merged.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    return merged.items()


def _times(link: MeasuredLink) -> str:
    """Returns latency and bandwidth of a message, and the time of an all-reduce."""
    figures = [f"{link.num_ranks} ranks, {link.backend} ({link.source})"]
    messages = _of(link.times, "sendrecv")
    sums = _of(link.times, "all_reduce")
    if messages:
        bandwidth = messages[-1].size_bytes / (messages[-1].typical_us * 1e3)
        figures.append(f"one way {messages[0].typical_us:.0f} us, {bandwidth:.2f} GB/s")
    if sums:
        first = sums[0]
        figures.append(f"all-reduce of {first.size_bytes} bytes {first.typical_us:.0f} us")
    return "; ".join(figures)


def _of(times: Iterable[LinkTime], operation: str) -> Sequence[LinkTime]:
    selected = [time for time in times if time.operation == operation]
    return sorted(selected, key=lambda time: time.size_bytes)


def _summary(report: Report) -> str:
    counts = dict.fromkeys(Severity, 0)
    for finding in report.findings:
        counts[finding.severity] += 1
    nodes = f"{len(report.nodes)} nodes: {', '.join(report.nodes)}"
    if not report.findings:
        return f"no problems found on {nodes}"
    return f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings on {nodes}"
