"""Checks a node before it joins a cluster: `eesd preflight`."""

from collections.abc import Sequence
from dataclasses import replace

from typer import echo

from cluster.preflight.checks import Finding, Requirements, Severity, check_node
from cluster.preflight.options import PreflightOptions
from cluster.preflight.probe import NodeFacts, probe_node
from cluster.topology import load_cluster_file


def report(facts: NodeFacts, findings: Sequence[Finding]) -> str:
    """Returns one line about the node, and one for each finding."""
    head = (
        f"{facts.hostname}: {facts.num_cpus} CPUs, {len(facts.gpus)} GPUs, "
        f"{facts.memory_bytes / 2**30:.1f} GiB of memory"
    )
    lines = [f"{found.severity.value:<8}{found.check:<12}{found.message}" for found in findings]
    return "\n".join([head, *(lines or ["no problems found"])])


def main(options: PreflightOptions) -> int:
    """Prints the findings; returns 1 if the service would not start on this node."""
    wanted = Requirements(
        num_cpus=options.cpus,
        num_gpus=options.gpus,
        shm_bytes=int(options.shm_gib * 2**30),
        open_files=options.open_files,
        spans_nodes=options.spans_nodes,
    )
    if options.cluster_file is not None:
        cluster = load_cluster_file(options.cluster_file)
        spans_nodes = cluster.max_workers > 0
        wanted = replace(wanted, auth_mode=cluster.auth_mode, spans_nodes=spans_nodes)
    facts = probe_node()
    findings = check_node(facts, wanted)
    echo(report(facts, findings))
    return int(any(found.severity is Severity.ERROR for found in findings))
