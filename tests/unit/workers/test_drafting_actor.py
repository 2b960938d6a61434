"""Submissions and cancellations in any order, suspects, crashes, heartbeats, the ends of requests
that the router receives, the duration of page leases, and leaving an epoch before joining it."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.errors import (
    CapacityError,
    EesdError,
    EngineCrashed,
    EngineError,
    LeaseLost,
    Migrated,
    PeerLost,
    QueueFull,
    RequestError,
)
from eesd_dist.model.slow_kernels import note_slow_kernel
from eesd_dist.schedule.page_leases import PageLease
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import LoadProgress, Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers import drafting_actor, tenure
from eesd_dist.workers.drafting_actor import DraftActor
from eesd_dist.workers.epochs.joining import Joining
from eesd_dist.workers.messages import (
    Address,
    Epoch,
    Lease,
    ProcessInfo,
    RouterAdvice,
    RouterNews,
    StreamItem,
    TelemetryOptions,
    WorkerIdentity,
)
from eesd_dist.workers.rank_actor import RankActor
from eesd_dist.workers.roles import DraftLeader
from eesd_dist.workers.tenure import Tenure
from tests.support.toy_group import until
from tests.support.toy_stages import (
    TOKENS_PER_ROUND,
    NoPages,
    ToyDrafter,
    ToyLeader,
    ToyStages,
    ToyStep,
    held,
    toy_token,
)

CONFIG = EngineConfig.model_validate({"model": {"path": "."}})
_OPTIONS: dict[str, Any] = {
    "stages": ToyStages(),
    "telemetry": TelemetryOptions(model_name="toy"),
}


def _request(name: str, *, max_tokens: int = 1000) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=RequestId(name), prompt=(TokenId(1),), sampling=sampling)


class Router:
    def __init__(self) -> None:
        self.live: set[str] = set()
        self.met: list[str] = []
        self.ended: list[str] = []

    async def __call__(self, update: RouterNews) -> RouterAdvice:
        self.met += [new.request_id for new in update.admitted]
        self.live |= {new.request_id for new in update.admitted}
        self.live |= {outcome.request_id for outcome in update.outcomes}
        self.live -= set(update.finished)
        self.ended += update.finished
        return RouterAdvice(plans={})


class Client:
    """Reads all its streams, until the test is over."""

    def __init__(self, actor: DraftActor) -> None:
        self._actor = actor
        self._items: defaultdict[tuple[str, int], asyncio.Queue[StreamItem]] = defaultdict(
            asyncio.Queue
        )
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        last = ("", 0)
        while True:
            batch = await self._actor.take("client", last)
            last = (batch.outbox, batch.number)
            for request_id, submission, item in batch.items:
                self._items[request_id, submission].put_nowait(item)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def submit(self, request: Request) -> None:
        await self._actor.submit(request, "client")

    async def next(self, request: Request) -> StreamItem:
        async with asyncio.timeout(10.0):
            return await self._items[request.request_id, request.submission].get()

    async def error(self, request: Request) -> EesdError:
        """Returns the error that ends the stream."""
        while not isinstance(item := await self.next(request), EesdError):
            assert item[-1].finish_reason is None
        return item

    async def tokens(self, request: Request) -> list[int]:
        """Returns the tokens up to the end of the stream or its error."""
        tokens: list[int] = []
        while not isinstance(item := await self.next(request), EesdError):
            tokens += [token for emission in item for token in emission.tokens]
            if item[-1].finish_reason is not None:
                break
        return tokens


def test_the_router_hears_the_end_of_requests_that_are_cancelled_unread_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting_actor, "_LOOK_S", 0.05)
    monkeypatch.setattr(drafting_actor, "_UNREAD_S", 0.2)

    async def run() -> None:
        router = Router()
        config = EngineConfig.model_validate(
            {"model": {"path": "."}, "scheduler": {"max_waiting": 2}}
        )
        async with _joined(ToyDrafter(config), ask_router=router) as (actor, client):
            cancelled, rejected = _request("cancelled"), _request("refused")
            await actor.submit(_request("unread"), "a client that has died")
            await client.submit(cancelled)
            await client.next(cancelled)
            await client.submit(rejected)
            assert isinstance(await client.error(rejected), QueueFull)
            await actor.cancel(cancelled.request_id, cancelled.submission)
            await asyncio.sleep(0.6)
            assert router.live == set()
            assert sorted(router.met) == ["cancelled", "unread"]
            assert sorted(router.ended) == ["cancelled", "unread"]
            assert await actor.live() == ()

    asyncio.run(run())


class _Slow(ToyDrafter):
    """A drafter that holds back its finished tokens until it may emit them."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.may_leave = threading.Event()
        self.has_made = threading.Event()

    def step(self, *, wait_s: float) -> ToyStep:
        result = super().step(wait_s=wait_s)
        if result.emissions:
            self.has_made.set()
            self.may_leave.wait(5.0)
        return result


