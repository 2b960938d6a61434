"""The Serve files, and that the cluster files offer what they ask for."""

import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.ray_compat import PROXY_CALLBACK
from cluster.topology import load_cluster_file
from eesd_dist.errors import ConfigError
from serve_app.app import build_app
from serve_app.config import ServiceConfig, require_key, service_config

CONFIGS = Path(__file__).parents[3] / "cluster" / "configs"
SERVE_FILES = ["demo", "13b", "70b"]
CLOUDS = ["aws.yaml", "aws-spot.yaml", "gcp.yaml", "gcp-spot.yaml"]
CLUSTER_FILES = ["onprem.yaml", *CLOUDS]
_NODE = CONFIGS / "node.sh"


def _schema(name: str) -> ServeDeploySchema:
    content = yaml.safe_load((CONFIGS / "serve" / f"{name}.yaml").read_text())
    return ServeDeploySchema.model_validate(content)


def _service(name: str) -> ServiceConfig:
    (application,) = _schema(name).applications
    return service_config(dict(application.args))


def _cluster(name: str) -> dict[str, Any]:
    # Through JSON, so that aliases become values of their own.
    content: dict[str, Any] = json.loads(json.dumps(yaml.safe_load((CONFIGS / name).read_text())))
    return content


def _start(name: str, kind: str) -> str:
    (start,) = [c for c in _cluster(name)[f"{kind}_start_ray_commands"] if "ray start" in c]
    return str(start)


def _asked(config: ServiceConfig) -> tuple[dict[str, float], float]:
    """Returns the custom resources and the GPUs of the ranks of one pipeline, spares included."""
    parallel, spares = config.engine.parallel, config.recovery.spares
    resources: dict[str, float] = {}
    gpus = 0.0
    for bundle, count in (
        (config.placement.draft, parallel.draft_tensor_parallel_size + spares.num_draft),
        (config.placement.verify, parallel.verify_tensor_parallel_size + spares.num_verify),
    ):
        gpus += (bundle.num_gpus or 0) * count
        for name, amount in bundle.resources.items():
            resources[name] = resources.get(name, 0) + amount * count
    return resources, gpus


def _labels(config: ServiceConfig) -> set[tuple[str, str]]:
    placement = config.placement
    return {pair for b in (placement.draft, placement.verify) for pair in b.labels.items()}


@pytest.mark.parametrize("name", SERVE_FILES)
def test_a_serve_file_passes_rays_schema_and_ours(name: str) -> None:
    (application,) = _schema(name).applications
    assert application.import_path == "serve_app.app:build_app"
    assert _service(name).engine.model.path.is_absolute()


@pytest.mark.parametrize("name", SERVE_FILES)
def test_the_service_listens_where_its_file_says(name: str) -> None:
    options = _schema(name).http_options
    config = _service(name)
    assert (options.host, options.port) == (config.host, config.port)


def test_the_deployments_of_a_serve_file_are_those_of_the_application() -> None:
    """A file that names another one is refused by Serve, at the deployment."""
    application = build_app(_service("demo"))
    built = {"Ingress", "Pipeline"}
    assert application._bound_deployment.name in built
    for name in SERVE_FILES:
        (schema,) = _schema(name).applications
        assert {deployment.name for deployment in schema.deployments} == built


@pytest.mark.parametrize("name", SERVE_FILES)
def test_no_file_serves_other_hosts_without_a_key(name: str) -> None:
    with pytest.raises(ConfigError, match="set EESD_API_KEY"):
        require_key(_service(name), has_key=False)


@pytest.mark.parametrize("name", ["13b", "70b"])
def test_models_on_gpus_ask_for_gpus_before_the_cluster_has_any(name: str) -> None:
    config = _service(name)
    assert config.engine.model.device == "cuda"
    assert config.placement.draft.num_gpus == config.placement.verify.num_gpus == 1


