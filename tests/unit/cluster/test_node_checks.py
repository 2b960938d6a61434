from dataclasses import replace

import pytest

from cluster.preflight.findings import Finding, Severity
from cluster.preflight.node_checks import check_node
from cluster.preflight.options import Requirements
from cluster.preflight.probe import probe_node
from tests.support.cluster_facts import GIB, HEALTHY

WANTED = Requirements(
    num_cpus=8,
    num_gpus=1,
    auth_mode="token",
    spans_nodes=True,
)


def _only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_healthy_node_has_no_findings() -> None:
    assert check_node(HEALTHY, WANTED) == []


@pytest.mark.parametrize(
    ("change", "check", "severity"),
    [
        ({"python": "3.10.12"}, "software", Severity.ERROR),
        ({"versions": (("torch", None), ("ray", "2.60.0"))}, "software", Severity.ERROR),
        ({"num_cpus": 2}, "cpu", Severity.ERROR),
        ({"gpus": ()}, "gpu", Severity.ERROR),
        ({"shm_bytes": GIB // 16}, "shm", Severity.ERROR),
        ({"disk_free_bytes": GIB}, "disk", Severity.ERROR),
        ({"memlock_bytes": 65536}, "memlock", Severity.WARNING),
        ({"memlock_bytes": 65536, "has_infiniband": True}, "memlock", Severity.ERROR),
        ({"nccl": None}, "gpu", Severity.ERROR),
        ({"open_files": 1024}, "open_files", Severity.WARNING),
        ({"ray_auth_mode": None}, "auth", Severity.ERROR),
        ({"ray_auth_mode": "disabled"}, "auth", Severity.ERROR),
        ({"has_ray_token": False}, "auth", Severity.ERROR),
        ({"address": None}, "name", Severity.WARNING),
        ({"address": "127.0.1.1"}, "name", Severity.WARNING),
        ({"nccl_environment": ()}, "interface", Severity.WARNING),
        ({"nccl_environment": (("NCCL_SOCKET_IFNAME", "ib"),)}, "interface", Severity.ERROR),
        ({"nccl_environment": (("NCCL_SOCKET_IFNAME", "=eth"),)}, "interface", Severity.ERROR),
    ],
)
def test_each_fault_gives_one_finding(
    change: dict[str, object], check: str, severity: Severity
) -> None:
    finding = _only(check_node(replace(HEALTHY, **change), WANTED))  # type: ignore[arg-type]
    assert (finding.check, finding.severity) == (check, severity)
    assert finding.message
    assert finding.fix


def test_gloo_wants_exact_interface_names_and_nccl_takes_prefixes() -> None:
    facts = replace(
        HEALTHY,
        nccl_environment=(("GLOO_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "^docker")),
    )
    finding = _only(check_node(facts, WANTED))
    assert finding.message.startswith("GLOO_SOCKET_IFNAME names eth")


def test_a_chosen_interface_must_exist() -> None:
    finding = _only(check_node(HEALTHY, replace(WANTED, interface="ib0")))
    assert finding.message == "--interface names ib0, this node has lo, eth0"


def test_a_node_without_gpus_needs_no_locked_memory() -> None:
    facts = replace(HEALTHY, gpus=(), nccl=None, memlock_bytes=65536)
    assert check_node(facts, replace(WANTED, num_gpus=0)) == []


def test_the_driver_is_the_last_field_of_a_gpu() -> None:
    assert HEALTHY.driver == "580.1"
    assert replace(HEALTHY, gpus=()).driver is None


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
    assert "127.0.0.1" in {
        address for interface in facts.interfaces for address in interface.addresses
    }
    assert facts.disk_free_bytes > 0