@dataclass(frozen=True)
class _Leading(ToyStages):
    """Toy stages with this leader."""

    leader: Callable[[EngineConfig], DraftLeader]

    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return self.leader(config)


@asynccontextmanager
async def _joined(
    drafter: ToyDrafter, *, ask_router: Router | None = None, config: EngineConfig = CONFIG
) -> AsyncIterator[tuple[DraftActor, Client]]:
    class Leader(ToyLeader):
        def join(self, epoch: Epoch, *, new_engine: bool) -> ToyDrafter:
            return drafter

    actor = DraftActor(
        config,
        name="p",
        stages=_Leading(Leader),
        telemetry=TelemetryOptions(model_name="toy"),
        ask_router=ask_router,
    )
    await actor.join(_epoch(1))
    client = Client(actor)
    yield actor, client
    await client.close()
    assert await actor.leave()


def _first(request: Request) -> Request:
    return replace(request, submission=1)


def _again(request: Request) -> Request:
    return replace(request, submission=2)


def test_tokens_still_on_their_way_when_a_request_is_moved_out_are_not_those_of_its_return() -> (
    None
):
    async def run() -> None:
        drafter = _Slow(CONFIG)
        async with _joined(drafter) as (actor, client):
            request = _request("back", max_tokens=6)
            await client.submit(_first(request))
            await asyncio.to_thread(drafter.has_made.wait, 5.0)
            assert await actor.evict(None, Migrated(by="p", to=None, reason="test")) == 1
            assert await client.tokens(_first(request)) == []
            await client.submit(_again(request))
            await asyncio.sleep(0.05)
            drafter.may_leave.set()
            expected = [toy_token(request, 1 + i) for i in range(6)]
            assert await client.tokens(_again(request)) == expected

    asyncio.run(run())


def test_the_last_token_of_an_earlier_submission_ends_no_later_one_for_the_router() -> None:
    async def run() -> None:
        drafter, router = _Slow(CONFIG), Router()
        async with _joined(drafter, ask_router=router) as (actor, client):
            request = _first(_request("back", max_tokens=TOKENS_PER_ROUND))
            await client.submit(request)
            await asyncio.to_thread(drafter.has_made.wait, 5.0)
            await actor.evict(None, Migrated(by="p", to=None, reason="test"))
            assert isinstance(await client.error(request), Migrated)
            longer = _again(_request("back", max_tokens=100_000))
            await client.submit(longer)
            await asyncio.sleep(0.05)
            drafter.may_leave.set()
            await client.next(longer)
            await asyncio.sleep(0.5)
            assert router.live == {"back"}
            assert router.ended == ["back"], "as it was moved out, and not again"
            await actor.cancel(longer.request_id, longer.submission)
            await asyncio.sleep(0.5)
            assert router.live == set()

    asyncio.run(run())


def test_a_cancellation_that_overtook_its_submission_counts() -> None:
    async def run() -> None:
        drafter = ToyDrafter(CONFIG)
        async with _joined(drafter) as (actor, client):
            request = _request("early", max_tokens=4)
            await actor.cancel(request.request_id, 1)
            await client.submit(_first(request))
            assert "was cancelled" in str(await client.error(_first(request)))
            assert drafter.load().num_running == 0
            await client.submit(_again(request))
            assert len(await client.tokens(_again(request))) == 4

    asyncio.run(run())


