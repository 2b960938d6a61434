from dataclasses import replace
from pathlib import Path

import pytest
from cluster.preflight.checks import Finding, Requirements, Severity, check_node

from cluster.preflight.probe import NodeFacts, probe_node
from serve_app.cli.main import main

GIB = 2**30
HEALTHY = NodeFacts(
    hostname="worker-1",
    address="10.0.0.11",
    num_cpus=16,
    gpus=("NVIDIA H100, 81559 MiB, 580.1",),
    memory_bytes=64 * GIB,
    shm_bytes=8 * GIB,
    open_files=1_000_000,
    python=(3, 11),
    versions=(("torch", "2.13.0+cpu"), ("ray", "2.60.0")),
    ray_auth_mode="token",
    has_ray_token=True,
    nccl_environment=(("NCCL_SOCKET_IFNAME", "eth"),),
    interfaces=("lo", "eth0"),
)
WANTED = Requirements(
    num_cpus=8,
    num_gpus=1,
    memory_bytes=32 * GIB,
    auth_mode="token",
    versions=(("torch", "2.13.0"), ("ray", "2.60.0")),
    spans_nodes=True,
)
ONPREM = Path(__file__).parents[3] / "cluster" / "configs" / "onprem.yaml"


def _only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_healthy_node_has_no_findings() -> None:
    assert check_node(HEALTHY, WANTED) == []


@pytest.mark.parametrize(
    ("change", "check", "severity"),
    [
        ({"python": (3, 10)}, "python", Severity.ERROR),
        ({"versions": (("torch", None), ("ray", "2.60.0"))}, "software", Severity.ERROR),
        ({"versions": (("torch", "2.12.0"), ("ray", "2.60.0"))}, "software", Severity.ERROR),
        ({"num_cpus": 2}, "cpu", Severity.ERROR),
        ({"gpus": ()}, "gpu", Severity.ERROR),
        ({"memory_bytes": GIB}, "memory", Severity.ERROR),
        ({"shm_bytes": GIB // 16}, "shm", Severity.WARNING),
        ({"open_files": 1024}, "open_files", Severity.WARNING),
        ({"ray_auth_mode": None}, "auth", Severity.ERROR),
        ({"ray_auth_mode": "disabled"}, "auth", Severity.ERROR),
        ({"has_ray_token": False}, "auth", Severity.ERROR),
        ({"address": None}, "name", Severity.ERROR),
        ({"address": "127.0.1.1"}, "name", Severity.WARNING),
        ({"nccl_environment": ()}, "nccl", Severity.WARNING),
        ({"nccl_environment": (("NCCL_SOCKET_IFNAME", "ib"),)}, "interface", Severity.ERROR),
        ({"nccl_environment": (("NCCL_SOCKET_IFNAME", "=eth"),)}, "interface", Severity.ERROR),
    ],
)
def test_each_fault_gives_one_finding(
    change: dict[str, object], check: str, severity: Severity
) -> None:
    finding = _only(check_node(replace(HEALTHY, **change), WANTED))  # type: ignore[arg-type]
    assert (finding.check, finding.severity) == (check, severity)


def test_gloo_wants_exact_interface_names_and_nccl_takes_prefixes() -> None:
    facts = replace(
        HEALTHY,
        nccl_environment=(("GLOO_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "^docker")),
    )
    finding = _only(check_node(facts, WANTED))
    assert finding.message.startswith("GLOO_SOCKET_IFNAME names eth")


def test_an_unlimited_number_of_files_is_enough() -> None:
    assert check_node(replace(HEALTHY, open_files=-1), WANTED) == []


def test_errors_come_before_warnings() -> None:
    facts = replace(HEALTHY, open_files=10, ray_auth_mode=None)
    severities = [finding.severity for finding in check_node(facts, WANTED)]
    assert severities == [Severity.ERROR, Severity.WARNING]


def test_a_single_node_is_not_asked_about_its_network() -> None:
    lonely = replace(HEALTHY, address=None, nccl_environment=())
    assert check_node(lonely, replace(WANTED, spans_nodes=False)) == []


def test_this_machine_can_be_probed() -> None:
    facts = probe_node()
    assert facts.num_cpus >= 1
    assert dict(facts.versions)["ray"]
    assert "lo" in facts.interfaces


def test_the_command_exits_with_one_when_something_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preflight", "--cpus", "100000"]) == 1
    assert "100000 requested" in capsys.readouterr().out


def test_the_command_takes_the_auth_mode_from_the_cluster_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(["preflight", "--cluster-file", str(ONPREM)]) == 1
    assert "RAY_AUTH_MODE is disabled here and token in the cluster file" in capsys.readouterr().out


def test_a_broken_cluster_file_exits_with_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--cluster-file", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err
