"""The RayService manifests: the schema and the further rules of KubeRay's operator, and our own."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.ray_compat import PROXY_CALLBACK
from serve_app.config import service_config
from tests.support.crd_schema import strict_schema

CONFIGS = Path(__file__).parents[3] / "cluster" / "configs"
CRD = Path(__file__).parent / "data" / "ray.io_rayservices-v1.6.2.yaml.gz"
NAMES = ["demo", "13b", "70b"]


@cache
def _validator() -> Any:
    return jsonschema.Draft202012Validator(strict_schema(CRD, "v1"))


def _manifest(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CONFIGS / "kuberay" / f"{name}.yaml").read_text())
    return content


def _cluster(name: str) -> dict[str, Any]:
    cluster: dict[str, Any] = _manifest(name)["spec"]["rayClusterConfig"]
    return cluster


def _groups(name: str) -> list[dict[str, Any]]:
    cluster = _cluster(name)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def _offered(group: dict[str, Any]) -> dict[str, int]:
    # Quoted for YAML and again for the shell that runs `ray start`.
    offered: dict[str, int] = json.loads(json.loads(group["rayStartParams"]["resources"]))
    return offered


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_passes_kuberays_schema(name: str) -> None:
    _validator().validate(_manifest(name))


@pytest.mark.parametrize(
    "where",
    [
        "spec",
        "spec/rayClusterConfig",
        "spec/rayClusterConfig/authOptions",
        "spec/rayClusterConfig/autoscalerOptions",
        "spec/rayClusterConfig/headGroupSpec",
        "spec/rayClusterConfig/workerGroupSpecs/0/template/spec",
        "spec/rayClusterConfig/workerGroupSpecs/0/template/spec/containers/0",
        "spec/rayClusterConfig/workerGroupSpecs/0/template/spec/containers/0/readinessProbe/httpGet",
        "spec/rayClusterConfig/workerGroupSpecs/0/template/spec/tolerations/0",
        "spec/rayClusterConfig/workerGroupSpecs/0/template/spec/volumes/1/persistentVolumeClaim",
    ],
)
def test_a_misspelt_field_is_refused_at_any_depth(where: str) -> None:
    manifest = _manifest("70b")
    node: Any = manifest
    for step in where.split("/"):
        node = node[int(step) if step.isdigit() else step]
    node["misspelt"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="misspelt"):
        _validator().validate(manifest)


def test_a_wrong_auth_mode_is_refused() -> None:
    manifest = _manifest("demo")
    manifest["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "tokens"
    with pytest.raises(jsonschema.ValidationError, match="tokens"):
        _validator().validate(manifest)


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_and_the_nodes_have_the_same_token(name: str) -> None:
    assert _cluster(name)["authOptions"] == {"mode": "token", "secretName": "eesd-ray-auth"}
    for group in _groups(name):
        pod = group["template"]["spec"]
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            variables = {variable["name"]: variable for variable in container["env"]}
            assert variables["RAY_AUTH_MODE"]["value"] == "token"
            # The key that KubeRay expects in the secret.
            reference = {"name": "eesd-ray-auth", "key": "auth_token"}
            assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == reference


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_where_the_operator_and_the_autoscaler_read_them(name: str) -> None:
    """The operator refuses labels among rayStartParams, and resources in both places
    (`validateRayGroupLabels` and `validateRayGroupResources` of KubeRay 1.6.2)."""
    for group in _groups(name):
        assert "labels" not in group["rayStartParams"]
        assert "resources" not in group


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_and_no_task_is_placed_on_the_head(name: str) -> None:
    head = _cluster(name)["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert _offered(head) == {"eesd_head": 1}


@pytest.mark.parametrize("name", NAMES)
def test_the_pods_offer_what_one_pipeline_asks_for(name: str) -> None:
    config = _embedded(name)
    parallel, spares = config.engine.parallel, config.recovery.spares
    demand: dict[str, float] = {}
    gpus = 0.0
    for bundle, count in (
        (config.placement.draft, parallel.draft_tensor_parallel_size + spares.num_draft),
        (config.placement.verify, parallel.verify_tensor_parallel_size + spares.num_verify),
    ):
        gpus += (bundle.num_gpus or 0) * count
        for resource, amount in bundle.resources.items():
            demand[resource] = demand.get(resource, 0) + amount * count
    workers = _cluster(name)["workerGroupSpecs"]
    offered = {key: amount for group in workers for key, amount in _offered(group).items()}
    assert {key: amount <= offered[key] for key, amount in demand.items()} == dict.fromkeys(
        offered, True
    )
    assert gpus <= sum(_gpus(group) for group in workers)
    labels = {f"{k}={v}" for group in workers for k, v in group["labels"].items()}
    for bundle in (config.placement.draft, config.placement.verify):
        assert {f"{k}={v}" for k, v in bundle.labels.items()} <= labels


@pytest.mark.parametrize("name", NAMES)
def test_the_preflight_of_a_pod_asks_for_the_gpus_of_the_pod(name: str) -> None:
    for group in _cluster(name)["workerGroupSpecs"]:
        (preflight,) = group["template"]["spec"]["initContainers"]
        assert preflight["command"][:2] == ["eesd", "preflight"]
        assert int(preflight["command"][-1]) == _gpus(group)
        (worker,) = group["template"]["spec"]["containers"]
        assert preflight["resources"] == worker["resources"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_with_gpus_tolerates_their_taint_and_has_the_weights(name: str) -> None:
    for group in _cluster(name)["workerGroupSpecs"]:
        if not _gpus(group):
            continue
        pod = group["template"]["spec"]
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
            "tolerations"
        ]
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "weights"]
        assert str(_embedded(name).engine.model.path).startswith(mount["mountPath"] + "/")
        (volume,) = [v for v in pod["volumes"] if v["name"] == "weights"]
        claim = yaml.safe_load((CONFIGS / "kuberay" / "weights.yaml").read_text())
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_without_root_and_has_shared_memory_key_and_front(name: str) -> None:
    for group in _groups(name):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
        variables = {variable["name"]: variable for variable in container["env"]}
        front = "serve_app.ingress.proxy_front:proxy_middlewares"
        assert variables[PROXY_CALLBACK]["value"] == front
        assert variables["EESD_API_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "eesd-api-key"


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_serves_what_the_serve_file_of_that_name_says(name: str) -> None:
    embedded = yaml.safe_load(_manifest(name)["spec"]["serveConfigV2"])
    text = (CONFIGS / "serve" / f"{name}.yaml").read_text()
    assert embedded == yaml.safe_load(text.replace("~/eesd-dist/", "/opt/eesd-dist/"))


def _gpus(group: dict[str, Any]) -> int:
    (container,) = group["template"]["spec"]["containers"]
    return int(container["resources"]["limits"].get("nvidia.com/gpu", 0))


def _embedded(name: str) -> Any:
    (application,) = yaml.safe_load(_manifest(name)["spec"]["serveConfigV2"])["applications"]
    return service_config(dict(application["args"]))