def test_a_submission_that_overtook_the_cancellation_of_the_one_before_stays() -> None:
    async def run() -> None:
        async with _joined(ToyDrafter(CONFIG)) as (actor, client):
            request = _request("late", max_tokens=20)
            await client.submit(_first(request))
            await client.next(_first(request))
            await client.submit(_again(request))
            await asyncio.sleep(0.05)
            await actor.cancel(request.request_id, 1)
            assert len(await client.tokens(_again(request))) == 20

    asyncio.run(run())


def test_a_submission_that_is_not_newer_than_the_one_that_is_served_is_refused() -> None:
    async def run() -> None:
        async with _joined(ToyDrafter(CONFIG)) as (actor, client):
            request = _again(_request("twice", max_tokens=20))
            await client.submit(request)
            await client.submit(_first(request))
            assert isinstance(await client.error(_first(request)), RequestError)
            assert len(await client.tokens(request)) == 20
            assert await actor.live() == ()

    asyncio.run(run())


def test_a_crash_counts_against_the_requests_in_the_engine_and_says_whether_one_was_alone() -> None:
    async def run() -> None:
        drafter = _Slow(CONFIG)
        async with _joined(drafter) as (actor, client):
            first, second = _request("one"), _request("two")
            await client.submit(first)
            await client.submit(second)
            assert await actor.live() == ("one", "two")
            drafter.may_leave.set()
            assert await actor.leave(EngineError("index out of range"), True)
            for request in (first, second):
                error = await client.error(request)
                assert isinstance(error, EngineCrashed)
                assert not error.was_alone
                assert "index out of range" in str(error)
            await client.submit(_again(first))
            assert "between two epochs" in str(await client.error(_again(first)))

            await actor.join(_epoch(2))
            assert drafter.load().num_running == 0, "the engine was kept, its requests were not"
            drafter.may_leave.clear()
            drafter.has_made.clear()
            suspect = replace(_again(first), submission=3, is_suspect=True)
            await client.submit(suspect)
            await client.submit(_again(second))
            await asyncio.to_thread(drafter.has_made.wait, 5.0)
            drafter.may_leave.set()
            assert await actor.leave(EngineError("index out of range"), True)
            crashed = await client.error(suspect)
            assert isinstance(crashed, EngineCrashed)
            assert crashed.was_alone
            assert isinstance(await client.error(_again(second)), PeerLost), "it was not inside"
            assert await actor.live() == ()

    asyncio.run(run())


def test_the_loss_of_a_peer_counts_against_no_request() -> None:
    async def run() -> None:
        async with _joined(ToyDrafter(CONFIG)) as (actor, client):
            request = _request("r")
            await client.submit(request)
            await client.next(request)
            lost = PeerLost(peer="verify rank 1", operation="receive", reason="it was killed")
            assert await actor.leave(lost)
            error = await client.error(request)
            assert isinstance(error, PeerLost)
            assert "verify rank 1" in str(error)

    asyncio.run(run())