@pytest.mark.parametrize("file", CLOUDS)
@pytest.mark.parametrize("name", ["13b", "70b"])
def test_the_node_types_of_a_cloud_can_hold_one_pipeline(file: str, name: str) -> None:
    resources, gpus = _asked(_service(name))
    offered = {}
    for node_type in load_cluster_file(CONFIGS / file).node_types:
        amounts = dict(node_type.resources)
        if amounts.keys() & resources.keys():
            offered |= amounts | {"GPU": amounts["GPU"] + offered.get("GPU", 0)}
    assert {key: offered[key] >= amount for key, amount in resources.items()} == dict.fromkeys(
        resources, True
    )
    assert offered["GPU"] >= gpus
    types = _cluster(file)["available_node_types"].values()
    labels = {pair for node_type in types for pair in node_type.get("labels", {}).items()}
    assert _labels(_service(name)) <= labels


@pytest.mark.parametrize("name", SERVE_FILES)
def test_the_front_is_placed_on_the_head_of_every_cluster(name: str) -> None:
    (resource,) = _service(name).placement.front
    assert f'{{"{resource}": 1}}' in _start("onprem.yaml", "head")
    for file in CLOUDS:
        types = _cluster(file)["available_node_types"]
        having = [kind for kind, entry in types.items() if resource in entry["resources"]]
        assert having == ["eesd.head"]


def test_the_listed_hosts_are_the_workers_and_hold_two_pipelines() -> None:
    rows = _inventory(CONFIGS / "onprem-hosts.txt")
    assert [row[0] for row in rows] == _cluster("onprem.yaml")["provider"]["worker_ips"]
    offered: dict[str, int] = {}
    for _, stage, ranks, _ in rows:
        offered[f"eesd_{stage}"] = offered.get(f"eesd_{stage}", 0) + int(ranks)
    resources, _ = _asked(_service("demo"))
    assert {key: 2 * amount for key, amount in resources.items()} == offered
    assert {("eesd.io/stage", stage) for _, stage, _, _ in rows} == _labels(_service("demo"))


def _inventory(path: Path) -> list[list[str]]:
    lines = path.read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


@pytest.mark.skipif(shutil.which("hostname") is None, reason="no `hostname` command")
def test_a_host_finds_its_line_by_address_or_name_and_no_other(tmp_path: Path) -> None:
    hostname = subprocess.run(
        ["hostname"], capture_output=True, text=True, check=True
    ).stdout.strip()
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"# {hostname} is a comment\n{hostname}0 draft 1 0\n{hostname} verify 4 8\n")
    assert _in_node_shell(f"eesd_host {hosts}", home=tmp_path).stdout == f"{hostname} verify 4 8\n"
    hosts.write_text(f"{hostname}0 draft 1 0\n")
    missing = _in_node_shell(f"eesd_host {hosts}", home=tmp_path)
    assert missing.returncode == 1
    assert f"{hosts} has no line for this host" in missing.stderr


@pytest.mark.parametrize(
    ("override", "gpus"), [("", "0"), ('{"CPU":48,"GPU":4}', "4"), ('{"CPU": 8}', "0")]
)
def test_the_preflight_of_a_cloud_node_asks_for_the_gpus_of_its_type(
    override: str, gpus: str, tmp_path: Path
) -> None:
    done = _in_node_shell("eesd_gpus", home=tmp_path, RAY_OVERRIDE_RESOURCES=override)
    assert done.stdout == f"{gpus}\n"


def test_workers_of_a_node_have_the_niceness_of_other_processes(tmp_path: Path) -> None:
    show = 'echo "$RAY_worker_niceness"'
    assert _in_node_shell(show, home=tmp_path).stdout == "0\n"
    assert _in_node_shell(show, home=tmp_path, RAY_worker_niceness="5").stdout == "5\n"


def test_a_node_keeps_what_its_environment_says(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "eesd_api_key").write_text("from-file")
    show = 'echo "$EESD_API_KEY $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    variables = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert _in_node_shell(show, home=tmp_path, **variables).stdout == "from-file ib0 =ib0\n"
    variables["EESD_API_KEY"] = "from-environment"
    assert _in_node_shell(show, home=tmp_path, **variables).stdout == "from-environment ib0 =ib0\n"


