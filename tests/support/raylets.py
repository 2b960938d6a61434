"""Several raylets on this machine, for tests that need many nodes: run as a separate program.

    python -m tests.support.raylets

Places the slots of pipelines by every relation, removes a node, and writes the results as one JSON
object. It is a separate process, since a process has one Ray and a test session has another.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.update(
    {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "500",
        "RAY_health_check_failure_threshold": "3",
        "RAY_kill_worker_timeout_milliseconds": "1000",
        "RAY_health_check_initial_delay_ms": "0",
    }
)

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from eesd_dist.errors import ConfigError
from serve_app.pipeline.placement.placement_groups import PlacementGroups, placement_groups_for
from serve_app.pipeline.placement.rank_slots import RankSlot, rank_slots
from serve_app.placement_config import PlacementConfig

_STORE = 80 * 2**20


class NodeReporter:
    """Occupies a bundle, and returns its node."""

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


@contextmanager
def raylets() -> Iterator[tuple[Cluster, dict[str, Any]]]:
    """Starts a head without CPUs, one drafting node and two verifying nodes."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE},
    )
    try:
        nodes = {
            name: cluster.add_node(
                num_cpus=4,
                object_store_memory=_STORE,
                labels={"eesd.io/stage": stage},
                wait=False,
            )
            for name, stage in (("D", "draft"), ("V", "verify"), ("W", "verify"))
        }
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False)
        yield cluster, nodes
        ray.shutdown()
    finally:
        cluster.shutdown()


class Placer:
    """Requests placements, and maps nodes to letters."""

    def __init__(self, nodes: dict[str, Any]) -> None:
        self._letters = {node.node_id: name for name, node in nodes.items()}

    def place(
        self,
        *,
        patience_s: float = 20.0,
        on_wait: Callable[[str], None] = lambda why: None,
        num_verify_ranks: int = 2,
        gpus_per_rank: float = 0.0,
        **placement: object,
    ) -> tuple[PlacementGroups, tuple[RankSlot, ...]]:
        config = PlacementConfig.model_validate(placement)
        slots = rank_slots(config, num_verify_ranks=num_verify_ranks, gpus_per_rank=gpus_per_rank)

        async def placed() -> PlacementGroups:
            async with asyncio.timeout(patience_s):
                return await placement_groups_for(
                    slots, placement=config, name="p", owner="", on_wait=on_wait
                )

        return asyncio.run(placed()), slots

    def where(self, placement_groups: PlacementGroups, slots: tuple[RankSlot, ...]) -> list[str]:
        """Returns the node of each slot, from the table of Ray."""
        nodes = []
        for slot in slots:
            strategy = placement_groups.strategy_for(slot)
            table = placement_group_table(strategy.placement_group)
            nodes.append(table["bundles_to_node_id"][strategy.placement_group_bundle_index])
        return [self._letters[node] for node in nodes]

    def where_actors_are(
        self, placement_groups: PlacementGroups, slots: tuple[RankSlot, ...]
    ) -> list[str]:
        """Returns the same, from actors that run in the slots."""
        actors = [
            ray.remote(NodeReporter)
            .options(num_cpus=0.01, scheduling_strategy=placement_groups.strategy_for(slot))
            .remote()
            for slot in slots
        ]
        nodes = ray.get([actor.where.remote() for actor in actors], timeout=60)
        return [self._letters[node] for node in nodes]

    def once(
        self, *, num_verify_ranks: int = 2, gpus_per_rank: float = 0.0, **placement: object
    ) -> list[str]:
        placement_groups, slots = self.place(
            num_verify_ranks=num_verify_ranks, gpus_per_rank=gpus_per_rank, **placement
        )
        try:
            return self.where(placement_groups, slots)
        finally:
            placement_groups.remove()
            _until(_nothing_is_held)


def _nothing_is_held() -> bool:
    tables: dict[str, Any] = placement_group_table()
    return all(table["state"] == "REMOVED" for table in tables.values())


