"""Runs actors on every node of a cluster, and collects answers with a deadline.

Each actor is pinned to its node and reserves no CPU, so that it also starts on a full or
resource-less node. A node that does not answer is a finding, and takes no part in later steps.
"""

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.preflight.findings import Finding, error
from cluster.preflight.nodes import ClusterNode, nodes_of
from cluster.ray_compat import job_with_installed_code
from eesd_dist.errors import ConfigError

Handle = Any
"""A handle of an actor of Ray, or a reference to a result."""


@contextmanager
def connected(address: str, *, timeout_s: float) -> Iterator[list[ClusterNode]]:
    """Connects to the cluster at `HOST:PORT` or `auto`; yields its live nodes, the head first.

    Raises ConfigError if nothing accepts a connection there within `timeout_s`, or if the cluster
    refuses the token.
    """
    _require_listener(address, timeout_s)
    try:
        ray.init(
            address,
            job_config=job_with_installed_code(),
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as failure:
        raise ConfigError(
            f"no Ray cluster at {address}: {str(failure).strip().splitlines()[0]}; expected "
            "HOST:PORT of the head (`ray start --head`), and its token in RAY_AUTH_TOKEN or "
            "~/.ray/auth_token"
        ) from failure
    try:
        yield nodes_of(ray.nodes())
    finally:
        ray.shutdown()


def _require_listener(address: str, timeout_s: float) -> None:
    """Ray itself tries for five minutes to reach an address at which nothing listens."""
    host, sign, port = address.rpartition(":")
    if address == "auto":
        return
    if not (sign and host and port.isdigit()):
        raise ConfigError(f"--address is {address!r}: expected HOST:PORT of the head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError) as failure:
        raise ConfigError(
            f"no Ray cluster at {address}: {failure}; expected HOST:PORT of the head, which "
            "`ray start --head` prints"
        ) from failure


def gcs_port_of_cluster() -> int:
    """Returns the port of the connected cluster's control service."""
    return int(ray.get_runtime_context().gcs_address.rpartition(":")[2])


def start_on(
    node: ClusterNode, kind: type, *, num_gpus: int = 0, max_concurrency: int = 1, **kwargs: Any
) -> Handle:
    """Starts an actor on this node, and on no other if this one is lost.

    `max_concurrency`: calls that it runs at the same time. `kwargs`: those of its constructor.
    """
    pinned = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return (
        ray.remote(kind)
        .options(
            num_cpus=0,
            num_gpus=num_gpus,
            scheduling_strategy=pinned,
            max_concurrency=max_concurrency,
        )
        .remote(**kwargs)
    )


def collect(
    calls: Mapping[str, Handle], what: str, *, timeout_s: float
) -> tuple[dict[str, Any], list[Finding]]:
    """Waits for one answer of each node; returns answers, and a finding for each missing one.

    `what`: what the nodes were asked for, for the message.
    """
    waiting = list(calls.values())
    ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s) if calls else ([], [])
    answers: dict[str, Any] = {}
    findings: list[Finding] = []
    for node, call in calls.items():
        if call not in ready:
            findings.append(_silent(node, what, timeout_s))
            continue
        try:
            answers[node] = ray.get(call)
        except ray.exceptions.RayError as failure:
            findings.append(_failed(node, what, failure))
    return answers, findings


def _silent(node: str, what: str, timeout_s: float) -> Finding:
    return error(
        "answer",
        f"no answer within {timeout_s:g} s, asked for {what}",
        fix="look at raylet and network of this node (`ray status`); `--timeout-s` allows more",
        nodes=[node],
    )


def _failed(node: str, what: str, failure: Exception) -> Finding:
    return error(
        "answer",
        f"failed, asked for {what}: {cause_of(failure)}",
        fix="install the same version here as on the head, and look at Ray's log of this node",
        nodes=[node],
    )


def cause_of(failure: Exception) -> str:
    """Returns the last line of an error, which names the exception on the node."""
    cause = getattr(failure, "cause", None)
    text = str(failure if cause is None else cause).strip()
    return text.splitlines()[-1] if text else type(failure).__name__
