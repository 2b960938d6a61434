"""A loop that is made to spin turns without a round, until its epoch ends."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from eesd_dist.workers.drafting_actor import DraftActor
from serve_app.bench.chaos.actors import _spin
from serve_app.pipeline.worker_group import WorkerGroup
from tests.support.toy_group import (
    ToyCluster,
    ToyWorkers,
    answer,
    expected,
    handle_of,
    toy_request,
    until,
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyCluster]:
    cluster = ToyCluster()
    cluster.install(monkeypatch)
    yield cluster
    cluster.close()


def _drafting_actor(group: WorkerGroup) -> DraftActor:
    actor = handle_of(group, "drafting actor").actor
    assert isinstance(actor, DraftActor)
    return actor


def test_a_spinning_loop_is_noticed_and_the_next_epoch_does_not_spin(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False, deadline_s=0.4))
        await group.start_epoch(timeout_s=10.0)
        trouble = asyncio.ensure_future(group.trouble())
        request = toy_request("r", max_tokens=10_000)
        stream = asyncio.ensure_future(answer(group.leader, request))
        await until(lambda: group.leader.status.progress > 0)
        assert _spin(_drafting_actor(group))
        error = await asyncio.wait_for(trouble, 5.0)
        assert "drafting actor (pid 1 on here) during rounds" in str(error)
        assert "no progress within 0.4 s" in str(error)
        await group.end_epoch(error)
        await asyncio.wait({stream}, timeout=5.0)
        assert stream.exception() is not None
        await group.start_epoch(timeout_s=10.0)
        short = toy_request("short", max_tokens=20)
        assert await answer(group.leader, short) == expected(short)
        await group.end_epoch(error)
        await group.stop()

    asyncio.run(run())


def test_a_drafting_actor_between_two_epochs_cannot_spin(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))
        await group.start_epoch(timeout_s=10.0)
        actor = _drafting_actor(group)
        await actor.leave()
        assert not _spin(actor)
        await group.stop()

    asyncio.run(run())