@pytest.mark.skipif(shutil.which("ip") is None, reason="no `ip` command")
def test_gloo_and_nccl_use_the_interface_of_the_route_to_the_head(tmp_path: Path) -> None:
    route = subprocess.run(
        ["ip", "-o", "route", "get", "192.0.2.1"], capture_output=True, text=True, check=False
    )
    device = re.search(r" dev (\S+)", route.stdout)
    if device is None:
        pytest.skip("this machine has no route")
    show = 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    done = _in_node_shell(show, home=tmp_path, RAY_HEAD_IP="192.0.2.1")
    assert done.stdout == f"{device[1]} ={device[1]}\n"
    on_the_head_itself = _in_node_shell(show, home=tmp_path, RAY_HEAD_IP="127.0.0.1")
    assert on_the_head_itself.stdout == " \n"


def _in_node_shell(
    command: str, *, home: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    paths = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(home)}
    return subprocess.run(
        ["bash", "-c", f". {_NODE} && {command}"],
        env=paths | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.mark.parametrize("file", CLUSTER_FILES)
@pytest.mark.parametrize("kind", ["head", "worker"])
def test_every_node_has_the_front_of_the_proxy_and_checks_itself_before_it_joins(
    file: str, kind: str
) -> None:
    front = "serve_app.ingress.proxy_front:proxy_middlewares"
    start = _start(file, kind)
    assert f"{PROXY_CALLBACK}={front};" in start
    assert re.search(r"\. cluster/configs/node\.sh &&.*eesd preflight [^&;]*&& ray start", start)
    assert "~/.ray/eesd_api_key" in _cluster(file)["file_mounts"]
    module, _, function = front.partition(":")
    assert callable(getattr(import_module(module), function))


_PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 8076,
    "runtime-env-agent-port": 6381,
    "dashboard-agent-listen-port": 52365,
    "metrics-export-port": 8090,
    "min-worker-port": 20000,
    "max-worker-port": 20999,
}
_HEAD_PORTS = {"port": 6379, "dashboard-port": 8265, "ray-client-server-port": 10001}


@pytest.mark.parametrize("file", CLUSTER_FILES)
def test_every_port_of_a_node_is_fixed_and_listed_in_the_guide(file: str) -> None:
    expected = {"head": _PORTS | _HEAD_PORTS, "worker": _PORTS}
    for kind, ports in expected.items():
        options = dict(re.findall(r"--([a-z-]*port)=(\d+)", _start(file, kind)))
        assert options == {flag: str(port) for flag, port in ports.items()}
    guide = (CONFIGS.parents[1] / "docs" / "deploy.md").read_text()
    table = guide[guide.index("## Ports") :]
    for port in [*_HEAD_PORTS.values(), *_PORTS.values()]:
        assert re.search(rf"\b{port}\b", table), port


@pytest.mark.parametrize("file", CLUSTER_FILES)
def test_a_start_that_is_not_healthy_in_time_does_not_fail(file: str) -> None:
    """`ray down` passes over a head if one of its start commands has failed."""
    last = _cluster(file)["head_start_ray_commands"][-1]
    assert re.search(r"if .*serve deploy cluster/configs/serve/\S+\.yaml; .*eesd wait ", last)
    assert last.endswith("fi")


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_spot_differs_in_the_market_alone(cloud: str) -> None:
    spot, ordinary = _cluster(f"{cloud}-spot.yaml"), _cluster(f"{cloud}.yaml")
    assert spot.pop("cluster_name") != ordinary.pop("cluster_name")
    for name, entry in spot["available_node_types"].items():
        if name != "eesd.head":
            config = entry["node_config"]
            if cloud == "aws":
                assert config.pop("InstanceMarketOptions") == {"MarketType": "spot"}
            else:
                assert config["scheduling"].pop("provisioningModel") == "SPOT"
    assert spot == ordinary
