"""A group that cannot start an epoch leaves no worker in a slot."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EngineError
from eesd_dist.workers.messages import TelemetryOptions
from serve_app.pipeline import workers as workers_module
from serve_app.pipeline.placement import RankSlot
from serve_app.pipeline.placement_groups import PlacementGroups
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import Workers, WorkerSpec


async def _never() -> None:
    await asyncio.Event().wait()


async def _breaks() -> None:
    await asyncio.sleep(0.01)
    raise RuntimeError("no such device")


class _Spawns(Workers):
    """Real but for the processes: each slot's answer is given."""

    def __init__(self, answers: dict[str, Callable[[], Awaitable[None]]]) -> None:
        spec = WorkerSpec(
            pipeline="p",
            engine=EngineConfig.model_validate({"model": {"path": "."}}),
            stages=None,  # type: ignore[arg-type]
            telemetry=TelemetryOptions(model_name="m"),
            ask_router=None,
        )
        slots = [
            RankSlot(name=name, rank=None if rank < 0 else rank, resources={})
            for rank, name in enumerate(answers, start=-1)
        ]
        super().__init__(PlacementGroups([], name="p"), slots, spec=spec)
        self._answers = answers

    def _create_actor(self, slot: RankSlot) -> Any:
        process_info = SimpleNamespace(remote=self._answers[slot.name])
        return SimpleNamespace(name=slot.name, process_info=process_info)


def test_when_one_new_worker_fails_those_that_are_still_starting_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(workers_module.ray, "kill", lambda handle: killed.append(handle.name))

    async def run() -> None:
        group = WorkerGroup(_Spawns({"drafting actor": _never, "verify rank 0": _breaks}))
        with pytest.raises(EngineError, match="verify rank 0 failed during start"):
            await group.start_epoch(timeout_s=10.0)
        assert not list(group.workers)

    asyncio.run(run())
    assert sorted(killed) == ["drafting actor", "verify rank 0"]
