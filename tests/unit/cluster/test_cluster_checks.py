from dataclasses import replace
from pathlib import Path

import pytest

from cluster.deployment_files import Deployment, StageNeeds
from cluster.ports import ClusterPorts
from cluster.preflight.cluster_checks import (
    check_gpus,
    check_mtus,
    check_number,
    check_stages,
    check_versions,
    check_weights,
)
from cluster.preflight.findings import Severity
from cluster.preflight.nodes import nodes_of
from cluster.preflight.probe import Interface, WeightsFacts, read_weights
from tests.support.cluster_facts import HEALTHY, cluster_node, node_entry


def test_the_head_comes_first_and_dead_nodes_not_at_all() -> None:
    head = {"CPU": 1.0, "node:__internal_head__": 1.0}
    nodes = nodes_of(
        [node_entry("a"), node_entry("z", Resources=head), node_entry("b", Alive=False)]
    )
    assert [(node.name, node.is_head) for node in nodes] == [("z", True), ("a", False)]


def test_nodes_of_one_address_are_told_apart_by_their_port() -> None:
    nodes = nodes_of([node_entry("a", NodeManagerPort=1), node_entry("a", NodeManagerPort=2)])
    assert [node.name for node in nodes] == ["a:1", "a:2"]


@pytest.mark.parametrize(
    ("selector", "value", "suits"),
    [
        ("draft", "draft", True),
        ("draft", "verify", False),
        ("draft", None, False),
        ("!draft", "verify", True),
        ("!draft", None, True),
        ("in(draft,verify)", "verify", True),
        ("in(draft,verify)", None, False),
        ("!in(draft,verify)", "other", True),
    ],
)
def test_labels_select_as_in_ray(selector: str, value: str | None, suits: bool) -> None:
    stage = _stage(labels=(("stage", selector),))
    labels = {} if value is None else {"stage": value}
    assert cluster_node(Labels=labels).suits(stage) is suits


def _stage(**changes: object) -> StageNeeds:
    stage = StageNeeds(name="verify", num_gpus=0.0, resources=(), labels=())
    return replace(stage, **changes)  # type: ignore[arg-type]


def test_a_stage_that_no_node_suits_is_named_with_its_needs() -> None:
    stage = _stage(resources=(("eesd_verify", 1.0),), num_gpus=1.0)
    suited = cluster_node(Resources={"eesd_verify": 4.0, "GPU": 4.0})
    assert list(check_stages([cluster_node(), suited], [stage])) == []
    (finding,) = check_stages([cluster_node(Resources={"GPU": 4.0})], [stage])
    assert finding.message == (
        "no node suits a verify rank, which needs resource eesd_verify 1, GPU 1"
    )


def test_nodes_that_have_not_joined_are_missed() -> None:
    deployment = Deployment(
        path=Path("up.yaml"),
        min_nodes=3,
        spans_nodes=True,
        auth_mode="token",
        ports=ClusterPorts(),
        lists_ports=False,
        application=None,
    )
    assert list(check_number([cluster_node()] * 3, deployment)) == []
    (finding,) = check_number([cluster_node()], deployment)
    assert finding.message == "1 nodes in the cluster (10.0.0.1), up.yaml starts 3"


def test_ray_must_not_count_gpus_that_are_not_there() -> None:
    node = cluster_node(Resources={"GPU": 2.0})
    (finding,) = check_gpus(node, HEALTHY)
    assert finding.message == "Ray has 2 GPUs on this node, nvidia-smi sees 1"
    assert list(check_gpus(cluster_node(Resources={"GPU": 1.0}), HEALTHY)) == []


def test_the_odd_version_is_named_and_not_the_two_others() -> None:
    odd = replace(HEALTHY, versions=(("torch", "2.12.0"), ("ray", "2.60.0")))
    (finding,) = check_versions({"head": odd, "a": HEALTHY, "b": HEALTHY})
    assert finding.nodes == ("head",)
    assert finding.message == "found torch 2.12.0, other nodes have 2.13.0 (a)"


def test_of_two_the_other_than_the_head_is_odd() -> None:
    (finding,) = check_versions({"head": HEALTHY, "a": replace(HEALTHY, python="3.11.9")})
    assert finding.nodes == ("a",)


@pytest.mark.parametrize(
    ("change", "what", "severity"),
    [
        ({"nccl": "2.21.5"}, "NCCL", Severity.ERROR),
        ({"gpus": ("NVIDIA H100, 81559 MiB, 570.0",)}, "GPU driver", Severity.WARNING),
    ],
)
def test_other_libraries_are_compared_too(
    change: dict[str, object], what: str, severity: Severity
) -> None:
    changed = replace(HEALTHY, **change)  # type: ignore[arg-type]
    (finding,) = check_versions({"head": HEALTHY, "a": changed})
    assert f"found {what} " in finding.message
    assert finding.severity is severity


def test_a_build_for_another_device_is_the_same_version_and_a_head_may_have_no_gpu() -> None:
    head = replace(
        HEALTHY, gpus=(), nccl=None, versions=(("torch", "2.13.0+cpu"), ("ray", "2.60.0"))
    )
    assert list(check_versions({"head": head, "a": HEALTHY})) == []


def _weights(digest: str | None, problem: str | None = None) -> WeightsFacts:
    return WeightsFacts(folder="/model", digest=digest, problem=problem)


def test_weights_must_be_readable_and_the_same() -> None:
    weights = {
        "a": _weights("1" * 64),
        "b": _weights("1" * 64),
        "c": _weights("2" * 64),
        "d": _weights(None, "there is no such folder"),
    }
    other, missing = check_weights(weights)
    assert other.nodes == ("c",)
    assert "/model has other weights than a: 222222222222... and 111111111111..." in other.message
    assert missing.nodes == ("d",)
    assert "there is no such folder" in missing.message


def test_weights_that_no_node_can_read_are_missing_on_all() -> None:
    findings = list(check_weights({"a": _weights(None, "x"), "b": _weights(None, "x")}))
    assert [finding.nodes for finding in findings] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([], "it has no config.json"),
        (["config.json"], "it has no *.safetensors file"),
        (["config.json", "model.safetensors"], None),
    ],
)
def test_a_folder_needs_config_and_weights(
    tmp_path: Path, files: list[str], problem: str | None
) -> None:
    for file in files:
        (tmp_path / file).write_bytes(b"{}")
    assert read_weights(tmp_path).problem == problem


def test_the_digest_changes_with_the_exit_head(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes(b"{}")
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"1")
    before = read_weights(tmp_path, head=head)
    (head / "model.safetensors").write_bytes(b"2")
    assert read_weights(tmp_path, head=head).digest != before.digest
    absent = read_weights(tmp_path, head=tmp_path / "absent")
    assert absent.digest is None
    assert absent.folder == str(tmp_path / "absent")
    assert absent.problem == "there is no such folder of an exit head"


def test_packet_sizes_must_agree() -> None:
    eth = Interface(name="eth0", is_up=True, speed_mbps=0, mtu=9000, addresses=())
    (finding,) = check_mtus({"a": eth, "b": eth, "c": replace(eth, mtu=1500)})
    assert finding.nodes == ("c",)
    assert finding.fix == "`ip link set eth0 mtu 9000`"
