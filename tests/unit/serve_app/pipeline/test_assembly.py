"""Where workers come from: orphans, if their placement groups are there, else new places."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from eesd_dist.routing.directory import Listed, PipelineId, PipelineReport
from serve_app.config import service_config
from serve_app.pipeline import assembly as assembly_module
from serve_app.pipeline.assembly import Assembly
from serve_app.pipeline.claim import Orphans
from serve_app.pipeline.lifecycle import EpochKind
from serve_app.pipeline.placement.placement_groups import PlacementGroups
from serve_app.pipeline.placement.rank_slots import RankSlot
from tests.support.toy_group import APP, NAMESPACE, ToyCluster, ToyWorkers
from tests.support.toy_stages import ToyStages


class Room:
    """Placement groups that are there at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gpus: float) -> None:
        self.asked: list[list[float]] = []
        self.removed: list[PlacementGroups] = []
        counts = iter(gpus)
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": next(counts)})
        monkeypatch.setattr(assembly_module, "has_autoscaler", lambda: False)
        monkeypatch.setattr(assembly_module, "placement_groups_for", self.place)
        monkeypatch.setattr(assembly_module, "workers_named", lambda *_, **__: {"app/w/0/1": "w"})
        monkeypatch.setattr(assembly_module, "remove_abandoned_groups", self.sweep)
        self.assembly: Assembly | None = None
        self.waiting_for: list[str] = []
        """What the assembly said while it waited."""
        self.swept: list[set[str]] = []
        """Pipelines that were known to be there, at each sweep."""

    def sweep(self, app: str, *, present: Collection[str]) -> None:
        assert app == APP
        self.swept.append(set(present))

    async def place(
        self,
        slots: Sequence[RankSlot],
        *,
        placement: object,
        name: str,
        owner: str,
        on_wait: Callable[[str], None],
    ) -> PlacementGroups:
        assert owner == "two"
        on_wait("verify rank 0 needs GPU 1")
        self.waiting_for.append(self.assembly.waiting_for if self.assembly else "")
        self.asked.append([slot.resources.get("GPU", 0.0) for slot in slots])
        room = self

        class Groups(PlacementGroups):
            def remove(self) -> None:
                room.removed.append(self)

        return Groups([], name=name, owner=owner)


