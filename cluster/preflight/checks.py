"""Checks whether a node meets the requirements of the service.

Pure: facts and requirements in, findings out. A finding states what was found, what was expected
and what to do. An error means that the service would not start or would hang; a warning means that
it would be slow or hard to debug.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from cluster.preflight.probe import NodeFacts
from cluster.topology import AuthMode

MIN_PYTHON = (3, 11)


class Severity(Enum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One unmet requirement."""

    check: str
    severity: Severity
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements of one node."""

    num_cpus: int = 1
    num_gpus: int = 0
    memory_bytes: int = 0
    shm_bytes: int = 2 * 2**30
    """Ray's object store and NCCL's shared-memory transport both use /dev/shm."""
    open_files: int = 65_536
    auth_mode: AuthMode | None = None
    """None accepts any explicit choice."""
    versions: tuple[tuple[str, str], ...] = ()
    """Exact versions that every node must have."""
    spans_nodes: bool = False
    """Whether ranks on other machines must reach this one."""


def check_node(facts: NodeFacts, wanted: Requirements) -> list[Finding]:
    """Returns all findings, errors first."""
    checks = (_software, _processors, _memory, _limits, _authentication, _network)
    findings = [finding for check in checks for finding in check(facts, wanted)]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def _software(facts: NodeFacts, wanted: Requirements) -> Iterator[Finding]:
    if facts.python < MIN_PYTHON:
        yield _error("python", f"found Python {facts.python}, need {MIN_PYTHON} or newer")
    installed = dict(facts.versions)
    for name, version in installed.items():
        if version is None:
            yield _error("software", f"{name} is not installed: run `make install` on this node")
    for name, version in wanted.versions:
        found = installed.get(name)
        # A local part (+cpu, +cu130) names the build, not the version.
        if found is not None and found.partition("+")[0] != version:
            yield _error(
                "software", f"found {name} {found}, the cluster uses {version}: install that here"
            )


def _processors(facts: NodeFacts, wanted: Requirements) -> Iterator[Finding]:
    if facts.num_cpus < wanted.num_cpus:
        yield _error(
            "cpu",
            f"{facts.num_cpus} CPUs usable, {wanted.num_cpus} requested: the placement group "
            "would wait for ever; lower the ranks per node or use a larger machine",
        )
    if len(facts.gpus) < wanted.num_gpus:
        yield _error(
            "gpu",
            f"{len(facts.gpus)} GPUs seen by nvidia-smi, {wanted.num_gpus} requested: check the "
            "driver, or lower the tensor-parallel size",
        )


def _memory(facts: NodeFacts, wanted: Requirements) -> Iterator[Finding]:
    if facts.memory_bytes < wanted.memory_bytes:
        yield _error(
            "memory",
            f"{_gib(facts.memory_bytes)} of memory, {_gib(wanted.memory_bytes)} requested",
        )
    if facts.shm_bytes < wanted.shm_bytes:
        yield _warning(
            "shm",
            f"/dev/shm holds {_gib(facts.shm_bytes)}, {_gib(wanted.shm_bytes)} required: in a "
            "container pass --shm-size, or Ray falls back to /tmp and NCCL may fail",
        )


def _limits(facts: NodeFacts, wanted: Requirements) -> Iterator[Finding]:
    # RLIM_INFINITY is negative.
    if 0 <= facts.open_files < wanted.open_files:
        yield _warning(
            "open_files",
            f"{facts.open_files} open files allowed, {wanted.open_files} required: run "
            f"`ulimit -n {wanted.open_files}` before `ray start`",
        )


def _authentication(facts: NodeFacts, wanted: Requirements) -> Iterator[Finding]:
    mode = facts.ray_auth_mode
    if mode is None:
        yield _error(
            "auth",
            "RAY_AUTH_MODE is not set: Ray's commands would choose different defaults and reject "
            f"each other; export RAY_AUTH_MODE={wanted.auth_mode or 'token'} on every node",
        )
        return
    if wanted.auth_mode is not None and mode != wanted.auth_mode:
        yield _error(
            "auth", f"RAY_AUTH_MODE is {mode} here and {wanted.auth_mode} in the cluster file"
        )
    if mode == "token" and not facts.has_ray_token:
        yield _error(
            "auth",
            "RAY_AUTH_MODE is token and this node has no token: copy ~/.ray/auth_token from the "
            "head, or create one there with `ray get-auth-token --generate`",
        )


def _network(facts: NodeFacts, wanted: Requirements) -> Iterator[Finding]:
    if not wanted.spans_nodes:
        return
    if facts.address is None:
        yield _error(
            "name",
            f"{facts.hostname} does not resolve: add it to /etc/hosts on every node, or each "
            "rendezvous waits several seconds for a name server",
        )
    elif ipaddress.ip_address(facts.address).is_loopback:
        yield _warning(
            "name",
            f"{facts.hostname} resolves to {facts.address}, which other nodes cannot reach: set "
            "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME with GPUs) to the interface they can",
        )
    yield from _interfaces(facts, dict(facts.nccl_environment))


def _interfaces(facts: NodeFacts, environment: Mapping[str, str]) -> Iterator[Finding]:
    gloo = environment.get("GLOO_SOCKET_IFNAME")
    # Gloo takes a list of exact names.
    for name in (gloo or "").split(","):
        if name and name not in facts.interfaces:
            yield _error("interface", _no_interface("GLOO_SOCKET_IFNAME", name, facts))
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    # NCCL takes prefixes: `=` selects exact names; `^` excludes, so no name can be missing.
    if nccl and not nccl.startswith("^"):
        for name in nccl.removeprefix("=").split(","):
            exact = nccl.startswith("=")
            if not any(i == name if exact else i.startswith(name) for i in facts.interfaces):
                yield _error("interface", _no_interface("NCCL_SOCKET_IFNAME", name, facts))
    if facts.gpus and "NCCL_SOCKET_IFNAME" not in environment:
        yield _warning(
            "nccl",
            "NCCL_SOCKET_IFNAME is not set: NCCL may pick a container bridge that the other "
            f"nodes cannot reach; interfaces here: {', '.join(facts.interfaces)}",
        )


def _no_interface(variable: str, name: str, facts: NodeFacts) -> str:
    return f"{variable} names {name}, this node has {', '.join(facts.interfaces)}"


def _error(check: str, message: str) -> Finding:
    return Finding(check=check, severity=Severity.ERROR, message=message)


def _warning(check: str, message: str) -> Finding:
    return Finding(check=check, severity=Severity.WARNING, message=message)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
