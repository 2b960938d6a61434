"""A cluster on this machine with an autoscaler that adds and removes nodes: Ray's fake provider.

Nodes are real raylets of this machine. The head has no CPUs, only a resource for the actors that
have to stay there.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import yaml

from cluster.ray_compat import job_with_installed_code
from eesd_dist.errors import EngineError
from serve_app.bench.chaos.command import free_port
from serve_app.service.local_ray import watched_folder
from serve_app.service.watchdog import ray_folder

HEAD_RESOURCE = "eesd_head"
_STORE_BYTES = 80 * 2**20
_START_TIMEOUT_S = 90.0
_FOLDERS = "/tmp"
"""As short as can be: the sockets of further nodes have longer names than those of the first."""
ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",
    # v2 asks the provider for more than the fake one has.
    "RAY_enable_autoscaler_v2": "0",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
"""To be set before Ray is imported."""


@contextmanager
def fake_nodes(*, cpus: float, max_nodes: int, idle_s: float) -> Iterator[None]:
    """Within the block this process is connected to a cluster with up to `max_nodes` nodes.

    Each node has so many `cpus` and goes when it was idle for `idle_s`.
    """
    with watched_folder(_FOLDERS, logs=None) as (folder, _):
        port = free_port("127.0.0.1")
        config = folder / "autoscaler.yaml"
        config.write_text(
            yaml.safe_dump(_autoscaler(port=port, cpus=cpus, max_nodes=max_nodes, idle_s=idle_s))
        )
        _start_head(ray_folder(folder), config, port=port)
        ray.init(
            f"127.0.0.1:{port}",
            job_config=job_with_installed_code(),
            log_to_driver=False,
            logging_level="error",
        )
        yield


def num_nodes() -> int:
    """Returns the number of live nodes, without the head."""
    return sum(node["Alive"] and HEAD_RESOURCE not in node["Resources"] for node in ray.nodes())


def _start_head(folder: Path, config: Path, *, port: int) -> None:
    command = [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"),
        *("--num-cpus=0", f'--resources={{"{HEAD_RESOURCE}": 1000}}', f"--temp-dir={folder}"),
        *(f"--object-store-memory={_STORE_BYTES}", "--include-dashboard=false"),
        *("--disable-usage-stats", f"--autoscaling-config={config}"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"Ray's head has not started in {_START_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise EngineError(f"Ray's head could not be started: {''.join(message)}")


def _autoscaler(*, port: int, cpus: float, max_nodes: int, idle_s: float) -> dict[str, object]:
    node = {"CPU": cpus, "object_store_memory": _STORE_BYTES}
    return {
        "cluster_name": "eesd-fake",
        "max_workers": max_nodes,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": idle_s / 60.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"127.0.0.1:{port}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "pipeline": {
                "resources": node,
                "node_config": {},
                "min_workers": 0,
                "max_workers": max_nodes,
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
