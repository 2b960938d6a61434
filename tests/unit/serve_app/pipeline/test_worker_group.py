"""A crew that cannot be brought together leaves nobody at a post."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import EngineError
from eesd_dist.workers.messages import TelemetryOptions
from serve_app.pipeline import workers
from serve_app.pipeline.placement import Post
from serve_app.pipeline.placement_groups import Places
from serve_app.pipeline.worker_group import Crew
from serve_app.pipeline.workers import Members, Recruiting


async def _never() -> None:
    await asyncio.Event().wait()


async def _breaks() -> None:
    await asyncio.sleep(0.01)
    raise RuntimeError("no such device")


class _Recruits(Members):
    """Real but for the processes: each post's answer is given."""

    def __init__(self, answers: dict[str, Callable[[], Awaitable[None]]]) -> None:
        recruiting = Recruiting(
            pipeline="p",
            engine=EngineConfig.model_validate({"model": {"path": "."}}),
            stages=None,  # type: ignore[arg-type]
            telemetry=TelemetryOptions(model_name="m"),
            ask_router=None,
        )
        posts = [
            Post(name=name, rank=None if rank < 0 else rank, resources={})
            for rank, name in enumerate(answers, start=-1)
        ]
        super().__init__(Places([], name="p"), posts, recruiting=recruiting)
        self._answers = answers

    def _spawn(self, post: Post) -> Any:
        whereabouts = SimpleNamespace(remote=self._answers[post.name])
        return SimpleNamespace(name=post.name, whereabouts=whereabouts)


def test_when_one_recruit_fails_those_who_are_still_coming_are_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(workers.ray, "kill", lambda handle: killed.append(handle.name))

    async def run() -> None:
        crew = Crew(_Recruits({"drafting actor": _never, "verify rank 0": _breaks}))
        with pytest.raises(EngineError, match="verify rank 0 failed during start"):
            await crew.form(timeout_s=10.0)
        assert not list(crew.members)

    asyncio.run(run())
    assert sorted(killed) == ["drafting actor", "verify rank 0"]