class _Entries(_Slow):
    """Records the requests that were live when one entered."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.refused: set[str] = set()
        self.entries: list[tuple[str, set[str]]] = []

    def add(self, request: Request) -> None:
        if request.request_id in self.refused:
            raise RequestError("not this one", param="prompt")
        self.entries.append((request.request_id, set(self._live)))
        super().add(request)


def test_a_suspect_waits_until_no_round_with_another_request_is_in_flight_and_is_then_alone() -> (
    None
):
    async def run() -> None:
        drafter = _Entries(CONFIG)
        async with _joined(drafter) as (_, client):
            other = _first(_request("other", max_tokens=40))
            suspect = replace(_request("suspect", max_tokens=40), is_suspect=True)
            await client.submit(other)
            await asyncio.to_thread(drafter.has_made.wait, 5.0)
            await client.submit(suspect)
            migrated = await client.error(other)
            assert isinstance(migrated, Migrated)
            assert (migrated.by, migrated.to) == ("", None), "any pipeline, this one too"
            await client.submit(_again(other))
            await asyncio.sleep(0.2)
            assert drafter.entries == [("other", set())], "a round is in flight"
            drafter.may_leave.set()
            tokens = await client.tokens(suspect)
            assert tokens == [toy_token(suspect, 1 + i) for i in range(40)]
            assert await client.tokens(_again(other)) == [
                toy_token(other, 1 + i) for i in range(40)
            ]
            assert drafter.entries[1:] == [("suspect", set()), ("other", {"suspect"})], (
                "it was cleared with its first token"
            )

    asyncio.run(run())


def test_a_suspect_that_the_engine_refuses_lets_the_others_in(tmp_path: Path) -> None:
    config = EngineConfig.model_validate({"model": {"path": str(tmp_path)}})

    async def run() -> None:
        drafter = _Entries(config)
        drafter.may_leave.set()
        drafter.refused.add("refused")
        async with _joined(drafter) as (_, client):
            rejected, second = (
                replace(_request(name), is_suspect=True) for name in ("refused", "second")
            )
            ordinary, other = _request("ordinary"), _request("other", max_tokens=4)
            with held(config, at=0):  # no round that ends would look at the queue
                await client.submit(ordinary)
                await asyncio.sleep(0.2)
                await client.submit(rejected)
                await client.submit(other)
                await client.submit(second)
                assert isinstance(await client.error(second), CapacityError)
                assert isinstance(await client.error(ordinary), Migrated)
                assert isinstance(await client.error(rejected), RequestError)
                assert drafter.entries == [("ordinary", set()), ("other", set())]
            assert len(await client.tokens(other)) == 4

    asyncio.run(run())


@pytest.mark.parametrize("how", ["cancelled", "evicted", "unread"])
def test_a_suspect_that_leaves_before_its_first_token_lets_the_others_in(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_actor, "_LOOK_S", 0.05)
    monkeypatch.setattr(drafting_actor, "_UNREAD_S", 0.3)
    config = EngineConfig.model_validate({"model": {"path": str(tmp_path)}})

    async def run() -> None:
        drafter = _Entries(config)
        drafter.may_leave.set()
        async with _joined(drafter) as (actor, client):
            suspect = replace(_request("suspect"), is_suspect=True)
            other = _request("other", max_tokens=4)
            with held(config, at=0):  # no round that ends would look at the queue
                await actor.submit(suspect, "a client that has died")
                await client.submit(other)
                await asyncio.sleep(0.2)
                assert drafter.entries == [("suspect", set())]
                if how == "cancelled":
                    await actor.cancel(suspect.request_id, suspect.submission)
                elif how == "evicted":
                    moved = Migrated(by="p", to=None, reason="test")
                    await actor.evict([suspect.request_id], moved)
                else:
                    await asyncio.sleep(1.0)
                assert drafter.entries[1:] == [("other", set())]
            assert len(await client.tokens(other)) == 4

    asyncio.run(run())


def test_the_queue_behind_a_suspect_is_bounded() -> None:
    async def run() -> None:
        config = EngineConfig.model_validate(
            {"model": {"path": "."}, "scheduler": {"max_waiting": 2}}
        )
        drafter = _Slow(config)
        async with _joined(drafter, config=config) as (_, client):
            suspect = replace(_request("suspect", max_tokens=TOKENS_PER_ROUND), is_suspect=True)
            others = [_request(str(i), max_tokens=4) for i in range(3)]
            await client.submit(suspect)
            await asyncio.to_thread(drafter.has_made.wait, 5.0)
            for request in others:
                await client.submit(request)
            assert isinstance(await client.error(others[2]), QueueFull)
            drafter.may_leave.set()
            assert len(await client.tokens(suspect)) == TOKENS_PER_ROUND
            for request in others[:2]:
                assert len(await client.tokens(request)) == 4

    asyncio.run(run())


def test_the_streams_of_a_client_that_reads_no_more_end_and_those_of_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting_actor, "_LOOK_S", 0.05)
    monkeypatch.setattr(drafting_actor, "_UNREAD_S", 0.3)

    async def run() -> None:
        drafter = ToyDrafter(CONFIG)
        async with _joined(drafter) as (actor, client):
            request = _request("read", max_tokens=60)
            suspect = replace(_request("unread"), is_suspect=True)
            await actor.submit(suspect, "a client that has died")
            await client.submit(request)
            await asyncio.sleep(1.0)
            assert "unread" not in await actor.live()
            assert len(await client.tokens(request)) == 60
            assert drafter.load().num_running == 0

    asyncio.run(run())


LEASE = Lease(owner="supervisor", seconds=60.0)


class _Spinning(ToyDrafter):
    """A loop that runs rounds for its requests which make nothing, but when told to."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.num_emitted = 0
        self.num_prefill_rows = 0

    def step(self, *, wait_s: float) -> ToyStep:
        (round_stats,) = super().step(wait_s=wait_s).rounds or (None,)
        if round_stats is None:
            return ToyStep()
        stats = replace(
            round_stats, num_emitted=self.num_emitted, num_prefill_rows=self.num_prefill_rows
        )
        self.num_emitted = self.num_prefill_rows = 0
        return ToyStep(rounds=(stats,))


