"""Ray's loader of cluster files, as used by `cluster.ray_compat`."""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster.ray_compat import prepared_cluster_config

_FILE = """
cluster_name: c
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2]}
auth: {ssh_user: u}
"""


def test_a_cluster_file_is_filled_in_as_ray_up_does() -> None:
    prepared = prepared_cluster_config(yaml.safe_load(_FILE))
    types = prepared["available_node_types"]
    assert {each["max_workers"] for each in types.values()} == {1}
    assert all("resources" in each for each in types.values())


def test_a_key_that_ray_does_not_know_is_refused_by_its_schema() -> None:
    with pytest.raises(jsonschema.ValidationError):
        prepared_cluster_config(yaml.safe_load(_FILE) | {"no_such_key": 1})


def test_nothing_else_imports_what_ray_keeps_to_itself() -> None:
    root = Path(__file__).parents[3]
    private = re.compile(
        r"(?:from|import) ray[\w.]*\._|from ray[\w.]* import _|ray\.serve\.context"
    )
    found = [
        str(file.relative_to(root))
        for package in ("eesd_dist", "serve_app", "cluster")
        for file in (root / package).rglob("*.py")
        if private.search(file.read_text())
    ]
    assert found == ["cluster/ray_compat.py"]
