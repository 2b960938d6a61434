"""A supervisor with a worker group in this process: what it does about each loss, and how streams
fare."""

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import (
    ConfigError,
    EesdError,
    EngineCrashed,
    EngineError,
    LeaseLost,
    Migrated,
    PeerLost,
    PoisonRequest,
)
from eesd_dist.routing.directory import Promotion, RankLoad, StartReport
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import LoadProgress
from eesd_dist.workers.crash_report import require_room
from eesd_dist.workers.messages import Epoch, Lease, LoadedRank
from eesd_dist.workers.roles import DraftLeader, RankWorker
from serve_app.pipeline.placement import placement_groups
from serve_app.pipeline.placement.rank_slots import RankSlot
from serve_app.pipeline.supervisor import Supervisor
from serve_app.pipeline.worker_group import WorkerGroup
from tests.support.toy_group import (
    ToyCluster,
    ToyHandle,
    ToyIngress,
    ToyWorkers,
    answer,
    expected,
    handle_of,
    is_filled,
    slot_of,
    supervised,
    toy_request,
    toy_timings,
    until,
)
from tests.support.toy_poison import POISON, WAYS, PoisonedStages
from tests.support.toy_stages import ToyLeader, ToyRank, ToyStages, ToyWorker


def _story(
    story: Callable[[WorkerGroup, Supervisor], Awaitable[None]],
    workers: Callable[[], ToyWorkers],
    *,
    waits: bool = True,
    **options: Any,
) -> None:
    """Tells a story about a supervised group, once its first epoch has started."""

    async def run() -> None:
        group = WorkerGroup(workers())
        supervisor = supervised(group, **options)
        async with asyncio.timeout(40.0):
            if waits:
                await supervisor.check()
            await story(group, supervisor)
            await supervisor.stop()

    asyncio.run(run())


def _fails(slot: RankSlot) -> Any:
    raise EngineError(f"no device for {slot.name}")