def test_with_requests_only_tokens_and_prompt_rows_are_progress_and_without_every_turn_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        drafter = _Spinning(CONFIG)

        async with _joined(drafter) as (actor, client):

            async def progress() -> int:
                await asyncio.sleep(0.2)
                status = await actor.beat(LEASE)
                assert (status.epoch, status.is_busy, status.phase) == (1, True, "")
                return status.progress

            assert len({await progress() for _ in range(3)}) == 3, "an idle loop turns"
            await client.submit(_request("r", max_tokens=100_000))
            spinning = {await progress() for _ in range(3)}
            assert len(spinning) == 1
            assert (await actor.stats()).num_rounds > 10, "though it has run rounds"
            drafter.num_emitted = 3
            assert await progress() == min(spinning) + 3
            drafter.num_prefill_rows = 500
            assert await progress() == min(spinning) + 503
            assert (await actor.beat(LEASE)).num_live == 1
            monkeypatch.setattr(NoPages, "num_moved", 2)
            assert (await actor.beat(LEASE)).num_moved == 2
            assert await progress() == min(spinning) + 503, "pages are counted apart"
            await actor.cancel(RequestId("r"), 0)
            assert len({await progress() for _ in range(3)}) == 3

    asyncio.run(run())


def test_a_heartbeat_between_epochs_says_what_the_worker_is_at() -> None:
    async def run() -> None:
        actor, leader = _connecting()

        def loads(num_bytes: int) -> None:
            progress = LoadProgress(
                bytes_done=num_bytes, bytes_total=100, piece="layer 1", seconds=1.0
            )
            leader.loading.of("drafting actor")(progress)

        status = await actor.beat(LEASE)
        assert (status.epoch, status.is_busy, status.num_live) == (0, False, 0)
        loads(40)
        status = await actor.beat(LEASE)
        assert (status.phase, status.progress, status.is_busy) == ("loading", 40, True)
        assert status.allowed_s > 0
        loads(100)
        note_slow_kernel("products of this test")
        status = await actor.beat(LEASE)
        assert not status.is_busy
        assert "products of this test" in status.slow_kernels
        connecting = asyncio.ensure_future(actor.connect(_epoch(3)))
        await asyncio.to_thread(leader.has_begun.wait, 5.0)
        status = await actor.beat(LEASE)
        assert (status.epoch, status.phase, status.is_busy) == (0, "joining an epoch", True)
        leader.may_connect.set()
        await connecting
        assert await actor.leave()

    asyncio.run(run())


def test_a_supervisor_that_has_lost_its_worker_learns_it_from_the_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = ProcessInfo(pid=1, host="h", node_id="n")
    monkeypatch.setattr(tenure, "process_info", lambda: info)

    async def run() -> None:
        identity = WorkerIdentity(app="a", pipeline="p", slot="drafting actor", digest="d")
        for actor in (
            DraftActor(CONFIG, name="p", **_OPTIONS, tenure=partial(_tenure, identity)),
            RankActor(
                CONFIG,
                name="verify rank 0",
                stage="verify",
                rank=0,
                **_OPTIONS,
                tenure=partial(_tenure, identity),
            ),
        ):
            await actor.join(_epoch(4))
            await actor.beat(LEASE)
            tenancy = await actor.tenancy()
            assert (tenancy.owner, tenancy.epoch, tenancy.identity) == ("supervisor", 4, identity)
            other = Lease(owner="another", seconds=60.0)
            assert await actor.claim(other, "supervisor") == identity
            assert (await actor.beat(other)).epoch == 4
            with pytest.raises(LeaseLost, match="another supervisor"):
                await actor.beat(LEASE)
            assert await actor.leave()

    asyncio.run(run())


