"""A group of actors in this process: its draft stage goes, is stood in for, and comes back."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from ray.exceptions import RayActorError
from serve_app.pipeline.streams import Streams

from eesd_dist.config import EngineConfig, ParallelConfig
from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers import drafting_actor, rank_actor
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.messages import ProcessInfo, TelemetryOptions
from eesd_dist.workers.rank_actor import RankActor
from serve_app.config import RecoveryConfig
from serve_app.pipeline import worker_group
from serve_app.pipeline import workers as workers_module
from serve_app.pipeline.fallback import FallbackHandle, degraded_page
from serve_app.pipeline.placement import RankSlot
from serve_app.pipeline.placement_groups import PlacementGroups
from serve_app.pipeline.worker_group import WorkerGroup
from serve_app.pipeline.workers import Worker, Workers, WorkerSpec
from tests.support.toy_stages import ToyStages, toy_token


class _Call:
    """A method of an actor in this process, called as Ray's are."""

    def __init__(self, handle: "_Handle", method: Callable[..., Any]) -> None:
        self._handle = handle
        self._method = method

    def options(self, *, num_returns: str) -> "_Call":
        assert num_returns == "streaming"
        return self

    def remote(self, *arguments: object) -> Any:
        answer = self._method(*arguments)
        if hasattr(answer, "__aiter__"):
            return self._references(answer)
        begun = asyncio.ensure_future(answer)  # even if the caller stops waiting
        return asyncio.ensure_future(self._handle.while_alive(begun))

    async def _references(self, items: AsyncIterator[object]) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self._handle.while_alive(anext(items))
            except StopAsyncIteration:
                return
            done = asyncio.get_running_loop().create_future()
            done.set_result(item)
            yield done


