"""What Ray does not promise is as `cluster.ray_compat` relies on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray
import ray.data
from ray import serve
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.actor import _ActorClassMethodMetadata
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve.config import ProxyLocation
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.ray_compat import (
    actor_class,
    available_resources,
    has_autoscaler,
    is_actor_dead,
    is_serve_running,
    proxy_actors,
    replica_actors,
    serve_status,
)
from tests.endurance.processes import num_live_actors
from tests.support.running import Running


def test_free_resources_are_told_by_node_and_follow_what_is_taken(ray_port: int) -> None:
    (node_id,) = available_resources()
    assert node_id == ray.get_runtime_context().get_node_id()
    before = available_resources()[node_id]["CPU"]
    group = placement_group([{"CPU": 1}])
    assert group.wait(60)
    try:
        assert available_resources()[node_id]["CPU"] == before - 1
    finally:
        remove_placement_group(group)


def test_an_autoscaler_is_known_by_node_types_that_are_no_node_ids(ray_port: int) -> None:
    del ray_port  # Ray runs
    assert not has_autoscaler()
    before = _internal_kv_get(DEBUG_AUTOSCALING_STATUS) or b"{}"
    report = {"autoscaler_report": {"active_nodes": {"gpu-worker": 1}}}
    try:  # what the autoscaler of `ray up` writes; Ray's monitor writes it again in seconds
        _internal_kv_put(DEBUG_AUTOSCALING_STATUS, json.dumps(report), overwrite=True)
        assert has_autoscaler()
    finally:
        _internal_kv_put(DEBUG_AUTOSCALING_STATUS, before, overwrite=True)


_DRIVER = """
import sys, ray
from cluster.ray_compat import job_with_installed_code
for job in (None, job_with_installed_code()):
    ray.init(sys.argv[1], job_config=job, logging_level="error", log_to_driver=False)
    path = ray.get(ray.remote(num_cpus=0)(lambda: __import__("sys").path).remote())
    print(any(entry == sys.argv[2] for entry in path))
    ray.shutdown()
"""


def test_a_job_with_installed_code_does_not_give_workers_the_drivers_folder(
    ray_port: int, tmp_path: Path
) -> None:
    del ray_port  # Ray runs
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-P", "-c", _DRIVER, address, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


@ray.remote(num_cpus=0)
class _Actor:
    def number(self) -> str:
        return str(ray.get_runtime_context().get_actor_id())


def test_an_actor_is_dead_once_it_was_killed_and_one_that_ray_does_not_know_is_too(
    ray_port: int,
) -> None:
    num_before = num_live_actors()
    actor = _Actor.remote()
    actor_id = ray.get(actor.number.remote(), timeout=60)
    assert not is_actor_dead(actor_id)
    assert num_live_actors() == num_before + 1
    ray.kill(actor)
    deadline_s = time.monotonic() + 30.0
    while not is_actor_dead(actor_id):
        assert time.monotonic() < deadline_s, "Ray has not noticed the death"
        time.sleep(0.05)
    assert is_actor_dead("0" * len(actor_id))
    assert num_live_actors() == num_before


class _Plain:
    pass


def test_actors_of_one_class_leave_one_class_in_the_processes_with_handles_to_them(
    ray_port: int,
) -> None:
    cache = _ActorClassMethodMetadata._cache
    before = len(cache)
    actors = [actor_class(_Plain).options(num_cpus=0).remote() for _ in range(3)]
    assert len(cache) == before + 1
    for actor in actors:
        ray.kill(actor)


def test_the_proxies_and_the_replicas_of_a_deployment_are_processes_of_their_own(
    service: Running,
) -> None:
    state = service.state()
    actors = [*proxy_actors(), *replica_actors(service.config.app_name, "Ingress")]
    actors += replica_actors(service.config.app_name, "Pipeline")
    pids = [
        ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30) for actor in actors
    ]
    assert len(set(pids)) == len(pids) >= 3
    assert pids[-1] == state.pid


def test_a_serve_tells_where_it_listens_and_what_it_serves(service: Running) -> None:
    status = serve_status()
    assert status is not None
    assert f"http://{status.host}:{status.port}" == service.url
    assert status.proxy_location == ProxyLocation.HeadOnly
    assert not status.has_tls
    assert status.route_prefixes[service.config.app_name] == "/"
    assert set(status.route_prefixes) == set(serve.status().applications)


def test_serve_is_said_to_run_while_it_does(service: Running) -> None:
    assert is_serve_running()
