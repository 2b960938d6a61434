"""Findings of a check: one value for every kind of check."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    ERROR = "error"
    """The service would not start, or would hang."""
    WARNING = "warning"
    """It would be slow, or hard to debug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An unmet requirement."""

    check: str
    severity: Severity
    message: str
    """Sentence with what was found, and what was expected."""
    fix: str
    nodes: tuple[str, ...] = ()
    """Nodes it concerns; two for a connection."""


def error(check: str, message: str, *, fix: str, nodes: Iterable[str] = ()) -> Finding:
    return Finding(
        check=check, severity=Severity.ERROR, message=message, fix=fix, nodes=tuple(nodes)
    )


def warning(check: str, message: str, *, fix: str, nodes: Iterable[str] = ()) -> Finding:
    return Finding(
        check=check, severity=Severity.WARNING, message=message, fix=fix, nodes=tuple(nodes)
    )


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)


def errors_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts by severity; the order within each stays."""
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)