class _Handle:
    """An actor that can be killed, or frozen."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.killed = asyncio.Event()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> _Call:
        self.asked.append(method)
        return _Call(self, getattr(self.actor, method))

    async def while_alive(self, answer: Any) -> Any:
        death = asyncio.ensure_future(self.killed.wait())
        call = asyncio.ensure_future(self._answered(answer))
        try:
            await asyncio.wait({death, call}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done() or self.killed.is_set():
                raise RayActorError
            return call.result()
        finally:
            death.cancel()
            call.cancel()

    async def _answered(self, answer: Any) -> Any:
        result = await answer
        await self.thawed.wait()
        return result


class _WorkersHere(Workers):
    """Real but for the processes."""

    def _create_actor(self, slot: RankSlot) -> Any:
        how = self.spec
        common: dict[str, Any] = {
            "name": slot.name,
            "stages": how.stages,
            "telemetry": how.telemetry,
        }
        if slot.rank is None:
            return _Handle(DraftActor(how.engine, **common))
        return _Handle(RankActor(how.engine, **common, stage=slot.stage, rank=slot.rank))


class _Here(WorkerGroup):
    """Of workers in this process."""

    def __init__(
        self,
        folder: Path,
        *,
        num_draft_ranks: int,
        fallback: bool = True,
        timeout_s: float = 20.0,
    ) -> None:
        slots = [RankSlot(name="drafting actor", rank=None, resources={}, stage="draft")]
        slots += [
            RankSlot(name=f"draft rank {r}", rank=r, resources={}, stage="draft")
            for r in range(1, num_draft_ranks)
        ]
        slots += [RankSlot(name=f"verify rank {r}", rank=r, resources={}) for r in range(2)]
        self.engine = EngineConfig.model_validate(
            {
                "model": {"path": str(folder)},
                "parallel": {
                    "draft_tensor_parallel_size": num_draft_ranks,
                    "verify_tensor_parallel_size": 2,
                    "fallback": fallback,
                    "timeout_s": timeout_s,
                },
            }
        )
        spec = WorkerSpec(
            pipeline="p",
            engine=self.engine,
            stages=ToyStages(),
            telemetry=TelemetryOptions(model_name="toy"),
            ask_router=None,
        )
        super().__init__(_WorkersHere(PlacementGroups([], name="p"), slots, spec=spec))

    def handle(self, name: str) -> _Handle:
        (found,) = [m.handle for m in self.workers if m.slot.name == name]
        assert isinstance(found, _Handle)
        return found

    async def lose(self, name: str) -> None:
        """Up to where the next epoch may be formed."""
        trouble = asyncio.ensure_future(self.trouble())
        await asyncio.sleep(0)
        self.handle(name).killed.set()
        assert name in str(await trouble)
        await self.end_epoch()


@pytest.fixture(autouse=True)
def _kills_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module.ray, "kill", lambda handle: handle.killed.set())
    monkeypatch.setattr(worker_group, "_GRACE_S", 0.01)
    for module in (drafting_actor, rank_actor):  # Ray would be started to be asked
        here = ProcessInfo(pid=1, host="here", node_id="n")
        monkeypatch.setattr(module, "process_info", lambda here=here: here)


def _request(name: str, *, max_tokens: int) -> Request:
    sampling = SamplingParams(seed=3, max_tokens=max_tokens)
    return Request(request_id=RequestId(name), prompt=(TokenId(1),), sampling=sampling)


def _expected(request: Request) -> list[int]:
    return [toy_token(request, 1 + i) for i in range(request.sampling.max_tokens)]


async def _answer(drafter: Worker, request: Request) -> list[int]:
    items = drafter.handle.submit.options(num_returns="streaming").remote(request)
    return [token async for item in items for emission in await item for token in emission.tokens]


@pytest.mark.parametrize("num_draft_ranks", [1, 2])
def test_fallbacks_take_the_part_of_a_draft_stage_that_died_until_it_is_ready(
    num_draft_ranks: int, tmp_path: Path
) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=num_draft_ranks)
        assert not group.can_fall_back
        await group.start_epoch(timeout_s=10.0)
        assert not group.can_fall_back
        victim = "drafting actor" if num_draft_ranks == 1 else "draft rank 1"
        await group.lose(victim)

        assert group.can_fall_back
        await group.start_degraded_epoch(timeout_s=10.0)
        assert group.is_degraded
        assert group.drafter.slot.name == "fallback in verify rank 0"
        request = _request("plain", max_tokens=7)
        assert await _answer(group.drafter, request) == _expected(request)

        await group.replace_drafters(timeout_s=10.0)
        assert group.handle(victim).asked.count("prepare") == 1
        assert "join" not in group.handle(victim).asked
        assert not group.can_fall_back
        assert group.is_degraded, "until the next epoch is formed"
        await group.end_epoch()
        await group.start_epoch(timeout_s=10.0)
        assert not group.is_degraded
        assert group.drafter.slot.name == "drafting actor"
        assert group.epoch == 3
        request = _request("full", max_tokens=7)
        assert await _answer(group.drafter, request) == _expected(request)
        await group.stop()

    asyncio.run(run())


def test_a_verify_rank_that_dies_then_takes_its_fallback_along(tmp_path: Path) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1)
        await group.start_epoch(timeout_s=10.0)
        await group.lose("drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        await group.lose("verify rank 0")
        with pytest.raises(PeerLost, match="verify rank 0"):
            _ = group.drafter
        assert not group.can_fall_back, "a verify rank without weights has no head start"
        await group.start_epoch(timeout_s=10.0)
        assert [worker.slot.name for worker in group.workers] == [
            "drafting actor",
            "verify rank 0",
            "verify rank 1",
        ]
        assert not group.is_degraded
        await group.stop()

    asyncio.run(run())


def test_a_death_that_follows_a_complaint_is_named_as_soon_as_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "_GRACE_S", 60.0)

    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=False)
        await group.start_epoch(timeout_s=10.0)
        trouble = asyncio.ensure_future(group.trouble())
        await asyncio.sleep(0.01)
        await group.handle("drafting actor").actor.leave()  # its loop ends first
        await asyncio.sleep(0.01)
        group.handle("verify rank 1").killed.set()
        said = str(await asyncio.wait_for(trouble, 5.0))
        assert "verify rank 1" in said
        assert "its process has died" in said
        await group.stop()

    asyncio.run(run())


@pytest.mark.parametrize("fallback", [False, True])
def test_a_worker_that_freezes_while_an_epoch_forms_is_named_and_replaced(
    fallback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (worker_group, "_BUSY_S"),
        (worker_group, "_CALL_EVERY_S"),
        (workers_module, "_PING_S"),
    ):
        monkeypatch.setattr(module, name, 0.1)

    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=fallback, timeout_s=0.1)
        await group.start_epoch(timeout_s=10.0)
        await group.lose("drafting actor")
        frozen = group.handle("verify rank 1")
        frozen.thawed.clear()
        forming = group.start_degraded_epoch if group.can_fall_back else group.start_epoch
        assert group.can_fall_back is fallback
        with pytest.raises(PeerLost, match=r"verify rank 1.*no answer within"):
            await asyncio.wait_for(forming(timeout_s=60.0), 5.0)
        await group.end_epoch()
        assert frozen.killed.is_set()
        await group.start_epoch(timeout_s=10.0)
        assert group.workers.are_complete
        await group.stop()

    asyncio.run(run())


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_new_worker_that_never_has_its_weights_is_killed_for_another(
    is_frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_BUSY_S", "_CALL_EVERY_S"):
        monkeypatch.setattr(worker_group, name, 0.1)

    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, timeout_s=0.1)
        await group.start_epoch(timeout_s=10.0)
        await group.lose("drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        spawn = group.workers._create_actor

        def bad_at_first(slot: RankSlot) -> Any:
            monkeypatch.setattr(group.workers, "_create_actor", spawn)
            handle = spawn(slot)
            handle.actor.prepare = lambda *_: asyncio.Event().wait()
            if is_frozen:
                asyncio.get_running_loop().call_later(0.05, handle.thawed.clear)
            return handle

        for coming in group.workers._coming.values():  # else one is on its way already
            coming.cancel()
        group.workers._coming.clear()
        monkeypatch.setattr(group.workers, "_create_actor", bad_at_first)
        why = "no answer within" if is_frozen else r"not loaded after 0\.5 s"
        with pytest.raises(PeerLost, match=why):
            await group.replace_drafters(timeout_s=5.0 if is_frozen else 0.5)
        assert group.can_fall_back
        await group.replace_drafters(timeout_s=5.0)
        assert not group.can_fall_back
        await group.stop()

    asyncio.run(run())


def test_without_fallbacks_a_dead_drafting_actor_is_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1, fallback=False)
        await group.start_epoch(timeout_s=10.0)
        await group.lose("drafting actor")
        assert not group.can_fall_back
        handle = group.handle("verify rank 0")
        assert not {"fallback", "prepare"} & set(handle.asked)
        with pytest.raises(EngineError, match=r"no fallback: set engine\.parallel\.fallback"):
            await handle.actor.fallback("stats")
        await group.stop()

    asyncio.run(run())


def test_a_new_worker_that_is_still_coming_when_the_degraded_epoch_breaks_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1)
        await group.start_epoch(timeout_s=10.0)
        may_come, num_spawned = asyncio.Event(), 0

        async def comes(slot: RankSlot, operation: str) -> Worker:
            nonlocal num_spawned
            num_spawned += 1
            await may_come.wait()
            return await Workers._spawn(group.workers, slot, operation)

        monkeypatch.setattr(group.workers, "_spawn", comes)
        await group.lose("drafting actor")
        await group.start_degraded_epoch(timeout_s=10.0)
        replacing = asyncio.ensure_future(group.replace_drafters(timeout_s=10.0))
        await asyncio.sleep(0.01)
        replacing.cancel()
        await asyncio.gather(replacing, return_exceptions=True)
        await group.end_epoch()
        may_come.set()
        await group.start_epoch(timeout_s=10.0)
        assert num_spawned == 1
        assert not group.is_degraded
        await group.stop()

    asyncio.run(run())


def test_a_stream_fails_back_without_a_crash_and_with_every_token(tmp_path: Path) -> None:
    async def run() -> None:
        group = _Here(tmp_path, num_draft_ranks=1)
        await group.start_epoch(timeout_s=10.0)

        async def drafter() -> Worker:
            return group.drafter

        streams = Streams(
            pipeline="p",
            drafter=drafter,
            recovery=RecoveryConfig(),
            delivered=lambda: None,
        )
        streams.resume()
        request = _request("moving", max_tokens=60)
        parts = streams.stream(request)
        tokens: list[int] = []

        async def some() -> None:
            tokens.extend(t for emission in await anext(parts) for t in emission.tokens)

        await some()
        trouble = PeerLost(peer="drafting actor", operation="round", reason="killed")
        await group.lose("drafting actor")
        streams.paused(trouble)
        await streams.broke(trouble, drafter=None)
        await group.start_degraded_epoch(timeout_s=10.0)
        streams.resume()
        await some()
        await group.replace_drafters(timeout_s=10.0)
        streams.paused(EngineError("failing back"))
        await streams.evict_all(drafter=group.drafter)
        await group.halt()
        await group.end_epoch()
        assert streams._quarantine.crashes(request.request_id) == 0, "a token came since the death"
        await group.start_epoch(timeout_s=10.0)
        streams.resume()
        async for part in parts:
            tokens += [t for emission in part for t in emission.tokens]
        assert tokens == _expected(request)
        await group.stop()

    asyncio.run(run())


def test_a_handle_calls_the_fallback_through_its_host_wherever_it_is_sent() -> None:
    handle = pickle.loads(pickle.dumps(FallbackHandle(_Echo("host"))))
    assert handle.stats.remote() == ("host", "fallback", ("stats",))
    assert handle.evict.remote(None, 7) == ("host", "fallback", ("evict", None, 7))
    told = handle.submit.options(num_returns="streaming").remote("a request")
    assert told == ("host", "fallback_submit", ("a request",))


class _Echo:
    """Says what it is asked."""

    def __init__(self, name: str, method: str = "") -> None:
        self.name = name
        self.method = method

    @property
    def fallback(self) -> "_Echo":
        return _Echo(self.name, "fallback")

    @property
    def fallback_submit(self) -> "_Echo":
        return _Echo(self.name, "fallback_submit")

    def options(self, **options: object) -> "_Echo":
        return self

    def remote(self, *arguments: object) -> object:
        return self.name, self.method, arguments


def test_the_degraded_page_is_prometheus_text() -> None:
    page = degraded_page(is_degraded=True, seconds=1.25).decode()
    samples = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}
    assert samples == {"eesd_degraded": 1.0, "eesd_degraded_seconds_total": 1.25}


def test_a_fallback_wants_a_verify_rank_for_each_draft_rank() -> None:
    with pytest.raises(ValidationError, match="raise verify_tensor_parallel_size to 2"):
        ParallelConfig(fallback=True, draft_tensor_parallel_size=2)
    assert ParallelConfig(fallback=True).fallback
    assert not ParallelConfig().fallback