def _tenure(identity: WorkerIdentity) -> Tenure:
    return Tenure(identity, lease_s=60.0, expired=lambda: None)


def test_whether_a_lease_has_held_is_not_known_between_two_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        source = LeaseSource()
        source.may_lease.set()
        async with _joined(ToyDrafter(CONFIG)) as (actor, _):
            monkeypatch.setattr(type(actor._leader), "sharing", source)
            assert await actor.return_pages((await actor.lease_pages(None, 1.0)).number)
            lease = await actor.lease_pages(None, 1.0)
            await actor.leave()
            assert not await actor.return_pages(lease.number)
            assert source.leased == {}

    asyncio.run(run())


class LeaseSource:
    """The leases of an actor."""

    def __init__(self) -> None:
        self.leased: dict[str, float] = {}
        self.may_lease = threading.Event()

    def lease(self, request_ids: object, *, lasts_s: float) -> PageLease:
        del request_ids
        self.may_lease.wait(5.0)
        self.leased["n1"] = time.monotonic() + lasts_s
        return PageLease(number="n1", requests=())

    def end_lease(self, number: str) -> bool:
        return self.leased.pop(number, None) is not None

    def expire(self) -> None:
        for number, until_s in list(self.leased.items()):
            if time.monotonic() > until_s:
                self.end_lease(number)


def test_a_lease_comes_to_its_end_when_the_target_has_given_up_before_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting_actor, "_LEASE_MARGIN_S", 0.2)
    monkeypatch.setattr(drafting_actor, "_LOOK_S", 0.05)

    async def run() -> None:
        source = LeaseSource()
        async with _joined(ToyDrafter(CONFIG)) as (actor, _):
            monkeypatch.setattr(type(actor._leader), "sharing", source)
            leasing = asyncio.ensure_future(actor.lease_pages(None, 0.01))
            await asyncio.sleep(0.05)
            leasing.cancel()
            source.may_lease.set()
            await until(lambda: "n1" in source.leased)
            await until(lambda: not source.leased)

    asyncio.run(run())


