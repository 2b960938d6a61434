"""The configuration files of the service: Serve configurations and the RayService manifest."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.ray_compat import PROXY_CALLBACK
from cluster.topology import load_cluster_file
from eesd_dist.errors import ConfigError
from serve_app.config import ServiceConfig, require_key, service_config

CONFIGS = Path(__file__).parents[3] / "cluster" / "configs"


def _serve_files() -> dict[str, ServeDeploySchema]:
    manifest = yaml.safe_load((CONFIGS / "kuberay-rayservice.yaml").read_text())
    texts = {
        "serve.yaml": (CONFIGS / "serve.yaml").read_text(),
        "kuberay-rayservice.yaml": manifest["spec"]["serveConfigV2"],
    }
    return {
        name: ServeDeploySchema.model_validate(yaml.safe_load(text)) for name, text in texts.items()
    }


def _service(name: str) -> ServiceConfig:
    (application,) = _serve_files()[name].applications
    return service_config(dict(application.args))


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay-rayservice.yaml"])
def test_a_serve_file_passes_rays_schema_and_ours(name: str) -> None:
    (application,) = _serve_files()[name].applications
    assert application.import_path == "serve_app.app:build_app"
    config = _service(name)
    assert config.engine.model.path.is_absolute()


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay-rayservice.yaml"])
def test_the_service_listens_where_its_file_says(name: str) -> None:
    options = _serve_files()[name].http_options
    config = _service(name)
    assert (options.host, options.port) == (config.host, config.port)


def test_the_aws_nodes_offer_what_one_pipeline_asks_for() -> None:
    config = _service("serve.yaml")
    offered = {
        name: amount * node.min_workers
        for node in load_cluster_file(CONFIGS / "aws.yaml").node_types
        for name, amount in node.resources
        if name.startswith("eesd_")
    }
    ranks = config.engine.parallel.verify_tensor_parallel_size
    assert config.placement.draft.resources["eesd_draft"] <= offered["eesd_draft"]
    assert config.placement.verify.resources["eesd_verify"] * ranks <= offered["eesd_verify"]


def test_the_kubernetes_workers_offer_what_one_pipeline_asks_for() -> None:
    manifest = yaml.safe_load((CONFIGS / "kuberay-rayservice.yaml").read_text())
    offered: dict[str, int] = {}
    for group in manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        # Quoted for YAML and again for the shell that runs `ray start`.
        resources = json.loads(json.loads(group["rayStartParams"]["resources"]))
        offered |= {name: amount * group["minReplicas"] for name, amount in resources.items()}
    config = _service("kuberay-rayservice.yaml")
    ranks = config.engine.parallel.verify_tensor_parallel_size
    assert config.placement.draft.resources["eesd_draft"] <= offered["eesd_draft"]
    assert config.placement.verify.resources["eesd_verify"] * ranks <= offered["eesd_verify"]


def _labels_asked_for(name: str) -> set[str]:
    placement = _service(name).placement
    return {
        f"{key}={value}"
        for bundle in (placement.draft, placement.verify)
        for key, value in bundle.labels.items()
    }


def test_the_aws_nodes_have_the_labels_that_are_asked_for() -> None:
    types = yaml.safe_load((CONFIGS / "aws.yaml").read_text())["available_node_types"].values()
    given = {f"{k}={v}" for entry in types for k, v in entry.get("labels", {}).items()}
    asked = _labels_asked_for("serve.yaml")
    assert asked
    assert asked <= given


def test_the_hosts_of_ones_own_start_with_the_labels_that_are_asked_for() -> None:
    commands = "\n".join(
        yaml.safe_load((CONFIGS / "onprem.yaml").read_text())["worker_start_ray_commands"]
    )
    key = re.findall(r'--labels="([^=]+)=\$stage"', commands)
    stages = re.findall(r"stage=(\w+) ;;", commands)
    assert {f"{key[0]}={stage}" for stage in stages} == _labels_asked_for("serve.yaml")


def test_the_kubernetes_workers_have_the_labels_that_are_asked_for() -> None:
    manifest = yaml.safe_load((CONFIGS / "kuberay-rayservice.yaml").read_text())
    groups = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    given = {group["rayStartParams"]["labels"] for group in groups}
    assert given == _labels_asked_for("kuberay-rayservice.yaml")


def test_the_nodes_of_every_file_have_the_api_key_and_the_front_of_the_proxy() -> None:
    front = "serve_app.ingress.proxy_front:proxy_middlewares"
    for name in ("onprem.yaml", "aws.yaml"):
        cluster = yaml.safe_load((CONFIGS / name).read_text())
        assert "~/.ray/eesd_api_key" in cluster["file_mounts"]
        for kind in ("head", "worker"):
            (start,) = [c for c in cluster[f"{kind}_start_ray_commands"] if "ray start" in c]
            assert "EESD_API_KEY=$(cat ~/.ray/eesd_api_key)" in start
            assert f"{PROXY_CALLBACK}={front};" in start
    manifest = yaml.safe_load((CONFIGS / "kuberay-rayservice.yaml").read_text())
    cluster = manifest["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        variables = {each["name"]: each for each in container["env"]}
        assert variables[PROXY_CALLBACK]["value"] == front
        assert variables["EESD_API_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "eesd-api-key"
    module, _, function = front.partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay-rayservice.yaml"])
def test_no_file_serves_other_hosts_without_a_key(name: str) -> None:
    with pytest.raises(ConfigError, match="set EESD_API_KEY"):
        require_key(_service(name), has_key=False)


def test_every_container_of_the_manifest_has_shared_memory_and_one_auth_mode() -> None:
    manifest = yaml.safe_load((CONFIGS / "kuberay-rayservice.yaml").read_text())
    cluster = manifest["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
