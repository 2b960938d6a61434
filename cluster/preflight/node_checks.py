"""Checks whether one node meets the requirements of the service.

Pure: facts and requirements in, findings out.
"""

import ipaddress
from collections.abc import Iterator, Mapping

from cluster.preflight.findings import Finding, error, errors_first, warning
from cluster.preflight.options import Requirements
from cluster.preflight.probe import NodeFacts

MIN_PYTHON = (3, 11)


def check_node(facts: NodeFacts, requirements: Requirements) -> list[Finding]:
    """Returns all findings, errors first."""
    checks = (_software, _processors, _shared_memory, _disk, _limits, _authentication, _network)
    return errors_first(finding for check in checks for finding in check(facts, requirements))


def _software(facts: NodeFacts, requirements: Requirements) -> Iterator[Finding]:
    if tuple(int(number) for number in facts.python.split(".")[:2]) < MIN_PYTHON:
        min_version = ".".join(map(str, MIN_PYTHON))
        yield error(
            "software",
            f"found Python {facts.python}, need {min_version} or newer",
            fix=f"python{min_version}",
        )
    for name, version in facts.versions:
        if version is None:
            yield error(
                "software", f"{name} is not installed", fix="run `make install-serving` here"
            )


def _processors(facts: NodeFacts, requirements: Requirements) -> Iterator[Finding]:
    if facts.num_cpus < requirements.num_cpus:
        yield error(
            "cpu",
            f"{facts.num_cpus} CPUs usable, {requirements.num_cpus} requested: the placement group "
            "would wait for ever",
            fix="lower the ranks per node, or use a larger machine",
        )
    if len(facts.gpus) < requirements.num_gpus:
        yield error(
            "gpu",
            f"{len(facts.gpus)} GPUs seen by nvidia-smi, {requirements.num_gpus} requested",
            fix="check the driver (`nvidia-smi`), or lower the tensor-parallel size",
        )
    if facts.gpus and facts.nccl is None:
        severity = error if requirements.num_gpus else warning
        yield severity(
            "gpu",
            f"{len(facts.gpus)} GPUs seen by nvidia-smi and none by torch "
            f"{dict(facts.versions).get('torch')}",
            fix="install a CUDA build of torch for this driver, and pass the GPUs to the container",
        )


def _shared_memory(facts: NodeFacts, requirements: Requirements) -> Iterator[Finding]:
    if facts.shm_bytes < requirements.shm_bytes:
        yield error(
            "shm",
            f"/dev/shm holds {_gib(facts.shm_bytes)}, {_gib(requirements.shm_bytes)} required: "
            "Ray would keep objects on disk, and NCCL may fail",
            fix="`docker run --shm-size`, a Memory emptyDir at /dev/shm in Kubernetes, or "
            "`mount -o remount,size=... /dev/shm`; `--shm-gib` changes what is required",
        )


def _disk(facts: NodeFacts, requirements: Requirements) -> Iterator[Finding]:
    if facts.disk_free_bytes < requirements.disk_free_bytes:
        yield error(
            "disk",
            f"{_gib(facts.disk_free_bytes)} free for {facts.disk_folder}, "
            f"{_gib(requirements.disk_free_bytes)} required",
            fix="free some, or set TMPDIR and `ray start --temp-dir` to a larger disk",
        )


def _limits(facts: NodeFacts, requirements: Requirements) -> Iterator[Finding]:
    # RLIM_INFINITY is negative.
    if 0 <= facts.open_files < requirements.open_files:
        yield warning(
            "open_files",
            f"{facts.open_files} open files allowed, {requirements.open_files} required",
            fix=f"`ulimit -n {requirements.open_files}` before `ray start`",
        )
    if facts.gpus and facts.memlock_bytes >= 0:
        message = f"{facts.memlock_bytes} bytes of memory may be locked, no limit required"
        fix = "`ulimit -l unlimited` before `ray start`; `--ulimit memlock=-1` in a container"
        # RDMA registers its buffers; without it NCCL only pins small ones.
        severity = error if facts.has_infiniband else warning
        yield severity("memlock", message, fix=fix)


def _authentication(facts: NodeFacts, requirements: Requirements) -> Iterator[Finding]:
    mode = facts.ray_auth_mode
    if mode is None:
        yield error(
            "auth",
            "RAY_AUTH_MODE is not set: Ray's commands would choose different defaults and reject "
            "each other",
            fix=f"export RAY_AUTH_MODE={requirements.auth_mode or 'token'} on every node",
        )
        return
    if requirements.auth_mode is not None and mode != requirements.auth_mode:
        yield error(
            "auth",
            f"RAY_AUTH_MODE is {mode} here and {requirements.auth_mode} in the cluster file",
            fix=f"export RAY_AUTH_MODE={requirements.auth_mode}",
        )
    if mode == "token" and not facts.has_ray_token:
        yield error(
            "auth",
            "RAY_AUTH_MODE is token and this node has no token",
            fix="copy ~/.ray/auth_token from the head, or create one there with "
            "`ray get-auth-token --generate`",
        )


def _network(facts: NodeFacts, requirements: Requirements) -> Iterator[Finding]:
    if not requirements.spans_nodes:
        return
    if facts.address is None:
        yield warning(
            "name",
            f"{facts.hostname} does not resolve: each rendezvous would wait several seconds for a "
            "name server",
            fix="add it to /etc/hosts on every node",
        )
    elif ipaddress.ip_address(facts.address).is_loopback:
        yield warning(
            "name",
            f"{facts.hostname} resolves to {facts.address}, which other nodes cannot reach",
            fix="set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME with GPUs) to the interface they "
            "can reach",
        )
    yield from _interfaces(facts, dict(facts.nccl_environment), requirements.interface)


def _interfaces(
    facts: NodeFacts, environment: Mapping[str, str], chosen: str | None
) -> Iterator[Finding]:
    names = [interface.name for interface in facts.interfaces]
    if chosen is not None and chosen not in names:
        yield _no_interface("--interface", chosen, names)
    gloo = environment.get("GLOO_SOCKET_IFNAME")
    # Gloo takes a list of exact names.
    for name in (gloo or "").split(","):
        if name and name not in names:
            yield _no_interface("GLOO_SOCKET_IFNAME", name, names)
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    # NCCL takes prefixes: `=` selects exact names; `^` excludes, so no name can be missing.
    if nccl and not nccl.startswith("^"):
        for name in nccl.removeprefix("=").split(","):
            exact = nccl.startswith("=")
            if not any(present == name if exact else present.startswith(name) for present in names):
                yield _no_interface("NCCL_SOCKET_IFNAME", name, names)
    if facts.gpus and "NCCL_SOCKET_IFNAME" not in environment:
        yield warning(
            "interface",
            "NCCL_SOCKET_IFNAME is not set: NCCL may pick a container bridge that the other nodes "
            "cannot reach",
            fix=f"set it to one of {', '.join(names)}",
        )


def _no_interface(source: str, name: str, names: list[str]) -> Finding:
    return error(
        "interface",
        f"{source} names {name}, this node has {', '.join(names)}",
        fix=f"set {source} to the interface that the other nodes reach",
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