def test_a_full_disk_is_named_while_a_lost_worker_cannot_be_replaced(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    free_mib = 100

    def room(folder: Path) -> os.statvfs_result:
        stats = os.statvfs(folder)
        return os.statvfs_result((1, 1, *stats[2:4], free_mib * 2**20, *stats[5:]))

    def workers() -> ToyWorkers:
        check = partial(require_room, [tmp_path], room=room)
        return ToyWorkers(cluster, tmp_path, fallback=False, require_room=check)

    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        nonlocal free_mib
        free_mib = 3
        handle_of(group, "verify rank 1").killed.set()
        cause = f"no space on the disk of {tmp_path}: found 3.0 MiB free, expected at least 16 MiB"
        await until(lambda: cause in supervisor.why_unavailable())
        free_mib = 100
        await until(lambda: supervisor.is_ready)

    _story(story, workers)


# Streams.


@pytest.mark.parametrize("victim", ["drafting actor", "verify rank 1"])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_stream_loses_no_token_when_a_worker_dies_and_the_death_is_not_held_against_it(
    victim: str, fallback: bool, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        request = toy_request("r", max_tokens=60)
        ingress = ToyIngress(supervisor, request)
        stream = asyncio.ensure_future(ingress.answer())
        await until(lambda: ingress.num_tokens > 10)
        handle_of(group, victim).killed.set()
        assert await stream == expected(request)
        assert supervisor.interruptions.number == 1
        assert not any(isinstance(error, EngineCrashed) for error in ingress.errors)
        assert victim in str(ingress.errors[0])
        assert supervisor.interruptions.recovery_s is not None

    _story(story, lambda: ToyWorkers(cluster, tmp_path, fallback=fallback))


@pytest.mark.parametrize(
    "fault", ["bug in the drafting actor", "bug in a verify rank"], ids=["drafting", "verify"]
)
def test_a_poison_request_is_refused_and_all_others_get_every_token(
    fault: str, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        del group
        good = [toy_request("g" * n, max_tokens=30) for n in range(1, 4)]
        bad = toy_request("bad", max_tokens=9, prompt=(POISON, WAYS[fault]))
        outcomes = await asyncio.gather(
            *[ToyIngress(supervisor, request).answer() for request in (*good, bad)],
            return_exceptions=True,
        )
        assert outcomes[:3] == [expected(request) for request in good]
        assert isinstance(outcomes[3], PoisonRequest)
        await until(lambda: supervisor.is_ready)

    _story(story, lambda: ToyWorkers(cluster, tmp_path, fallback=False, stages=PoisonedStages()))


def test_an_engine_that_breaks_under_every_request_is_given_up(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    heartbeat_s = 1.0  # the crashes come between two heartbeats

    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        prompt = (POISON, WAYS["bug in the drafting actor"])
        bad = [toy_request(f"bad-{i}", max_tokens=9, prompt=prompt) for i in range(4)]
        outcomes = await asyncio.gather(
            *[ToyIngress(supervisor, request).answer() for request in bad],
            return_exceptions=True,
        )
        assert all(isinstance(error, EesdError) for error in outcomes)
        with pytest.raises(EngineError, match="given up: it broke 3 times in a row without"):
            await supervisor.check()
        assert supervisor.why_unavailable().startswith("given up: ")
        await until(lambda: not cluster.actors)
        assert group.epoch == 3

    _story(
        story,
        lambda: ToyWorkers(
            cluster,
            tmp_path,
            fallback=False,
            stages=PoisonedStages(),
            worker_heartbeat_s=heartbeat_s,
        ),
        max_interruptions=2,
        worker_heartbeat_s=heartbeat_s,
    )


def test_interruptions_with_tokens_between_them_and_without_requests_are_not_limited(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        for number in range(1, 4):
            handle_of(group, "verify rank 0").killed.set()  # idle
            await until(
                lambda n=number: supervisor.interruptions.number == n and supervisor.is_ready
            )
        for number in range(4, 7):
            request = toy_request(f"r{number}", max_tokens=40)
            ingress = ToyIngress(supervisor, request)
            stream = asyncio.ensure_future(ingress.answer())
            await until(lambda: group.leader.status.progress > 0 and group.leader.status.num_live)
            handle_of(group, "verify rank 0").killed.set()
            assert await stream == expected(request)
        assert supervisor.interruptions.number == 6
        await supervisor.check()

    _story(story, lambda: ToyWorkers(cluster, tmp_path, fallback=False), max_interruptions=1)


# Degraded epochs.


def test_a_stream_goes_through_a_degraded_epoch_and_back_with_every_token(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        await _fallback_prepared(group)
        request = toy_request("moving", max_tokens=200)
        ingress = ToyIngress(supervisor, request)
        stream = asyncio.ensure_future(ingress.answer())
        await until(lambda: ingress.num_tokens > 10)
        may_come = _hold_spawns(group)
        handle_of(group, "drafting actor").killed.set()
        await until(lambda: supervisor.is_degraded)
        num_before = ingress.num_tokens
        await until(lambda: ingress.num_tokens > num_before + 10)
        assert supervisor.degraded_s > 0
        may_come.set()
        await until(lambda: supervisor.is_ready and not supervisor.is_degraded)
        degraded_s = supervisor.degraded_s
        assert await stream == expected(request)
        assert supervisor.degraded_s == degraded_s
        assert supervisor.interruptions.number == 1, "failing back is none"
        kinds = [type(error) for error in ingress.errors]
        assert kinds[0] is PeerLost
        assert Migrated in kinds
        assert EngineCrashed not in kinds

    _story(story, lambda: ToyWorkers(cluster, tmp_path))


def test_the_seconds_of_a_degraded_epoch_that_breaks_are_counted(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        await _fallback_prepared(group)
        may_come = _hold_spawns(group)
        handle_of(group, "drafting actor").killed.set()
        await until(lambda: supervisor.is_degraded)
        await asyncio.sleep(0.2)
        degraded_s = supervisor.degraded_s
        assert degraded_s >= 0.2
        handle_of(group, "verify rank 1").killed.set()
        await until(lambda: supervisor.interruptions.number == 2)
        assert supervisor.degraded_s >= degraded_s
        may_come.set()

    _story(story, lambda: ToyWorkers(cluster, tmp_path))


async def _fallback_prepared(group: WorkerGroup) -> None:
    await until(lambda: not group._preparations._tasks)


def _hold_spawns(group: WorkerGroup) -> asyncio.Event:
    """New workers do not start until the event is set."""
    may_come, spawn = asyncio.Event(), group.workers._spawn

    async def comes(slot: RankSlot, operation: str) -> Any:
        await may_come.wait()
        return await spawn(slot, operation)

    group.workers._spawn = comes  # type: ignore[method-assign]
    return may_come


def test_streams_go_on_with_fallbacks_when_the_draft_stage_dies_while_an_epoch_starts(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    """A verify rank is lost, and a draft rank during the start that replaces it."""
    stages = _JoinsWhenTold()

    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        request = toy_request("kept", max_tokens=60)
        ingress = ToyIngress(supervisor, request)
        stream = asyncio.ensure_future(ingress.answer())
        await until(lambda: ingress.num_tokens > 10)
        stages.may_join.clear()
        handle_of(group, "verify rank 1").killed.set()
        await until(lambda: group.epoch == 2 and is_filled(group))
        await until(lambda: "join" in handle_of(group, "verify rank 1").asked)
        _hold_spawns(group)
        handle_of(group, "draft rank 1").killed.set()
        stages.may_join.set()
        await until(lambda: supervisor.is_degraded)
        assert await stream == expected(request)
        assert supervisor.is_degraded

    _story(story, lambda: ToyWorkers(cluster, tmp_path, num_draft_ranks=2, stages=stages))


class _HasNoRoom(ToyLeader):
    def connect(self, epoch: Epoch) -> None:
        if epoch.is_degraded:
            raise OSError("cannot allocate memory")


class _NoRoomForFallback(ToyStages):
    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return _HasNoRoom(config)


def test_a_fallback_that_fails_by_itself_does_not_cost_its_host(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        host = handle_of(group, "verify rank 0")
        handle_of(group, "drafting actor").killed.set()
        await until(lambda: supervisor.interruptions.number and supervisor.is_ready)
        assert not supervisor.is_degraded
        assert group.epoch == 3, "one degraded attempt, then a full epoch"
        assert handle_of(group, "verify rank 0") is host

    _story(story, lambda: ToyWorkers(cluster, tmp_path, stages=_NoRoomForFallback()))


def test_a_submission_that_comes_to_a_leader_on_its_way_out_is_told_so(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        send_on = group.send_streams_on
        answers: list[asyncio.Task[object]] = []

        async def sends_on(reason: EesdError) -> None:
            await send_on(reason)
            request = toy_request("late", max_tokens=10_000)
            answers.append(asyncio.ensure_future(answer(group.leader, request)))
            await asyncio.sleep(0.1)

        monkeypatch.setattr(group, "send_streams_on", sends_on)
        handle_of(group, "drafting actor").killed.set()
        await until(lambda: answers)
        with pytest.raises(PeerLost, match="failing back"):
            await asyncio.wait_for(answers[0], 10.0)
        await until(lambda: supervisor.is_ready and not supervisor.is_degraded)

    _story(story, lambda: ToyWorkers(cluster, tmp_path))


@pytest.mark.parametrize(
    "error",
    [PeerLost(peer="drafting actor", operation="o", reason="slow disk"), ConfigError("damaged")],
    ids=["slow", "damaged"],
)
def test_a_draft_stage_that_cannot_be_restored_is_tried_again_while_fallbacks_decode(
    error: EesdError, tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        restore, num_tries = group.restore_draft, 0

        async def restores(*, timeout_s: float) -> None:
            nonlocal num_tries
            num_tries += 1
            if num_tries < 4:
                raise error
            await restore(timeout_s=timeout_s)

        monkeypatch.setattr(group, "restore_draft", restores)
        epochs: list[int] = []
        handle_of(group, "drafting actor").killed.set()
        await until(lambda: supervisor.is_degraded)
        epochs.append(group.epoch)
        await until(lambda: supervisor.is_ready and not supervisor.is_degraded)
        epochs.append(group.epoch)
        assert num_tries == 4
        assert epochs == [2, 3], "the degraded epoch went on"
        assert supervisor.interruptions.number == 1

    _story(story, lambda: ToyWorkers(cluster, tmp_path))


# A promoted head.


class _HeadGone(ToyStages):
    """The drafting actor cannot load this head."""

    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return _HeadlessLeader(config) if config.model.head is not None else ToyLeader(config)


class _HeadlessLeader(ToyLeader):
    def prepare(self, **_: object) -> LoadedRank:
        raise ConfigError(f"{self._config.model.head} is gone")


@pytest.mark.parametrize("fallback", [False, True])
def test_a_promoted_head_that_is_gone_is_replaced_by_the_configured_one(
    fallback: bool, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        group.set_head("/heads/gone")
        supervisor.promotion = Promotion(in_place_of="", head="/heads/gone", taken_unix_s=1.0)
        request = toy_request("r", max_tokens=80)
        ingress = ToyIngress(supervisor, request)
        stream = asyncio.ensure_future(ingress.answer())
        await until(lambda: ingress.num_tokens > 4)
        may_come = _hold_spawns(group)
        handle_of(group, "drafting actor").killed.set()
        if fallback:
            await until(lambda: supervisor.is_degraded and group.leader.status.num_live)
        may_come.set()
        assert await stream == expected(request)
        await until(lambda: supervisor.is_ready and not supervisor.is_degraded)
        assert not group.has_other_head
        assert supervisor.promotion is None
        assert not any(isinstance(error, EngineCrashed) for error in ingress.errors), (
            "a missing file is no request's doing"
        )

    _story(
        story,
        lambda: ToyWorkers(cluster, tmp_path, fallback=fallback, stages=_HeadGone()),
    )


def test_a_head_is_not_taken_by_a_pipeline_that_is_degraded_or_not_ready(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        may_come = _hold_spawns(group)
        with pytest.raises(ConfigError, match="toys draft without a head"):
            await supervisor.load_head("/heads/two", head_key="", pause_s=1.0)
        assert supervisor.promotion is None
        handle_of(group, "drafting actor").killed.set()
        await until(lambda: supervisor.is_degraded)
        with pytest.raises(EngineError, match=r"degraded: .*try again"):
            await supervisor.load_head("/heads/two", head_key="", pause_s=1.0)
        handle_of(group, "verify rank 0").killed.set()
        await until(lambda: not supervisor.is_ready)
        with pytest.raises(EngineError, match=r"unavailable after 0\.1 s: re-forming for"):
            await supervisor.load_head("/heads/two", head_key="", pause_s=0.1)
        may_come.set()

    _story(story, lambda: ToyWorkers(cluster, tmp_path))


# Starts that fail.


def test_a_start_is_given_up_after_its_deadline_and_all_workers_are_released(
    tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        request = toy_request("lost", max_tokens=10_000)
        stream = asyncio.ensure_future(answer(group.leader, request))
        leader = group.leader
        await until(lambda: leader.status.num_live)
        monkeypatch.setattr(group.workers, "_create_actor", _fails)
        handle_of(group, "verify rank 0").killed.set()
        with pytest.raises(PeerLost, match="verify rank 0"):
            await asyncio.wait_for(stream, 5.0)
        await until(lambda: not cluster.actors)
        with pytest.raises(EngineError, match=r"not formed within 0\.5 s.*no device"):
            await supervisor.check()
        assert group.epoch > 2, "it was tried more than once"

    # The deadline of a worker has to be shorter than that of a start.
    _story(
        story,
        lambda: ToyWorkers(cluster, tmp_path, fallback=False),
        deadline_s=0.4,
        load_s=0.5,
    )


def test_a_wrong_configuration_is_given_up_at_once(tmp_path: Path, cluster: ToyCluster) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        with pytest.raises(ConfigError, match=r"verify rank .*found nothing"):
            await supervisor.check()
        assert group.epoch == 1
        assert not cluster.actors

    _story(
        story,
        lambda: ToyWorkers(cluster, tmp_path / "nothing", fallback=False),
        waits=False,
    )


@pytest.mark.parametrize("when", ["making", "starting"])
def test_a_bug_in_supervision_leaves_no_caller_waiting_and_no_worker(
    when: str, tmp_path: Path, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path))
        await group.workers.fill(group.workers.slots[0], "test")

        async def breaks(**_: object) -> None:
            raise KeyError("unexpected")

        monkeypatch.setattr(group, "start_epoch", breaks)
        supervisor = supervised(KeyError("unexpected") if when == "making" else group)
        with pytest.raises(EngineError, match="given up by a bug: KeyError"):
            await asyncio.wait_for(supervisor.check(), 5.0)
        if when == "making":
            with pytest.raises(EngineError, match="given up by a bug"):
                supervisor.require_group()
        else:
            assert not cluster.actors

    asyncio.run(run())


def test_a_group_that_cannot_be_placed_says_why_to_all_callers() -> None:
    async def run() -> None:
        supervisor = supervised(ConfigError("no room for pipeline p"))
        with pytest.raises(ConfigError, match="no room"):
            await supervisor.check()
        with pytest.raises(EngineError, match="has no workers: given up: no room"):
            supervisor.require_group()
        assert "given up: no room" in supervisor.why_unavailable()

    asyncio.run(run())


class _Broken(ToyWorker):
    """A process that can take part in no epoch."""

    def join(self, epoch: Epoch) -> ToyRank:
        raise OSError("too many open files")


class _FirstOneBroken(ToyStages):
    def __init__(self) -> None:
        self._made: list[RankWorker] = []

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        kind = ToyWorker if self._made else _Broken
        self._made.append(kind(config, rank=rank))
        return self._made[-1]


def test_a_process_that_fails_by_itself_is_replaced_and_its_healthy_peers_are_not(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def run() -> None:
        workers = ToyWorkers(cluster, tmp_path, fallback=False, stages=_FirstOneBroken())
        group = WorkerGroup(workers)
        await workers.fill(slot_of(group, "verify rank 1"), "test")
        await workers.fill(slot_of(group, "verify rank 0"), "test")
        broken, healthy = handle_of(group, "verify rank 1"), handle_of(group, "verify rank 0")
        supervisor = supervised(group)
        await asyncio.wait_for(supervisor.check(), 10.0)
        assert handle_of(group, "verify rank 0") is healthy
        assert handle_of(group, "verify rank 1") is not broken
        await supervisor.stop()

    asyncio.run(run())


# The end.


@pytest.mark.parametrize("during", ["the first start", "a full epoch", "a degraded epoch"])
def test_a_pipeline_that_is_taken_down_ends_its_workers_whatever_it_was_doing(
    during: str, tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        if during == "a degraded epoch":
            _hold_spawns(group)
            handle_of(group, "drafting actor").killed.set()
            await until(lambda: supervisor.is_degraded)
        elif during == "the first start":
            _hold_spawns(group)
            await asyncio.sleep(0.05)
        await asyncio.wait_for(supervisor.stop(), 5.0)
        assert not cluster.actors

    _story(story, lambda: ToyWorkers(cluster, tmp_path), waits=during != "the first start")


def test_a_pipeline_that_waits_for_room_is_taken_down_at_once() -> None:
    async def run() -> None:
        async def never() -> WorkerGroup:
            await asyncio.Event().wait()
            raise AssertionError

        async def nothing() -> None:
            pass

        supervisor = Supervisor(
            never,
            pipeline="p",
            timings=toy_timings(),
            max_interruptions=1,
            publish_status=nothing,
            waiting_for=lambda: "verify rank 0 needs GPU 1",
        )
        await asyncio.sleep(0.01)
        why = supervisor.why_unavailable()
        assert re.fullmatch(r"starting for 0\.\d s: verify rank 0 needs GPU 1", why)
        assert supervisor.start_report() is None
        await asyncio.wait_for(supervisor.stop(), 5.0)

    asyncio.run(run())


class _JoinsWhenTold(ToyStages):
    """Verify ranks join once they may."""

    def __init__(self) -> None:
        self.may_join = threading.Event()
        self.may_join.set()

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return _Waits(config, rank=rank, may_join=self.may_join)


class _Waits(ToyWorker):
    def __init__(self, config: EngineConfig, *, rank: int, may_join: threading.Event) -> None:
        super().__init__(config, rank=rank)
        self._may_join = may_join

    def join(self, epoch: Epoch) -> ToyRank:
        self._may_join.wait(30.0)
        return super().join(epoch)


@pytest.mark.parametrize("during", ["a start", "a full epoch", "a degraded epoch"])
def test_a_supervisor_that_has_lost_its_lease_touches_no_worker_any_more(
    during: str, tmp_path: Path, cluster: ToyCluster
) -> None:
    stages = _JoinsWhenTold()

    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        if during == "a degraded epoch":
            _hold_spawns(group)
            handle_of(group, "drafting actor").killed.set()
            await until(lambda: supervisor.is_degraded)
        elif during == "a start":
            stages.may_join.clear()
            handle_of(group, "drafting actor").killed.set()
            await until(lambda: "join" in _asked_since(group, epoch=2))
        handles = [worker.handle for worker in group.workers if not worker.is_dead]
        for handle in handles:
            await handle.actor.claim(Lease(owner="replica-2", seconds=60.0), "replica-1")
        await until(lambda: "given up" in supervisor.why_unavailable())
        with pytest.raises(LeaseLost, match="replica-2, not replica-1"):
            await supervisor.check()
        stages.may_join.set()
        await supervisor.stop()
        assert not any(isinstance(h, ToyHandle) and h.killed.is_set() for h in handles)

    def _asked_since(group: WorkerGroup, *, epoch: int) -> list[str]:
        calls = handle_of(group, "verify rank 0").asked
        return calls if group.epoch == epoch and calls.count("join") == 2 else []

    _story(
        story,
        lambda: ToyWorkers(cluster, tmp_path, fallback=during == "a degraded epoch", stages=stages),
    )


# What is told of it.


def test_a_pipeline_whose_worker_makes_no_progress_gets_no_new_requests_before_it_is_lost(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    published: list[bool] = []
    supervisors: list[Supervisor] = []

    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        supervisors.append(supervisor)
        frozen = handle_of(group, "verify rank 1")
        frozen.thawed.clear()
        await until(lambda: not supervisor.is_ready)
        assert "verify rank 1" in supervisor.why_unavailable()
        assert "has made no progress for" in supervisor.why_unavailable()
        await until(lambda: published == [False])
        frozen.thawed.set()
        await until(lambda: supervisor.is_ready)
        await until(lambda: published == [False, True])
        assert supervisor.interruptions.number == 0

    _story(
        story,
        lambda: ToyWorkers(cluster, tmp_path, fallback=False, stall_s=0.2),
        stall_s=0.2,
        published=lambda: published.extend(supervisor.is_ready for supervisor in supervisors),
    )


class _LoadsPartly(_Waits):
    def join(self, epoch: Epoch) -> ToyRank:
        progress = LoadProgress(bytes_done=30, bytes_total=100, piece="layer 1", seconds=0.1)
        self.loading.of(f"verify rank {self._rank}")(progress)
        return super().join(epoch)


class _LoadPartly(_JoinsWhenTold):
    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return _LoadsPartly(config, rank=rank, may_join=self.may_join)


def test_a_start_says_how_many_workers_there_are_and_how_much_they_have_loaded(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    stages = _LoadPartly()
    stages.may_join.clear()

    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        assert supervisor.start_report() == StartReport(num_workers=0, num_slots=0)
        await until(lambda: len(_started(supervisor).loads) == 2)
        assert _started(supervisor) == StartReport(
            num_workers=3,
            num_slots=3,
            loads=tuple(
                RankLoad(rank=f"verify rank {rank}", bytes_done=30, bytes_total=100)
                for rank in range(2)
            ),
        )
        assert "verify rank 1 30 % (0.0 of 0.0 GB)" in supervisor.loading()
        stages.may_join.set()
        await supervisor.check()

    _story(story, lambda: ToyWorkers(cluster, tmp_path, fallback=False, stages=stages), waits=False)


def _started(supervisor: Supervisor) -> StartReport:
    report = supervisor.start_report()
    assert report is not None
    return report


def test_the_longest_start_is_kept_and_goes_into_the_leases(
    tmp_path: Path, cluster: ToyCluster
) -> None:
    async def story(group: WorkerGroup, supervisor: Supervisor) -> None:
        first_s = supervisor.start_s
        assert first_s is not None
        group.workers.start_s = 100.0
        handle_of(group, "verify rank 0").killed.set()
        await until(lambda: supervisor.interruptions.number and supervisor.is_ready)
        assert supervisor.start_s == 100.0
        assert group.workers.lease().start_s == 100.0
        assert supervisor.start_report() is None  # what was lost says more

    _story(story, lambda: ToyWorkers(cluster, tmp_path, fallback=False))


def test_placement_groups_are_checked_again_when_checking_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_groups, "_POLL_STATUS_S", 0.01)
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        raise ConnectionError("the head is away")

    async def run() -> None:
        groups = placement_groups.PlacementGroups([], name="p", owner="one")
        monkeypatch.setattr(groups, "_poll", look)
        keeping = asyncio.ensure_future(groups.keep())
        await until(lambda: num_looks > 1)
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(run())


def test_the_wait_for_room_does_not_shorten_the_start(tmp_path: Path, cluster: ToyCluster) -> None:
    async def run() -> None:
        group = WorkerGroup(ToyWorkers(cluster, tmp_path, fallback=False))

        async def room_comes_late() -> WorkerGroup:
            await asyncio.sleep(1.0)
            return group

        async def publish() -> None:
            pass

        supervisor = Supervisor(
            room_comes_late,
            pipeline="p",
            timings=toy_timings(load_s=0.9, deadline_s=0.5, stall_s=0.4),
            max_interruptions=4,
            publish_status=publish,
        )
        await supervisor.check()
        assert supervisor.interruptions.number == 0
        assert group.epoch == 1
        await supervisor.stop()

    asyncio.run(run())
