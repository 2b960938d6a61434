"""`eesd preflight`: checks this node, or all nodes of a cluster."""

import json
import os
from pathlib import Path

from typer import echo

from cluster.deployment_files import Deployment, load_deployment
from cluster.preflight.cluster_checks import check_weights
from cluster.preflight.link_checks import LinkLimits
from cluster.preflight.node_checks import check_node
from cluster.preflight.options import PreflightOptions, Requirements
from cluster.preflight.probe import probe_node, read_weights
from cluster.preflight.report import Report, node_checks, print_report


def main(options: PreflightOptions) -> int:
    """Prints what was found; returns 1 if the service would not start."""
    if options.address is not None:
        _prepare_for_ray()
    deployment = None if options.cluster_file is None else load_deployment(options.cluster_file)
    report = (
        _this_node(options, deployment)
        if options.address is None
        else _all_nodes(options, options.address, deployment)
    )
    if options.json:
        echo(json.dumps(report.as_json(), indent=2))
    else:
        print_report(report)
    return 0 if report.is_healthy else 1


def _prepare_for_ray() -> None:
    """Sets what Ray reads when it is imported: the mode of its nodes, and that drivers do not print
    reports of dead nodes between our lines (`log_to_driver=False` does not stop those)."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.update({"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"})


def _this_node(options: PreflightOptions, deployment: Deployment | None) -> Report:
    facts, requirements = probe_node(), _requirements(options, deployment)
    findings = check_node(facts, requirements)
    checks = node_checks(spans_nodes=requirements.spans_nodes)
    if options.model is not None:
        weights = read_weights(options.model)
        findings += check_weights({facts.hostname: weights})
        checks = (*checks, "weights")
    return Report(
        checks=checks,
        nodes=(facts.hostname,),
        facts=((facts.hostname, facts),),
        findings=tuple(findings),
    )


def _all_nodes(options: PreflightOptions, address: str, deployment: Deployment | None) -> Report:
    # Ray is imported where a cluster is checked.
    from cluster.preflight.cluster_run import ClusterRequest, check_cluster
    from cluster.preflight.link_runs import LinkSettings

    model, head = _weights(options, deployment)
    links = LinkSettings(
        sizes=options.link_bytes,
        interface=options.interface,
        nccl_tests=options.nccl_tests,
        uses_mpirun=options.mpirun,
        num_iterations=options.iterations,
        start_timeout_s=options.timeout_s,
    )
    request = ClusterRequest(
        address=address,
        requirements=_requirements(options, deployment),
        deployment=deployment,
        model=model,
        head=head,
        max_skew_s=options.max_skew_s,
        timeout_s=options.timeout_s,
        connect_timeout_s=options.connect_timeout_s,
        links=None if options.skip_links else links,
        limits=LinkLimits(
            slow_factor=options.slow_factor,
            max_latency_us=options.max_link_us,
            min_bandwidth_gbps=options.min_link_gbps,
        ),
    )
    return check_cluster(request)


def _requirements(options: PreflightOptions, deployment: Deployment | None) -> Requirements:
    return Requirements(
        num_cpus=options.cpus,
        num_gpus=options.gpus,
        shm_bytes=int(options.shm_gib * 2**30),
        disk_free_bytes=int(options.disk_gib * 2**30),
        open_files=options.open_files,
        auth_mode=None if deployment is None else deployment.auth_mode,
        spans_nodes=options.spans_nodes or (deployment is not None and deployment.spans_nodes),
        interface=options.interface,
    )


def _weights(
    options: PreflightOptions, deployment: Deployment | None
) -> tuple[Path | None, Path | None]:
    """Returns the folders of model and exit head to compare; an option precedes the file."""
    application = None if deployment is None else deployment.application
    if options.model is not None or application is None:
        return options.model, None
    return application.model, application.head
