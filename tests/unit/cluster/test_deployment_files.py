from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from cluster.deployment_files import load_deployment
from cluster.ports import ClusterPorts, ports_of, start_parameters
from eesd_dist.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "cluster" / "configs"
_RAY_FILES = sorted(
    str(path.relative_to(CONFIGS))
    for path in CONFIGS.rglob("*.yaml")
    if path.parent.name != "serve" and path.name != "weights.yaml"
)


@pytest.mark.parametrize("name", _RAY_FILES)
def test_every_shipped_file_says_what_its_nodes_need(name: str) -> None:
    deployment = load_deployment(CONFIGS / name)
    assert deployment.min_nodes >= 1  # on a cloud the others are started when they are needed
    assert deployment.spans_nodes
    assert deployment.lists_ports
    assert deployment.auth_mode == "token"
    application = deployment.application
    assert application is not None
    assert application.model.name
    assert {stage.name for stage in application.stages} == {"draft", "verify"}


def test_a_serve_file_has_the_model_and_the_placement() -> None:
    deployment = load_deployment(CONFIGS / "serve" / "demo.yaml")
    application = deployment.application
    assert application is not None
    assert application.model == Path("~/eesd-dist/serve_app/demo_model")
    assert application.serve_http_port == 8000
    verify = application.stages[1]
    assert verify.resources == (("eesd_verify", 1),)
    assert verify.labels == (("eesd.io/stage", "verify"),)


def test_on_premises_the_head_and_all_listed_hosts_are_expected() -> None:
    deployment = load_deployment(CONFIGS / "onprem.yaml")
    content = yaml.safe_load((CONFIGS / "onprem.yaml").read_text())
    assert deployment.min_nodes == 1 + len(content["provider"]["worker_ips"])


def test_kuberays_start_parameters_are_ports(tmp_path: Path) -> None:
    content = yaml.safe_load((CONFIGS / "kuberay" / "70b.yaml").read_text())
    cluster = content["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        group["rayStartParams"]["node-manager-port"] = "7001"
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(content))
    deployment = load_deployment(path)
    assert deployment.lists_ports
    assert deployment.ports.node_manager == 7001
    assert deployment.ports.object_manager == ClusterPorts().object_manager


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected a mapping"),
        ("{a: 1}", "found the keys a: expected a `ray up` file"),
        ("{kind: RayService, spec: {}}", "not a RayService"),
        ("{applications: []}", "no application has the import_path"),
        ("{applications: }", "no application has the import_path"),
        ("{applications: 3}", "applications: found int, expected a list"),
        (
            "{kind: RayCluster, spec: {headGroupSpec: {template: {spec: {containers: []}}}}}",
            "not a RayService: IndexError",
        ),
        (
            "{kind: RayCluster, spec: {headGroupSpec: {rayStartParams: {port: x}}}}",
            "--port is 'x': expected a port",
        ),
        (
            "{applications: [{import_path: 'serve_app.app:build_app', args: {}}]}",
            "'engine'. is missing or wrong",
        ),
    ],
)
def test_another_file_is_refused_with_the_reason(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as failure:
        load_deployment(path)
    assert str(failure.value).startswith(str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_deployment(path)


def _onprem(folder: Path, *, suffix: str) -> Path:
    """Returns a copy of the file with this at the end of the head's `ray start`."""
    content = yaml.safe_load((CONFIGS / "onprem.yaml").read_text())
    commands = content["head_start_ray_commands"]
    (index,) = [i for i, command in enumerate(commands) if "ray start" in command]
    commands[index] = f"{commands[index].strip()} {suffix}"
    path = folder / "onprem.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_separator_in_quotes_ends_no_command(tmp_path: Path) -> None:
    path = _onprem(tmp_path, suffix="--labels='a=x;y' --ray-client-server-port=10002")
    assert load_deployment(path).ports.ray_client == 10002


@pytest.mark.parametrize(
    ("suffix", "message"),
    [("--labels='a=x;y", "close the quote"), ("--ray-client-server-port=0", "expected a port")],
)
def test_a_wrong_start_command_is_refused_with_its_file(
    tmp_path: Path, suffix: str, message: str
) -> None:
    path = _onprem(tmp_path, suffix=suffix)
    with pytest.raises(ConfigError, match=message) as failure:
        load_deployment(path)
    assert str(failure.value).startswith(str(path))


def test_an_export_with_an_open_quote_is_refused_with_its_file(tmp_path: Path) -> None:
    path = _onprem(tmp_path, suffix="; export A='x")
    with pytest.raises(ConfigError, match="a quote without an end") as failure:
        load_deployment(path)
    assert str(failure.value).startswith(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_deployment(tmp_path / "absent.yaml")


def test_options_of_ray_start_are_read_in_both_forms_and_across_lines() -> None:
    commands = [
        "ray stop",
        "ulimit -n 65536; cd x && .venv/bin/ray start --head --port=6400\n"
        "--object-manager-port 8100 --block; echo --port=1",
    ]
    (start,) = start_parameters(commands)
    assert start == {"port": "6400", "object-manager-port": "8100"}
    ports = ports_of([start])
    assert (ports.gcs, ports.object_manager) == (6400, 8100)


def test_two_numbers_for_one_port_are_refused() -> None:
    with pytest.raises(ConfigError, match="--object-manager-port is 1 in one start command and 2"):
        ports_of([{"object-manager-port": "1"}, {"object-manager-port": "2"}])


@pytest.mark.parametrize("value", ["0", "70000", "$PORT"])
def test_what_is_no_port_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="expected a port, 1 to 65535"):
        ports_of([{"port": value}])


def test_no_listed_port_is_in_the_range_of_workers_or_listed_twice() -> None:
    ports = asdict(ClusterPorts())
    first, last = ports.pop("min_worker"), ports.pop("max_worker")
    assert not any(first <= port <= last for port in ports.values())
    assert len(set(ports.values())) == len(ports)
