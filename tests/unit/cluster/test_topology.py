from pathlib import Path

import pytest
import yaml

from cluster.topology import exported, load_cluster_file
from eesd_dist.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "cluster" / "configs"
UP_FILES = ["onprem.yaml", "aws.yaml", "aws-spot.yaml", "gcp.yaml", "gcp-spot.yaml"]


def _altered(tmp_path: Path, source: str, **changes: object) -> Path:
    content = yaml.safe_load((CONFIGS / source).read_text())
    content.update(changes)
    path = tmp_path / source
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("name", UP_FILES)
def test_the_shipped_files_pass_rays_own_schema(name: str) -> None:
    cluster = load_cluster_file(CONFIGS / name)
    assert cluster.auth_mode == "token"
    assert cluster.max_workers >= 1


@pytest.mark.parametrize("name", UP_FILES)
def test_a_process_that_hangs_on_a_worker_node_does_not_keep_its_slot(name: str) -> None:
    worker = dict(load_cluster_file(CONFIGS / name).worker_environment)
    assert worker["RAY_kill_worker_timeout_milliseconds"] == "1000"


def test_on_premises_every_listed_host_is_brought_up() -> None:
    cluster = load_cluster_file(CONFIGS / "onprem.yaml")
    (only,) = cluster.node_types
    assert only.min_workers == only.max_workers == 3


def test_an_unknown_section_is_refused_and_named(tmp_path: Path) -> None:
    path = _altered(tmp_path, "aws.yaml", typo_commands=["true"])
    with pytest.raises(ConfigError, match="typo_commands"):
        load_cluster_file(path)


def test_a_wrong_type_is_refused_with_its_place(tmp_path: Path) -> None:
    path = _altered(tmp_path, "aws.yaml", max_workers="many")
    with pytest.raises(ConfigError, match="max_workers"):
        load_cluster_file(path)


def test_a_local_provider_without_addresses_is_refused(tmp_path: Path) -> None:
    path = _altered(tmp_path, "onprem.yaml", provider={"type": "local"})
    with pytest.raises(ConfigError, match="head_ip"):
        load_cluster_file(path)


def test_a_head_type_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = _altered(tmp_path, "aws.yaml", head_node_type="nobody")
    with pytest.raises(ConfigError, match="head_node_type"):
        load_cluster_file(path)


def test_workers_that_authenticate_otherwise_than_the_head_are_refused(tmp_path: Path) -> None:
    worker = ["export RAY_AUTH_MODE=disabled; ray start --address=$RAY_HEAD_IP:6379"]
    path = _altered(tmp_path, "onprem.yaml", worker_start_ray_commands=worker)
    with pytest.raises(ConfigError, match=r"token in head.*disabled in worker"):
        load_cluster_file(path)


def test_a_head_that_would_take_a_minute_to_miss_a_node_is_refused(tmp_path: Path) -> None:
    head = ["export RAY_AUTH_MODE=token; ray start --head"]
    path = _altered(tmp_path, "onprem.yaml", head_start_ray_commands=head)
    with pytest.raises(ConfigError, match="RAY_health_check_period_ms"):
        load_cluster_file(path)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- one\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_cluster_file(path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster_file(tmp_path / "absent.yaml")


def test_exports_are_read_through_chains_and_quotes() -> None:
    commands = ["ray stop", "export A=1 B='two words'; ulimit -n 9 && export A=3 && ray start"]
    assert exported(commands) == {"A": "3", "B": "two words"}


def test_a_separator_in_quotes_is_part_of_a_value() -> None:
    assert exported(["export A='x;y' B=\"p|q\"; export C=z"]) == {"A": "x;y", "B": "p|q", "C": "z"}