class _Connecting(ToyLeader):
    """Connects when allowed, and counts how often the connection was undone."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.has_begun = threading.Event()
        self.may_connect = threading.Event()
        self.num_running = 0
        self.num_undone = 0

    def connect(self, epoch: Epoch) -> None:
        self.num_running += 1
        self.has_begun.set()
        self.may_connect.wait(10.0)
        self.num_running -= 1

    def disconnect(self) -> None:
        self.num_undone += 1


def _connecting() -> tuple[DraftActor, _Connecting]:
    config = EngineConfig.model_validate({"model": {"path": "."}})
    leader = _Connecting(config)
    actor = DraftActor(
        config,
        name="p",
        stages=_Leading(lambda _: leader),
        telemetry=TelemetryOptions(model_name="toy"),
    )
    actor._joining = Joining(name="p", leave_wait_s=0.05)
    return actor, leader


def _epoch(number: int) -> Epoch:
    store = Address(host="nowhere", port=1)
    return Epoch(number=number, store=store, num_verify_ranks=1, timeout_s=1.0, num_pages=8)


def test_a_worker_that_is_stuck_in_connecting_has_not_left() -> None:
    async def run() -> None:
        actor, leader = _connecting()
        connecting = asyncio.ensure_future(actor.connect(_epoch(1)))
        await asyncio.to_thread(leader.has_begun.wait, 5.0)
        assert not await actor.leave()
        assert leader.num_undone == 1
        leader.may_connect.set()
        with pytest.raises(PeerLost, match="its epoch was left"):
            await connecting
        assert leader.num_undone == 2, "a late connection is undone"
        assert await actor.leave()

    asyncio.run(run())


def test_what_was_connected_is_undone_by_leaving_and_cannot_be_joined_after() -> None:
    async def run() -> None:
        actor, leader = _connecting()
        leader.may_connect.set()
        await actor.connect(_epoch(1))
        assert leader.num_undone == 0
        assert await actor.leave()
        assert leader.num_undone == 1
        with pytest.raises(PeerLost, match="its epoch was left"):
            await actor.join(_epoch(1))
        await actor.connect(_epoch(2))
        await actor.join(_epoch(2))
        assert leader.num_undone == 1
        assert await actor.leave()

    asyncio.run(run())


def test_a_connection_waits_for_the_one_before_it_and_outlives_it() -> None:
    async def run() -> None:
        actor, leader = _connecting()
        overtaken = asyncio.ensure_future(actor.connect(_epoch(1)))
        await asyncio.to_thread(leader.has_begun.wait, 5.0)
        newest = asyncio.ensure_future(actor.connect(_epoch(2)))
        await asyncio.sleep(0.05)
        assert leader.num_running == 1
        leader.may_connect.set()
        with pytest.raises(PeerLost, match="a newer epoch began"):
            await overtaken
        await newest
        assert leader.num_undone == 1
        assert await actor.leave()

    asyncio.run(run())


@dataclass(frozen=True)
class _ToyText:
    """Stands for the features of a text."""

    request_id: RequestId
    num_tokens: int


class _Featuring(ToyDrafter):
    """A drafter that also returns ended texts as a whole."""

    def step(self, *, wait_s: float) -> ToyStep:
        result = super().step(wait_s=wait_s)
        ended = [emission for emission in result.emissions if emission.finish_reason is not None]
        return replace(
            result,
            features=tuple(
                _ToyText(emission.request_id, len(emission.tokens)) for emission in ended
            ),
        )


def test_a_text_with_features_has_no_stream_and_answers_its_call() -> None:
    async def run() -> None:
        drafter, router = _Featuring(CONFIG), Router()
        async with _joined(drafter, ask_router=router) as (actor, client):
            text = await actor.text_features(_request("text", max_tokens=4))
            assert text == _ToyText(RequestId("text"), TOKENS_PER_ROUND)  # type: ignore[comparison-overlap]
            assert await actor.live() == ()
            assert router.met == []
            stream = _request("stream", max_tokens=4)
            await client.submit(stream)
            assert len(await client.tokens(stream)) == 4, "others are dropped where none waits"

    asyncio.run(run())


def test_a_text_whose_caller_has_left_is_not_generated_further() -> None:
    async def run() -> None:
        drafter = ToyDrafter(CONFIG)
        async with _joined(drafter) as (actor, _):
            call = asyncio.ensure_future(actor.text_features(_request("text", max_tokens=10**6)))
            await until(lambda: drafter.load().num_running == 1)
            call.cancel()
            await until(lambda: drafter.load().num_running == 0)

    asyncio.run(run())


def test_a_lost_epoch_ends_texts_with_the_reason_and_the_next_one_begins_without_them() -> None:
    async def run() -> None:
        drafter = ToyDrafter(CONFIG)
        async with _joined(drafter) as (actor, client):
            text = asyncio.ensure_future(actor.text_features(_request("text", max_tokens=10**6)))
            stream = _request("stream", max_tokens=10**6)
            await client.submit(stream)
            await until(lambda: drafter.load().num_running == 2)
            assert await actor.leave(EngineError("index out of range"), True)
            with pytest.raises(PeerLost, match="index out of range"):
                await text
            error = await client.error(stream)
            assert isinstance(error, EngineCrashed)
            assert not error.was_alone, "the text may have been the cause"
            with pytest.raises(PeerLost, match="between two epochs"):
                await actor.text_features(_request("text"))
            await actor.join(_epoch(2))
            assert drafter.load().num_running == 0

    asyncio.run(run())


def test_texts_leave_the_engine_for_a_request_that_is_tested_alone() -> None:
    async def run() -> None:
        drafter = _Slow(CONFIG)
        drafter.may_leave.set()
        async with _joined(drafter) as (actor, client):
            text = asyncio.ensure_future(actor.text_features(_request("text", max_tokens=10**6)))
            await until(lambda: drafter.load().num_running == 1)
            drafter.may_leave.clear()
            suspect = replace(_request("suspect", max_tokens=4), is_suspect=True)
            await client.submit(suspect)
            with pytest.raises(CapacityError, match="tested alone"):
                await text
            with pytest.raises(CapacityError, match="tested alone"):
                await actor.text_features(_request("another"))
            drafter.may_leave.set()
            assert len(await client.tokens(suspect)) == 4

    asyncio.run(run())
