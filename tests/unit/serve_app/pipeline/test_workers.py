"""What goes wrong with an actor is told in terms of ours, with its name."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from eesd_dist.errors import PROCESS_DIED, CheckpointError, ConfigError, PeerLost
from serve_app.pipeline import workers


def test_a_damaged_checkpoint_is_told_with_the_rank_and_the_node_that_saw_it() -> None:
    error = CheckpointError(file="/m/model-00002.safetensors", found="a hole", expected="none")
    told = workers._ours(error, peer="verify rank 1 (pid 7 on 10.0.0.3)", operation="start")
    assert isinstance(told, ConfigError)
    assert str(told) == (
        "verify rank 1 (pid 7 on 10.0.0.3): /m/model-00002.safetensors: found a hole, expected none"
    )


def test_what_ray_says_of_a_death_tells_processes_from_nodes_and_links() -> None:
    of_node = RayActorError(error_msg="The actor died because its node has died. Node Id: 1")
    assert workers._why_gone(RayActorError()) == PROCESS_DIED
    assert workers._why_gone(of_node) == "its node has died"
    cut = ActorUnavailableError("RpcError", None)
    assert workers._why_gone(cut) == "its process has died, or the link to it"


def test_a_process_that_ray_ends_for_want_of_memory_is_lost_like_any_other() -> None:
    error = OutOfMemoryError("Task was killed due to the node running low on memory.")
    told = workers._ours(error, peer="verify rank 1", operation="loading")
    assert isinstance(told, PeerLost)
    assert "its process has died: ended by Ray, since its node ran out of memory" in str(told)

    class Handle:
        forever = SimpleNamespace(remote=lambda: _raises(error))

    assert asyncio.run(workers._death_of(Handle())) == workers._why_gone(error)


async def _raises(error: Exception) -> None:
    raise error


def test_a_new_worker_that_is_no_longer_needed_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)

    async def come(worker: Any) -> Any:
        return worker

    async def story() -> None:
        death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        there = asyncio.ensure_future(come(SimpleNamespace(handle="there", death=death)))
        await asyncio.sleep(0)
        workers._kill_spawned(there)
        assert killed == ["there"]
        assert death.cancelled()
        under_way = asyncio.ensure_future(come(None))
        workers._kill_spawned(under_way)
        await asyncio.sleep(0)
        assert under_way.cancelled()
        workers._kill_spawned(under_way)
        assert killed == ["there"]

    asyncio.run(story())
