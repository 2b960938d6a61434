"""Run on a node before it joins: what is missing there, in plain lines.

    python -m cluster.preflight --cluster-file cluster/configs/onprem.yaml --cpus 4 --gpus 1

Exits 1 when anything would keep the service from coming up, 0 with warnings or nothing to say.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.checks import Finding, Requirements, Severity, check_node
from cluster.probe import NodeFacts, probe_node
from cluster.topology import load_cluster_file
from eesd_dist.errors import ConfigError


def preflight(wanted: Requirements) -> list[Finding]:
    """Holds this machine against `wanted`."""
    return check_node(probe_node(), wanted)


def report(facts: NodeFacts, findings: Sequence[Finding]) -> str:
    """One line about the node, one for each finding."""
    head = (
        f"{facts.hostname}: {facts.num_cpus} CPUs, {len(facts.gpus)} GPUs, "
        f"{facts.memory_bytes / 2**30:.1f} GiB of memory"
    )
    lines = [f"{found.severity.value:<8}{found.check:<12}{found.message}" for found in findings]
    return "\n".join([head, *(lines or ["nothing to complain of"])])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        wanted = _requirements(arguments)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    facts = probe_node()
    findings = check_node(facts, wanted)
    sys.stdout.write(report(facts, findings) + "\n")
    return int(any(found.severity is Severity.ERROR for found in findings))


def _requirements(arguments: argparse.Namespace) -> Requirements:
    wanted = Requirements(
        num_cpus=arguments.cpus,
        num_gpus=arguments.gpus,
        shm_bytes=int(arguments.shm_gib * 2**30),
        open_files=arguments.open_files,
        spans_nodes=arguments.spans_nodes,
    )
    if arguments.cluster_file is None:
        return wanted
    cluster = load_cluster_file(arguments.cluster_file)
    return replace(wanted, auth_mode=cluster.auth_mode, spans_nodes=cluster.max_workers > 0)


def _parser() -> argparse.ArgumentParser:
    defaults = Requirements()
    parser = argparse.ArgumentParser(prog="python -m cluster.preflight", description=__doc__)
    parser.add_argument("--cluster-file", type=Path, help="the `ray up` file the node belongs to")
    parser.add_argument("--cpus", type=int, default=defaults.num_cpus)
    parser.add_argument("--gpus", type=int, default=defaults.num_gpus)
    parser.add_argument("--shm-gib", type=float, default=defaults.shm_bytes / 2**30)
    parser.add_argument("--open-files", type=int, default=defaults.open_files)
    parser.add_argument("--spans-nodes", action="store_true", help="ranks stand on other nodes too")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