def _until(is_so: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{is_so.__name__} is not so after {timeout_s:g} s")
        time.sleep(0.1)


def _waiting(placer: Placer, **placement: object) -> dict[str, object]:
    """Waits for what it will not get, is told why, and gives up."""
    reasons: list[str] = []
    pending: list[int] = []

    def hear(why: str) -> None:
        reasons.append(why)
        tables = placement_group_table().values()
        pending.append(sum(len(t["bundles"]) for t in tables if t["state"] == "PENDING"))

    began_s = time.process_time()
    try:
        placer.place(on_wait=hear, patience_s=6.0, **placement)
    except TimeoutError:
        used_s = time.process_time() - began_s
        _until(_nothing_is_held)
        return {"said": reasons[-1], "num_visible": max(pending), "processor_s": used_s}
    raise AssertionError("it was placed")


def _impossible(placer: Placer) -> str:
    """The cluster's operator reports its node types: none has what is asked for."""
    from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeGroupConfig

    kind = NodeGroupConfig(name="small", resources={"CPU": 4}, max_count=3)
    gcs = ray._private.worker.global_worker.gcs_client  # type: ignore[attr-defined]
    reported = ClusterConfig(node_group_configs=[kind])
    gcs.report_cluster_config(reported.SerializeToString())
    try:
        placer.place(verify={"num_cpus": 5}, patience_s=20.0)
    except ConfigError as error:
        return str(error)
    finally:
        gcs.report_cluster_config(ClusterConfig().SerializeToString())
        _until(_nothing_is_held)
    raise AssertionError("it was placed")


def _on_nodes_of_gpus(cluster: Cluster) -> dict[str, list[str]]:
    """Adds two nodes of eight GPUs, which are numbers to Ray, and places tensor parallel groups
    on them without any setting: one that fits a node, and one that does not."""
    gpu_nodes = {
        name: cluster.add_node(num_cpus=16, num_gpus=8, object_store_memory=_STORE)
        for name in ("G", "H")
    }
    cluster.wait_for_nodes()
    placer = Placer(gpu_nodes)
    return {
        "tp8": placer.once(num_verify_ranks=8, gpus_per_rank=1.0),
        "tp4": placer.once(num_verify_ranks=4, gpus_per_rank=1.0),
        "tp12": placer.once(num_verify_ranks=12, gpus_per_rank=1.0),
        "tp8_pack": placer.once(num_verify_ranks=8, gpus_per_rank=1.0, strategy="PACK"),
    }


def _after_a_death(cluster: Cluster, nodes: dict[str, Any], placer: Placer) -> dict[str, object]:
    """Removes the node that the draft stage and the verify stage share."""
    placement_groups, slots = placer.place(
        stages="PACK",
        verify={"strategy": "STRICT_PACK", "labels": {"eesd.io/stage": "verify"}},
    )
    before = placer.where(placement_groups, slots)
    cluster.remove_node(nodes[before[0]], allow_graceful=False)
    started_s = time.monotonic()

    async def keep() -> None:
        keeping = asyncio.ensure_future(placement_groups.keep())
        await asyncio.sleep(0)
        await asyncio.to_thread(_until, lambda: _is_moved(before[0], nodes))
        keeping.cancel()

    asyncio.run(asyncio.wait_for(keep(), 40))
    moved_s = time.monotonic() - started_s
    after = placer.where_actors_are(placement_groups, slots)
    placement_groups.remove()
    return {"before": before, "after": after, "moved_s": moved_s}


def _is_moved(dead: str, nodes: dict[str, Any]) -> bool:
    tables = [t for t in placement_group_table().values() if t["state"] != "REMOVED"]
    held = {node for table in tables for node in table["bundles_to_node_id"].values()}
    return all(t["state"] == "CREATED" for t in tables) and nodes[dead].node_id not in held


def main() -> int:
    draft, verify = ({"labels": {"eesd.io/stage": stage}} for stage in ("draft", "verify"))
    with raylets() as (cluster, nodes):
        placer = Placer(nodes)
        placements = {
            "labels": placer.once(draft=draft, verify=verify),
            "verify_apart": placer.once(
                stages="STRICT_SPREAD", draft=draft, verify={**verify, "strategy": "STRICT_SPREAD"}
            ),
            "stages_apart": placer.once(stages="STRICT_SPREAD"),
            # The verify stage, placed first, could take any node, including the only drafting node.
            "swapped": [
                placer.once(stages="STRICT_SPREAD", draft=draft, verify={"num_cpus": 2})
                for _ in range(3)
            ],
            "one_node": placer.once(stages="STRICT_PACK"),
            "beside": placer.once(stages="PACK", verify={"strategy": "STRICT_SPREAD"}),
            "wish_denied": placer.once(
                stages="PACK", draft=draft, verify={**verify, "strategy": "STRICT_PACK"}
            ),
            "no_label": _waiting(placer, draft={"labels": {"eesd.io/stage": "none"}}),
            "second_waits": _waiting(
                placer, stages="STRICT_SPREAD", draft=draft, verify={**draft, "strategy": "PACK"}
            ),
            "both_wait": _waiting(
                placer,
                stages="PACK",
                draft={"resources": {"none": 1}},
                verify={"resources": {"none": 1}, "strategy": "STRICT_SPREAD"},
            ),
            "impossible": _impossible(placer),
        }
        placements["death"] = _after_a_death(cluster, nodes, placer)
        placements["gpus"] = _on_nodes_of_gpus(cluster)
    sys.stdout.write(json.dumps(placements) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
