"""Preflight over three hosts: nothing to say about healthy ones, and each fault named by its node.

Every fault is made under the running Ray of one host, and undone after its test.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.link_figures import read_links
from cluster.ports import ClusterPorts
from tests.support.hosts import Hosts
from tests.support.ray_hosts import RayHosts
from tests.support.slow_link import slowed

_PORTS = ClusterPorts()
_RAY_START = {
    "node-manager-port": _PORTS.node_manager,
    "object-manager-port": _PORTS.object_manager,
    "min-worker-port": _PORTS.min_worker,
    "max-worker-port": _PORTS.max_worker,
}
_DELAY_S = 0.015
_PATIENT = ("--slow-factor", "5", "--timeout-s", "100")
"""For a machine that other work keeps busy."""
_RUN_S = 240.0


@pytest.fixture(scope="module")
def ray_hosts() -> Iterator[RayHosts]:
    """Host 1 is for drafting, the two others for verifying."""
    hosts = Hosts(3, prefix="eesdpf", subnet="10.77.47")
    stages = {0: {"eesd_verify": 1.0}, 1: {"eesd_draft": 1.0}, 2: {"eesd_verify": 1.0}}
    with hosts, RayHosts(hosts, resources=stages, ports=_RAY_START) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster_file(ray_hosts: RayHosts, tiny_model: Path) -> Path:
    """A `ray up` file of these hosts, which deploys the tiny model."""
    folder = ray_hosts.hosts.folder
    hosts = [ray_hosts.hosts.address(host) for host in range(3)]
    stages = {name: {"resources": {f"eesd_{name}": 1}} for name in ("draft", "verify")}
    arguments = {"engine": {"model": {"path": str(tiny_model)}}, "placement": stages}
    application = {"import_path": "serve_app.app:build_app", "args": arguments}
    serve = folder / "serve.yaml"
    serve.write_text(yaml.safe_dump({"applications": [application]}))
    start = "ray start " + " ".join(f"--{name}={port}" for name, port in _RAY_START.items())
    flags = " ".join(
        f"RAY_health_check_{name}=1000" for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    up = folder / "up.yaml"
    up.write_text(
        yaml.safe_dump(
            {
                "cluster_name": "hosts",
                "provider": {"type": "local", "head_ip": hosts[0], "worker_ips": hosts[1:]},
                "auth": {"ssh_user": "eesd"},
                "head_start_ray_commands": [
                    f"export RAY_AUTH_MODE=token {flags}; {start} --head --port={_PORTS.gcs}",
                    f"serve deploy {serve}",
                ],
                "worker_start_ray_commands": [f"export RAY_AUTH_MODE=token; {start}"],
            }
        )
    )
    return up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    status: int
    report: dict[str, Any]
    path: Path
    """Of the JSON."""

    def errors(self) -> list[tuple[str, list[str], str]]:
        """Returns check, nodes and message of each error."""
        return [
            (finding["check"], finding["nodes"], finding["message"])
            for finding in self.report["findings"]
            if finding["severity"] == "error"
        ]


class _Preflight:
    """Runs the command on the head."""

    def __init__(self, cluster: RayHosts, cluster_file: Path) -> None:
        self.cluster = cluster
        self._words = ["preflight", "--address", cluster.address, "--json"]
        self._words += ["--cluster-file", str(cluster_file)]

    def run(self, *words: str) -> _Outcome:
        path = self.cluster.hosts.folder / "preflight.json"
        process = self.cluster.run(0, ["-m", "serve_app.cli.main", *self._words, *words], log=path)
        try:
            status = process.wait(_RUN_S)
        finally:
            process.kill()
        text = path.read_text()
        assert text.startswith("{"), text
        return _Outcome(status=status, report=json.loads(text), path=path)

    def without_links(self, *words: str) -> _Outcome:
        return self.run("--skip-links", *words)

    def address(self, host: int) -> str:
        return self.cluster.hosts.address(host)


@pytest.fixture(scope="module")
def preflight(ray_hosts: RayHosts, cluster_file: Path) -> _Preflight:
    return _Preflight(ray_hosts, cluster_file)


def _only(errors: Sequence[tuple[str, list[str], str]]) -> tuple[str, list[str], str]:
    (error,) = errors
    return error


def test_healthy_hosts_pass_and_their_links_are_figures_for_the_planner(
    preflight: _Preflight,
) -> None:
    outcome = preflight.run(*_PATIENT)
    assert outcome.errors() == []
    assert outcome.status == 0
    assert len(outcome.report["facts"]) == 3
    links = read_links(outcome.path)
    assert {(link.operation, link.scope, link.num_ranks) for link in links} == {
        (operation, scope, num_ranks)
        for operation in ("sendrecv", "broadcast", "all_reduce")
        for scope, num_ranks in (("node", 2), ("nodes", 2), ("nodes", 3))
    }
    assert all(seconds > 0 for link in links for _, seconds in link.times)
    measured = {tuple(link["nodes"]) for link in outcome.report["measured_links"]}
    assert len(measured) == 3 + 3 + 1  # within, by pairs, over all


def test_a_link_slowed_by_a_relay_is_named_and_no_other(preflight: _Preflight) -> None:
    with slowed(preflight.cluster.hosts, 1, 2, delay_s=_DELAY_S):
        outcome = preflight.run(*_PATIENT, "--iterations", "3", "--link-bytes", "4096")
    check, nodes, message = _only(outcome.errors())
    assert (check, nodes) == ("links", [preflight.address(1), preflight.address(2)])
    assert "is slow" in message
    assert outcome.status == 1


def test_a_blocked_port_is_named_with_both_hosts(preflight: _Preflight) -> None:
    hosts = preflight.cluster.hosts
    hosts.block(1, _PORTS.object_manager)
    try:
        outcome = preflight.without_links("--connect-timeout-s", "1")
    finally:
        hosts.unblock(1)
    blocked, to = preflight.address(1), f"port {_PORTS.object_manager} (object manager)"
    assert {message for _, _, message in outcome.errors()} == {
        f"{preflight.address(other)} cannot connect to {blocked} {to}: no answer within 1 s"
        for other in (0, 2)
    }
    assert {check for check, _, _ in outcome.errors()} == {"ports"}
    assert outcome.status == 1


def test_missing_weights_are_named_by_their_host(preflight: _Preflight, tiny_model: Path) -> None:
    with preflight.cluster.mounted(2, ["-t", "tmpfs", "none"], tiny_model):
        outcome = preflight.without_links()
    check, nodes, message = _only(outcome.errors())
    assert (check, nodes) == ("weights", [preflight.address(2)])
    assert f"{tiny_model} cannot be read on this node: it has no config.json" in message
    assert outcome.status == 1


def test_other_weights_are_named_by_their_host(
    preflight: _Preflight, tiny_model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    (weights,) = copy.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with preflight.cluster.mounted(1, ["--bind", str(copy)], tiny_model):
        outcome = preflight.without_links()
    check, nodes, message = _only(outcome.errors())
    assert (check, nodes) == ("weights", [preflight.address(1)])
    assert f"has other weights than {preflight.address(0)}" in message
    assert outcome.status == 1


def test_a_tiny_shared_memory_is_named_by_its_host(preflight: _Preflight) -> None:
    tiny = ["-t", "tmpfs", "-o", "size=64m", "none"]
    with preflight.cluster.mounted(1, tiny, Path("/dev/shm")):
        outcome = preflight.without_links()
    check, nodes, message = _only(outcome.errors())
    assert (check, nodes) == ("shm", [preflight.address(1)])
    assert "/dev/shm holds 0.1 GiB, 2.0 GiB required" in message
    assert outcome.status == 1


def test_a_wrong_version_is_named_by_its_host(preflight: _Preflight, tmp_path: Path) -> None:
    installed = metadata.distribution("torch")
    text = str(installed.read_text("METADATA"))
    other = tmp_path / "METADATA"
    other.write_text(text.replace(f"Version: {installed.version}", "Version: 2.12.0"))
    (metadata_file,) = [file.locate() for file in installed.files or () if file.name == "METADATA"]
    with preflight.cluster.mounted(2, ["--bind", str(other)], Path(metadata_file)):
        outcome = preflight.without_links()
    check, nodes, message = _only(outcome.errors())
    assert (check, nodes) == ("versions", [preflight.address(2)])
    assert "found torch 2.12.0, other nodes have" in message
    assert outcome.status == 1


def test_a_host_that_does_not_answer_is_named(preflight: _Preflight) -> None:
    preflight.cluster.suspend_raylet(2)  # last: Ray gives the node up
    outcome = preflight.without_links("--timeout-s", "15")
    silent = [nodes for check, nodes, _ in outcome.errors() if check == "answer"]
    assert silent == [[preflight.address(2)]]
    assert outcome.status == 1
