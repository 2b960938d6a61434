"""Checks of the nodes against each other, and against a cluster file.

Pure: facts by node in, findings out. Node names are those of `ClusterNode`; the first node is the
head.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from cluster.deployment_files import Deployment, StageNeeds
from cluster.preflight.findings import Finding, error, warning
from cluster.preflight.nodes import ClusterNode
from cluster.preflight.probe import DIGITS, ClockOffset, Interface, NodeFacts, WeightsFacts

T = TypeVar("T")


def check_number(nodes: Sequence[ClusterNode], deployment: Deployment) -> Iterator[Finding]:
    """Every node that the file starts at once must have joined."""
    if len(nodes) < deployment.min_nodes:
        yield error(
            "nodes",
            f"{len(nodes)} nodes in the cluster ({', '.join(node.name for node in nodes)}), "
            f"{deployment.path.name} starts {deployment.min_nodes}",
            fix="`ray status` and the log of `ray up` or of the pods show what the others wait for",
        )


def check_stages(nodes: Sequence[ClusterNode], stages: Sequence[StageNeeds]) -> Iterator[Finding]:
    """Names each stage without a node that has its labels, resources and GPUs."""
    for stage in stages:
        if not any(node.suits(stage) for node in nodes):
            needs = [f"label {name}={value}" for name, value in stage.labels]
            needs += [f"resource {name} {amount:g}" for name, amount in stage.resources]
            needs += [f"GPU {stage.num_gpus:g}"] if stage.num_gpus else []
            yield error(
                "placement",
                f"no node suits a {stage.name} rank, which needs {', '.join(needs) or 'nothing'}",
                fix="start a node with these (`ray start --resources --labels`), or change "
                f"placement.{stage.name}",
            )


def check_gpus(node: ClusterNode, facts: NodeFacts) -> Iterator[Finding]:
    """Ray must not count GPUs that are not there."""
    if node.num_gpus > len(facts.gpus):
        yield error(
            "gpu",
            f"Ray has {node.num_gpus} GPUs on this node, nvidia-smi sees {len(facts.gpus)}",
            fix="`ray start` without --num-gpus, or check the driver (`nvidia-smi`)",
            nodes=[node.name],
        )


def check_versions(facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """All nodes must have the versions of the majority; among equals, those of the head."""
    readers: dict[str, Callable[[NodeFacts], str | None]] = {
        "python": lambda node: node.python,
        "torch": lambda node: _installed(node, "torch"),
        "ray": lambda node: _installed(node, "ray"),
        "eesd-dist": lambda node: _installed(node, "eesd-dist"),
        "NCCL": lambda node: node.nccl,
        "GPU driver": lambda node: node.driver,
    }
    for name, read in readers.items():
        # A head without a GPU has no NCCL and no driver: nothing to compare.
        versions = {
            node: version for node, node_facts in facts.items() if (version := read(node_facts))
        }
        common = _most_common(list(versions.values()))
        severity = warning if name == "GPU driver" else error
        for node, version in versions.items():
            if version != common:
                same = next(
                    other for other, other_version in versions.items() if other_version == common
                )
                yield severity(
                    "versions",
                    f"found {name} {version}, other nodes have {common} ({same})",
                    fix=f"install {name} {common} on this node, or the same image on all nodes",
                    nodes=[node],
                )


def check_clocks(offsets: Mapping[str, ClockOffset], *, max_skew_s: float) -> Iterator[Finding]:
    """No clock may differ from that of the head by more than `max_skew_s`."""
    for node, offset in offsets.items():
        if offset.least_s > max_skew_s:
            where = "ahead of" if offset.offset_s > 0 else "behind"
            yield error(
                "clock",
                f"the clock is {abs(offset.offset_s):.3f} s {where} that of the head (within "
                f"{offset.uncertainty_s * 1e3:.1f} ms), {max_skew_s:g} s allowed",
                fix="start chrony or systemd-timesyncd on this node (`timedatectl set-ntp true`)",
                nodes=[node],
            )


def check_weights(weights: Mapping[str, WeightsFacts]) -> Iterator[Finding]:
    """The files must be readable, and the same on all nodes."""
    digests = {node: files.digest for node, files in weights.items() if files.digest is not None}
    common = _most_common(list(digests.values()))
    for node, files in weights.items():
        if files.problem is not None:
            yield error(
                "weights",
                f"{files.folder} cannot be read on this node: {files.problem}",
                fix="copy the folder to the same path on every node, or mount it there",
                nodes=[node],
            )
        elif files.digest != common:
            same = next(other for other, digest in digests.items() if digest == common)
            yield error(
                "weights",
                f"{files.folder} has other weights than {same}: {_short(files.digest)} and "
                f"{_short(common)} are their digests",
                fix="copy the same files to every node",
                nodes=[node],
            )


def check_mtus(used: Mapping[str, Interface]) -> Iterator[Finding]:
    """Interfaces of one network with different packet sizes stall large messages."""
    common = _most_common([interface.mtu for interface in used.values()])
    for node, interface in used.items():
        if interface.mtu != common:
            yield warning(
                "interface",
                f"{interface.name} has MTU {interface.mtu}, other nodes have {common}",
                fix=f"`ip link set {interface.name} mtu {common}`",
                nodes=[node],
            )


def _installed(facts: NodeFacts, name: str) -> str | None:
    """Returns the version without its local part (+cpu, +cu130), which names the build."""
    version = dict(facts.versions).get(name)
    return None if version is None else version.partition("+")[0]


def _most_common(values: Sequence[T]) -> T | None:
    """Returns the first among equals."""
    return Counter(values).most_common(1)[0][0] if values else None


def _short(digest: str | None) -> str:
    return f"{(digest or '')[:DIGITS]}..."