class _Router:
    """Lists a pipeline `r`, or is silent."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent

    @property
    def pipelines(self) -> SimpleNamespace:
        return SimpleNamespace(remote=self._listed)

    async def _listed(
        self, app: str, membership_id: str, wait_s: float, *queue: object
    ) -> tuple[str, list[Listed]]:
        del app, membership_id, wait_s
        if self._is_silent:
            raise RayError
        return "1", [
            Listed(
                report=PipelineReport(pipeline_id=PipelineId("r"), leader="", address=None),
                age_s=0.0,
            )
        ]


def _assembly(
    folder: Path,
    *,
    is_router_silent: bool = False,
    orphans: Orphans | None = None,
    head: str | None = None,
) -> Assembly:
    config = service_config(
        {
            "app_name": APP,
            "engine": {
                "model": {"path": str(folder)},
                "parallel": {"verify_tensor_parallel_size": 2},
            },
            "router": {"namespace": NAMESPACE},
        }
    )
    return Assembly(
        config,
        ToyStages(),
        pipeline="p",
        owner="two",
        router=_Router(is_silent=is_router_silent),
        orphans=orphans,
        head=head,
    )


def test_gpus_that_join_while_room_is_waited_for_are_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(monkeypatch, 0.0, 1.0, 1.0)
    group = asyncio.run(_assembly(tmp_path)())
    assert room.asked == [[0.0] * 3, [1.0] * 3]
    assert [slot.resources["GPU"] for slot in group.workers.slots] == [1.0] * 3
    assert len(room.removed) == 1
    assert room.removed[0] is not group.workers.placement_groups


def test_a_gpu_too_few_puts_the_first_ranks_into_one_process_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(monkeypatch, 2.0, 2.0)
    group = asyncio.run(_assembly(tmp_path)())
    assert room.asked == [[1.0, 1.0]]
    assert [slot.name for slot in group.workers.slots] == ["drafting actor", "verify rank 1"]
    assert {slot.mode for slot in group.workers.slots} == {"shared"}
    assert "placement.mode: pipeline=app/p shared" in caplog.text


def test_a_node_that_joins_during_an_endless_wait_changes_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_gpus = 0.0
    room = Room(monkeypatch)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": num_gpus})
    monkeypatch.setattr(assembly_module, "_LOOK_S", 0.01)

    async def wait(slots: Sequence[RankSlot], **options: Any) -> PlacementGroups:
        nonlocal num_gpus
        if len(slots) == 2:
            return await room.place(slots, **options)
        num_gpus = 2.0
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(assembly_module, "placement_groups_for", wait)
    group = asyncio.run(asyncio.wait_for(_assembly(tmp_path)(), 10.0))
    assert room.asked == [[1.0, 1.0]]
    assert {slot.mode for slot in group.workers.slots} == {"shared"}


def test_an_assembly_says_what_it_waits_for_until_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(monkeypatch, 0.0, 0.0)
    room.assembly = _assembly(tmp_path)
    asyncio.run(room.assembly())
    assert room.waiting_for == ["verify rank 0 needs GPU 1"]
    assert not room.assembly.waiting_for


@pytest.mark.parametrize("is_silent", [False, True])
def test_what_dead_supervisors_left_is_removed_first_if_the_router_knows_the_others(
    is_silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(monkeypatch, 0.0, 0.0)
    asyncio.run(_assembly(tmp_path, is_router_silent=is_silent)())
    assert room.swept == ([] if is_silent else [{"p", "r", "w"}])
    assert len(room.asked) == 1


@pytest.mark.parametrize("head", [None, "/heads/two"])
def test_new_workers_draft_with_the_promoted_head_if_there_is_one(
    head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Room(monkeypatch, 0.0, 0.0)
    group = asyncio.run(_assembly(tmp_path, head=head)())
    assert group.kind is EpochKind.NONE
    assert group.has_other_head is (head is not None)


def test_orphans_without_their_placement_group_are_ended_and_new_workers_placed(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(monkeypatch, 0.0, 0.0, 0.0)

    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path, owner="one")
        await workers.fill(workers.slots[0], "start")
        ((name, handle),) = cluster.actors.items()
        orphans = Orphans(pipeline="p", workers={name: await handle.actor.tenancy()})
        group = await _assembly(tmp_path, orphans=orphans)()
        assert handle.killed.is_set()
        assert not list(group.workers)
        assert len(room.asked) == 1

    asyncio.run(run())


def test_orphans_are_claimed_into_the_placement_groups_that_they_have(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(monkeypatch, 0.0)

    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path, owner="one")
        await workers.fill(workers.slots[0], "start")
        ((name, handle),) = cluster.actors.items()
        cluster.groups.add("app/p/draft and verify/1")
        orphans = Orphans(pipeline="p", workers={name: await handle.actor.tenancy()})
        group = await _assembly(tmp_path, orphans=orphans, head="/heads/two")()
        assert not group.has_other_head, "the drafting actor says which head it has"
        assert [worker.handle for worker in group.workers] == [handle]
        assert room.asked == []
        assert (await handle.actor.tenancy()).owner == "two"
        await group.workers.release_all()

    asyncio.run(run())


def test_orphans_keep_the_mode_that_they_were_started_in_whatever_gpus_there_are_now(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    Room(monkeypatch, 8.0)

    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path, owner="one")
        await workers.fill(replace(workers.slots[0], mode="shared"), "start")
        ((name, handle),) = cluster.actors.items()
        cluster.groups.add("app/p/draft and verify/1")
        orphans = Orphans(pipeline="p", workers={name: await handle.actor.tenancy()})
        group = await _assembly(tmp_path, orphans=orphans)()
        assert [slot.name for slot in group.workers.slots] == ["drafting actor", "verify rank 1"]
        assert {slot.mode for slot in group.workers.slots} == {"shared"}
        await group.workers.release_all()

    asyncio.run(run())


def test_a_drafting_actor_that_died_with_its_supervisor_is_replaced_with_the_promoted_head(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    Room(monkeypatch, 0.0)

    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path, owner="one")
        await workers.fill(workers.slots[1], "start")
        ((name, handle),) = cluster.actors.items()
        cluster.groups.add("app/p/draft and verify/1")
        orphans = Orphans(pipeline="p", workers={name: await handle.actor.tenancy()})
        group = await _assembly(tmp_path, orphans=orphans, head="/heads/two")()
        assert str(group.workers.spec.engine.model.head) == "/heads/two"
        await group.workers.release_all()

    asyncio.run(run())
