"""Ray's loader of cluster files and the callback of its proxies, as `cluster.ray_compat` uses
them."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster.ray_compat import PROXY_CALLBACK, prepared_cluster_config
from serve_app.service.environment import prepare_for_local_ray

_FILE = """
cluster_name: c
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2]}
auth: {ssh_user: u}
"""


def test_a_cluster_file_is_filled_in_as_ray_up_does() -> None:
    prepared = prepared_cluster_config(yaml.safe_load(_FILE))
    types = prepared["available_node_types"]
    assert {node_type["max_workers"] for node_type in types.values()} == {1}
    assert all("resources" in node_type for node_type in types.values())


def test_a_key_that_ray_does_not_know_is_refused_by_its_schema() -> None:
    with pytest.raises(jsonschema.ValidationError):
        prepared_cluster_config(yaml.safe_load(_FILE) | {"no_such_key": 1})


def test_nothing_else_imports_what_ray_keeps_to_itself() -> None:
    root = Path(__file__).parents[3]
    private = re.compile(
        r"(?:from|import) ray[\w.]*\._|from ray[\w.]* import _|ray\.serve\.context"
    )
    importers = [
        str(file.relative_to(root))
        for package in ("eesd_dist", "serve_app", "cluster")
        for file in (root / package).rglob("*.py")
        if private.search(file.read_text())
    ]
    assert importers == ["cluster/ray_compat.py"]


_IN_A_PROXY = """
from ray.serve._private.http_util import configure_http_middlewares
from ray.serve.config import HTTPOptions
import uvicorn
found = configure_http_middlewares(HTTPOptions()).middlewares
print([each.cls.__name__ for each in found])
config = uvicorn.Config(lambda: None, factory=True)
config.load()
print(config.http_protocol_class.__name__)
"""


def test_serves_proxy_takes_both_where_the_environment_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    prepare_for_local_ray()
    assert PROXY_CALLBACK in os.environ
    run = subprocess.run(
        [sys.executable, "-c", _IN_A_PROXY], env=os.environ, capture_output=True, check=True
    )
    assert run.stdout.decode().split("\n")[-3:-1] == ["['HeadGate']", "BoundedConnection"]


_HANDLERS = """
import signal, sys
import ray
from cluster.ray_compat import rays_signal_handlers_unused
ours = lambda number, frame: None
signal.signal(signal.SIGTERM, ours)
def start():
    options = {"include_dashboard": False, "logging_level": "error"}
    ray.init("local", num_cpus=1, _temp_dir=sys.argv[1], **options)
    print(signal.getsignal(signal.SIGTERM) is ours)
    ray.shutdown()
with rays_signal_handlers_unused():
    start()
start()
"""


def test_ray_leaves_the_handlers_of_signals_alone_within_the_block_only() -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # short: Ray has sockets
        run = subprocess.run(
            [sys.executable, "-c", _HANDLERS, folder], capture_output=True, text=True, check=False
        )
    assert run.stdout.split() == ["True", "False"], run.stderr
